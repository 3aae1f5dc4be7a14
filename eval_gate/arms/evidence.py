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
    report: EngineReport | None = None
