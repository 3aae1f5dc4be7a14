"""What must hold before two pass rates may be compared: the arms are what they claim, and see the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import PurePath

from pydantic import BaseModel, ConfigDict

from eval_gate.arms.evidence import ArmEvidence, CheckpointEvidence, EngineReport, LayerReport
from eval_gate.arms.records import PromptTokens, Role, SampleRecord
from trace_serve.errors import RecipeError
from trace_serve.recipe import Recipe


class Concern(StrEnum):
    """Kind of a finding; every kind keeps a verdict from being PASS or BLOCK."""

    UNPROVEN = "unproven"
    CONFOUNDED = "confounded"


class Finding(BaseModel):
    """One thing that is not as it must be, with what was got and what was expected."""

    model_config = ConfigDict(frozen=True)

    concern: Concern
    message: str


def check_arm(role: Role, evidence: ArmEvidence) -> list[Finding]:
    """Does the arm prove that it is what its role says: the serving arm FP4 under its recipe, the training arm BF16?"""
    report = evidence.report
    if report is None and evidence.checkpoint is not None:
        return [_unproven(fault) for fault in _checkpoint_faults(role, evidence.checkpoint)]
    if report is None:
        return [
            _unproven(
                f"the {role} arm has no /trace/report, so what it computes in is unknown; "
                f"name its checkpoint with --{role}-checkpoint"
            )
        ]
    faults = []
    if evidence.artifact_digest and report.policy_digest and report.policy_digest != evidence.artifact_digest:
        faults.append(
            f"the {role} arm loaded {_short(report.policy_digest)}, expected {_short(evidence.artifact_digest)}"
        )
    faults += _training_faults(report, evidence) if role is Role.TRAINING else _serving_faults(report, evidence)
    return [_unproven(fault) for fault in faults]


def _checkpoint_faults(role: Role, found: CheckpointEvidence) -> list[str]:
    faults = []
    if found.served_root is None or PurePath(found.served_root).name != found.directory:
        faults.append(f"the {role} arm serves {found.served_root!r}, expected the checkpoint {found.directory!r}")
    if role is Role.TRAINING:
        if found.quantization is not None or found.expert_layers_fp4:
            faults.append(f"the training arm's checkpoint is quantized ({found.quantization}), expected BF16")
    elif not found.expert_layers or found.expert_layers_fp4 != found.expert_layers:
        faults.append(
            f"the serving arm's checkpoint has packed FP4 experts in {found.expert_layers_fp4} of "
            f"{found.expert_layers} layers with experts, expected all of them"
        )
    return faults


def _training_faults(report: EngineReport, evidence: ArmEvidence) -> list[str]:
    if evidence.recipe_id is not None:
        # A trainer that fake-quantizes: it must do so under the recipe it was asked for.
        if report.mode == "fake_quantized" and report.recipe_id == evidence.recipe_id:
            return []
        return [
            f"the training arm runs in mode {report.mode!r} under {_short(report.recipe_id)}, "
            f"expected 'fake_quantized' under {_short(evidence.recipe_id)}"
        ]
    faults = []
    if report.mode != "bf16":
        faults.append(f"the training arm runs in mode {report.mode!r}, expected 'bf16'")
    for name, layers in (("experts", report.experts), ("kv", report.kv)):
        if layers.format != "bf16" or layers.layers_quantized:
            faults.append(
                f"the training arm's {name}: {layers.format} in {layers.layers_quantized} layers, expected bf16 in all"
            )
    return faults


def _serving_faults(report: EngineReport, evidence: ArmEvidence) -> list[str]:
    if report.mode != "fp4":
        return [f"the serving arm runs in mode {report.mode!r}, expected 'fp4'"]
    faults = []
    if report.recipe_id is None or report.recipe is None:
        return ["the serving arm does not say which recipe it runs under"]
    try:
        recipe = Recipe.from_dict(report.recipe)
    except (RecipeError, TypeError) as exc:
        return [f"the serving arm reports a recipe that is none: {exc}"]
    if recipe.recipe_id != report.recipe_id:
        faults.append(
            f"the serving arm's recipe hashes to {_short(recipe.recipe_id)}, but it states {_short(report.recipe_id)}"
        )
    if evidence.recipe_id is not None and report.recipe_id != evidence.recipe_id:
        faults.append(
            f"the serving arm runs recipe {_short(report.recipe_id)}, the policy's is {_short(evidence.recipe_id)}"
        )
    experts = sum(recipe.quantizes_experts(layer) for layer in range(report.experts.layers_total))
    kv = sum(recipe.quantizes_kv(layer) for layer in range(report.kv.layers_total))
    faults += _layer_faults("experts", report.experts, experts)
    faults += _layer_faults("KV cache", report.kv, kv)
    if experts + kv == 0:
        faults.append("the serving arm's recipe quantizes nothing, so there is no FP4 to judge")
    return faults


def _layer_faults(name: str, layers: LayerReport, expected: int) -> list[str]:
    if layers.layers_quantized != expected:
        return [
            f"the serving arm's {name}: {layers.layers_quantized} of {layers.layers_total} layers quantized, "
            f"expected {expected} by its recipe"
        ]
    if expected and "fp4" not in layers.format:
        return [f"the serving arm's {name}: format {layers.format!r}, expected nvfp4"]
    return []


def compare_arms(training: ArmEvidence, serving: ArmEvidence) -> list[Finding]:
    """Do both arms come from one base and see the same rendered prompts?"""
    findings = []
    if training.base_digest and serving.base_digest and training.base_digest != serving.base_digest:
        findings.append(
            _confounded(
                f"the serving policy was built from {_short(serving.base_digest)}, "
                f"the training arm is {_short(training.base_digest)}"
            )
        )
    findings += _compare_generation(training, serving)
    one, two = training.report, serving.report
    if one is None or two is None:
        return findings
    for name in ("tokenizer_digest", "chat_template_digest", "context_length", "vocab_size"):
        left, right = getattr(one, name), getattr(two, name)
        if left != right:
            findings.append(_confounded(f"{name}: training arm {_short(left)}, serving arm {_short(right)}"))
    return findings


def _compare_generation(training: ArmEvidence, serving: ArmEvidence) -> list[Finding]:
    one, two = training.generation, serving.generation
    if one is None or two is None:
        return []
    findings = []
    if set(one.stop_ids) != set(two.stop_ids):
        findings.append(
            _confounded(
                f"stop token ids: training arm {sorted(one.stop_ids)}, serving arm {sorted(two.stop_ids)}; "
                "one of them goes on where the other ends"
            )
        )
    for name in sorted({*one.sampling, *two.sampling}):
        left, right = one.sampling.get(name), two.sampling.get(name)
        if left != right:
            findings.append(_confounded(f"generation_config.json {name}: training arm {left}, serving arm {right}"))
    return findings


def compare_prompts(training: Mapping[str, SampleRecord], serving: Mapping[str, SampleRecord]) -> list[Finding]:
    """Did both arms see the same prompt tokens for each query?

    Token ids are compared where both arms told them, else the counts of prompt tokens; queries without either are
    skipped.
    """
    different = []
    for query_id, one in training.items():
        two = serving.get(query_id)
        if two is None:
            continue
        if one.prompt is not None and two.prompt is not None:
            if one.prompt != two.prompt:
                different.append(f"{query_id}: {describe_difference(one.prompt, two.prompt)}")
        elif None not in (one.prompt_tokens, two.prompt_tokens) and one.prompt_tokens != two.prompt_tokens:
            different.append(
                f"{query_id}: {one.prompt_tokens} prompt tokens in the training arm, "
                f"{two.prompt_tokens} in the serving arm"
            )
    return prompts_differ(different)


def compare_prompt_tokens(training: Mapping[str, PromptTokens], serving: Mapping[str, PromptTokens]) -> list[Finding]:
    """`compare_prompts` before anything is sampled."""
    return prompts_differ(
        [
            f"{query_id}: {describe_difference(one, serving[query_id])}"
            for query_id, one in training.items()
            if query_id in serving and serving[query_id] != one
        ]
    )


def prompts_differ(different: Sequence[str]) -> list[Finding]:
    """The finding for queries whose prompts are not the same; `different` has one line for each."""
    if not different:
        return []
    return [
        _confounded(
            f"rendered prompts differ in {len(different)} queries ({different[0]}): "
            "chat template, BOS or tokenizer is not the same"
        )
    ]


def describe_difference(training: PromptTokens, serving: PromptTokens) -> str:
    """Where two tokenized prompts part, in words."""
    one, two = training.head, serving.head
    if one[1:] and one[1:] == two[: len(one) - 1] and training.count == serving.count + 1:
        return f"the serving arm lacks the leading token {one[0]} (BOS?)"
    if two[1:] and two[1:] == one[: len(two) - 1] and serving.count == training.count + 1:
        return f"the serving arm has a leading token {two[0]} (BOS?) that the training arm lacks"
    for place, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return f"token {place} is {left} in the training arm and {right} in the serving arm"
    counts = f"{training.count} tokens in the training arm, {serving.count} in the serving arm"
    if training.tail != serving.tail:
        return f"{counts}; they end in {_ids(training.tail)} and {_ids(serving.tail)}"
    return f"{counts}; they differ in the middle"


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens[-4:]))


def _short(value: object) -> str:
    text = str(value)
    return text[:19] if text.startswith("sha256:") else text


def _unproven(message: str) -> Finding:
    return Finding(concern=Concern.UNPROVEN, message=message)


def _confounded(message: str) -> Finding:
    return Finding(concern=Concern.CONFOUNDED, message=message)
