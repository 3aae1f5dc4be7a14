"""What an arm can show about itself: the engine's own report, and the digests of what it was started from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class LayerReport(BaseModel):
    """How one kind of tensor is kept in the engine, as the scheduler reported it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    format: str
    layers_quantized: int = Field(ge=0)
    layers_total: int = Field(ge=0)


class EngineReport(BaseModel):
    """The part of `GET /trace/report` that the gate relies on; the rest is kept as it came."""

    model_config = ConfigDict(extra="allow", frozen=True)

    schema_version: int
    mode: str
    recipe_id: str | None = None
    recipe: dict[str, Any] | None = None
    policy_digest: str | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    experts: LayerReport
    kv: LayerReport
    context_length: int | None = None
    vocab_size: int | None = None


class GenerationDefaults(BaseModel):
    """What a model's files say about sampling where a request is silent.

    Attributes:
        stop_ids: token ids that end an answer.
        sampling: settings of `generation_config.json` that servers apply when a request leaves them out.
    """

    model_config = ConfigDict(frozen=True)

    stop_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = Field(default_factory=dict)


class CheckpointEvidence(BaseModel):
    """Formats of the checkpoint behind an endpoint that does not report on itself.

    Attributes:
        directory: its name.
        quantization: as its configuration names it.
        kv_cache: format that its configuration asks for; None leaves it to the server.
        expert_layers: layers that have experts, `expert_layers_fp4` of them in packed FP4.
        served_root: what the endpoint says it serves; None when it does not say.
    """

    model_config = ConfigDict(frozen=True)

    directory: str
    quantization: str | None
    kv_cache: str | None
    expert_layers: int
    expert_layers_fp4: int
    layers_total: int
    served_root: str | None = None


class ArmEvidence(BaseModel):
    """Provenance of one arm.

    Attributes:
        source: the directory or URL, for readers.
        artifact_digest: digest of the directory; for an endpoint, the digest its report states; None when unknown.
        base_digest: digest of the directory that the policy was built from; the artifact's own for a plain model.
        recipe_id: recipe that the arm should run under; None for BF16 or unknown.
        policy_name: from the policy's manifest.
        policy_version: from the policy's manifest.
        runtime: what computes it where that is not an engine or a server: `transformers`.
        generation: stop ids and sampling defaults of the directory; None for an endpoint.
        checkpoint: formats of the files that the operator names for an endpoint.
        report: what the engine said is loaded; None for an endpoint without a report.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    artifact_digest: str | None = None
    base_digest: str | None = None
    recipe_id: str | None = None
    policy_name: str | None = None
    policy_version: str | None = None
    runtime: str | None = None
    generation: GenerationDefaults | None = None
    checkpoint: CheckpointEvidence | None = None
    report: EngineReport | None = None
