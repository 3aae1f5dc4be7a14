"""The figures of a plan, each from the model's dimensions and the workload alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from trace_serve.plan.roofline import (
    BF16_BITS,
    NVFP4_BITS,
    filled_tokens_per_second,
    kv_capacity_tokens,
    kv_sequence_bytes,
    weight_bytes,
)
from trace_serve.plan.schemes import SCHEMES, Scheme, scheme
from trace_serve.plan.workload import Workload
from trace_serve.policy.dims import ModelDims


@dataclass(frozen=True)
class Figure:
    """One line of the plan: `value` in `unit` (infinite where BF16 cannot run at all), `text` as it is printed."""

    key: str
    label: str
    value: float
    unit: str
    text: str


@dataclass(frozen=True)
class PlanTable:
    """The figures of one model under one workload, in the order in which they are printed."""

    model: ModelDims
    workload: Workload
    figures: tuple[Figure, ...]

    def __getitem__(self, key: str) -> float:
        return next(figure.value for figure in self.figures if figure.key == key)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values; an infinite figure is null."""
        return {
            "model": asdict(self.model),
            "workload": asdict(self.workload),
            "figures": {
                figure.key: {"value": figure.value if math.isfinite(figure.value) else None, "unit": figure.unit}
                for figure in self.figures
            },
        }


def plan(model: ModelDims, workload: Workload | None = None) -> PlanTable:
    """Computes every figure; the default workload is the paper's step and one GB200."""
    load = workload or Workload()
    figures = (*_hint_figures(model, load), *_kv_figures(model), *_roofline_figures(model, load))
    return PlanTable(model, load, figures)


def scheme_rows(model: ModelDims, load: Workload) -> list[dict[str, object]]:
    """What each hint scheme costs, as JSON values.

    `share_of_link` is the part of the network link that the hints of a full NVFP4 memory decoding at its roofline take.
    """
    rate = filled_tokens_per_second(model, load, NVFP4_BITS, state=bool(model.state_values))
    return [_scheme_row(each, model, load, rate) for each in SCHEMES]


def _scheme_row(row: Scheme, model: ModelDims, load: Workload, rate: float) -> dict[str, object]:
    size = row.bytes_per_token(model)
    step = size * load.step_tokens
    return {
        "key": row.key,
        "label": row.label,
        "offered": row.offered,
        "bits_per_value": row.bits,
        "bytes_per_token": size,
        "bytes_per_step": step,
        "link_minutes": step / load.link_gb_s / 1e9 / 60,
        "disk_hours": step / load.disk_gb_s / 1e9 / 3600,
        "share_of_link": size * rate / (load.link_gb_s * 1e9),
        "repaired": row.repaired,
        "kl": row.kl,
    }


def _bytes(key: str, label: str, value: float) -> Figure:
    return Figure(key, label, value, "B", f"{value:,.0f} B")


def _ratio(key: str, label: str, value: float) -> Figure:
    return Figure(key, label, value, "x", f"{value:.2f}x" if math.isfinite(value) else "BF16 does not fit")


def _hint_figures(model: ModelDims, load: Workload) -> tuple[Figure, ...]:
    values = model.hinted_values()
    full, default, paper = (scheme(key).bytes_per_token(model) for key in ("full", "default", "paper"))
    step = full * load.step_tokens
    minutes, hours = step / load.link_gb_s / 1e9 / 60, step / load.disk_gb_s / 1e9 / 3600
    default_step = default * load.step_tokens
    return (
        Figure("values_per_token", "expert inputs, K and V a token", values, "values", f"{values:,}"),
        _bytes("full_bytes_per_token", "full codes and scales a token", full),
        Figure(
            "full_bytes_per_step",
            f"a step of {load.trajectories:,} x {load.trajectory_tokens:,} tokens",
            step,
            "B",
            f"{step / 1e12:.1f} TB = {step / 2**40:.1f} TiB",
        ),
        Figure("link_minutes", f"moved at {load.link_gb_s:g} GB/s", minutes, "min", f"{minutes:.1f} min"),
        Figure("disk_hours", f"written and read at {load.disk_gb_s:g} GB/s", hours, "h", f"{hours:.1f} h"),
        _bytes("paper_hint_bytes_per_token", "hints a token, deeper half, whole scale bytes (paper)", paper),
        _ratio("paper_hint_reduction", "less than full codes", full / paper),
        _bytes("hint_bytes_per_token", "hints a token, every layer, lowest scale bit (default)", default),
        Figure("hint_bytes_per_step", "the same a step", default_step, "B", f"{default_step / 1e12:.1f} TB"),
    )


def _kv_figures(model: ModelDims) -> tuple[Figure, ...]:
    values = len(model.attention_layers) * model.kv_values
    bf16, fp4 = values * BF16_BITS / 8, values * NVFP4_BITS / 8
    return (
        _bytes("kv_bytes_bf16", "KV cache a token, BF16", bf16),
        _bytes("kv_bytes_nvfp4", "KV cache a token, NVFP4", fp4),
        _ratio("kv_reduction", "less KV cache", BF16_BITS / NVFP4_BITS),
    )


def _roofline_figures(model: ModelDims, load: Workload) -> tuple[Figure, ...]:
    def need(bits: float) -> float:
        return weight_bytes(model, bits) + load.batch * kv_sequence_bytes(model, load, bits)

    def gain(state: bool) -> float:
        slow = filled_tokens_per_second(model, load, BF16_BITS, state=state)
        fast = filled_tokens_per_second(model, load, NVFP4_BITS, state=state)
        return fast / slow if slow else math.inf

    def gigabytes(key: str, label: str, value: float) -> Figure:
        return Figure(key, label, value, "B", f"{value / 1e9:.1f} GB")

    where = f"batch {load.batch}, context {load.context:,}"
    capacities = [
        Figure(key, label, tokens := kv_capacity_tokens(model, load, experts, kv), "tokens", f"{tokens:,.0f}")
        for key, label, experts, kv in (
            ("kv_capacity_bf16", "KV cache tokens that fit beside the weights, BF16", BF16_BITS, BF16_BITS),
            ("kv_capacity_nvfp4_kv", "the same, KV cache in NVFP4", BF16_BITS, NVFP4_BITS),
            ("kv_capacity_nvfp4", "the same, experts and KV cache in NVFP4", NVFP4_BITS, NVFP4_BITS),
        )
    ]
    figures = [
        gigabytes("weights_bf16", "weights, BF16", weight_bytes(model, BF16_BITS)),
        gigabytes("weights_nvfp4", "weights, experts in NVFP4", weight_bytes(model, NVFP4_BITS)),
        gigabytes("memory_bf16", f"weights and KV cache at {where}, BF16", need(BF16_BITS)),
        gigabytes("memory_nvfp4", f"weights and KV cache at {where}, NVFP4", need(NVFP4_BITS)),
        *capacities,
        _ratio("equal_batch_ceiling", "ceiling of the speed-up at an equal batch", BF16_BITS / NVFP4_BITS),
        _ratio("equal_batch_speedup", f"traffic bound at {where}", need(BF16_BITS) / need(NVFP4_BITS)),
        _ratio("filled_speedup", "memory filled by a larger batch, state not counted", gain(state=False)),
    ]
    if model.state_values:
        figures.append(_ratio("filled_speedup_state", "the same with FP32 linear-attention state", gain(state=True)))
    return tuple(figures)
