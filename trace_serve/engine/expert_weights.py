"""Experts' weights as their NVFP4 image, on load and after every weight update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trace_serve.engine import expert_images, state
from trace_serve.engine.ranks import slice_of_weight
from trace_serve.errors import EngineError
from trace_serve.policy import expert_names


def quantize(layer: Any) -> None:
    """Replaces both weights by their NVFP4 image, one global scale a matrix (gate and up share theirs).

    SGLang calls this again after every weight update, for layers that the update did not touch too. An image is
    told from freshly loaded weights by its fingerprint, so that nothing is rotated or rounded twice. What came from a
    packed checkpoint is an image already. After a whole checkpoint everything is freshly loaded.

    Raises:
        EngineError: not on a CPU, or an update replaced the gate but not the up projection or the reverse.
    """
    engine = state.get()
    if layer.__dict__.get("_trace_generation") != expert_images.generation():
        layer.__dict__.update(_trace_generation=expert_images.generation(), _trace_w13_weight={}, _trace_w2_weight={})
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name).data
        if weight.device.type != "cpu":
            raise EngineError(f"trace_nvfp4 experts run on the CPU engine in this version, got device {weight.device}")
        parts = 2 if name == "w13_weight" else 1
        known: dict[int, tuple[int, ...]] = layer.__dict__[f"_trace_{name}"]
        new = [_is_new(layer.layer_id, expert, weight[expert], parts, known) for expert in range(weight.shape[0])]
        engine.ranks.require_same(new, f"what they loaded of layer {layer.layer_id} {name}")
        for expert in (expert for expert, is_new in enumerate(new) if is_new):
            rows = weight[expert]
            rows.copy_(_image(rows, parts))
            known[expert] = _fingerprint(rows, parts)
    engine.flush_counters()


def _is_new(layer: int, expert: int, rows: Tensor, parts: int, known: dict[int, tuple[int, ...]]) -> bool:
    """Whether a matrix holds freshly loaded weights that are no image yet; an image that was loaded becomes known."""
    found = _fingerprint(rows, parts)
    fresh = [a != b for a, b in zip(found, known.get(expert, (0,) * parts), strict=True)]
    if not any(fresh):
        return False
    images = [expert_images.holds(part) for part, is_fresh in zip(found, fresh, strict=True) if is_fresh]
    if all(images):
        known[expert] = found
        return False
    if any(images) or not all(fresh):
        raise EngineError(
            f"layer {layer} expert {expert}: the update replaced only one of gate and up, which share a global scale; "
            "send both"
        )
    return True


def _image(rows: Tensor, parts: int) -> Tensor:
    engine = state.get()
    if engine.ranks.size > 1:
        return slice_of_weight(engine.ranks, engine.spec.recipe, rows, parts, engine.counters)
    return engine.kernels.fake_quantize_weight(rows, parts=parts, counters=engine.counters)


def mark_loaded(model: Any, names: Iterable[str]) -> None:
    """Makes `quantize` take matrices for freshly loaded, whatever they hold: also when that looks like an image.

    Args:
        model: holds SGLang's FusedMoE layers.
        names: checkpoint names of all tensors that an update loaded.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    expert_images.forget()
    matrices = [m for name in names if (m := expert_names.parse(name.removesuffix(".weight"))) is not None]
    layers = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    for matrix in matrices:
        layer = layers[matrix.layer]
        known = layer.__dict__.get("_trace_w2_weight" if matrix.projection == "down" else "_trace_w13_weight", {})
        known.pop(layer._map_global_expert_id_to_local_expert_id(matrix.expert), None)


def _fingerprint(rows: Tensor, parts: int) -> tuple[int, ...]:
    """Identifies the content of each of the `parts` equal row groups of a BF16 matrix."""
    return tuple(expert_images.fingerprint(part) for part in rows.chunk(parts))
