"""`trace-serve plan`: what hints, KV cache and weights of a model cost, and what FP4 can gain at best.

Every figure follows from the model's dimensions and the stated machine; the figures of arXiv 2610.07767 for
Qwen3.5-35B-A3B come out of the defaults.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trace_serve.errors import ConfigError
from trace_serve.policy.dims import ModelDims, load_dims

BF16_BITS = 16.0
NVFP4_BITS = 4.5
"""Four bits a value and one E4M3 byte for 16 values."""
PAPER_HINT_BITS = 1.5
"""One mantissa bit a value and the whole scale byte."""
DEFAULT_HINT_BITS = 1.0625
"""One mantissa bit a value and the lowest bit of the scale byte."""
PAPER_SPEEDUP = 5.4
"""Rollout decode speed-up that the paper reports on 4 GB200 with SGLang alone."""


@dataclass(frozen=True)
class Workload:
    """What is run, and on what.

    Attributes:
        trajectories: sequences of a training step.
        trajectory_tokens: tokens of each.
        batch: sequences decoded together.
        context: tokens of KV cache a sequence.
        memory_gb: device memory in GB (10^9 bytes).
        usable: share of it for weights, KV cache and state.
        bandwidth_gb_s: device memory bandwidth.
        link_gb_s: network bandwidth for hints.
        disk_gb_s: storage bandwidth for hints, reading while writing.
    """

    trajectories: int = 4096
    trajectory_tokens: int = 262_144
    batch: int = 256
    context: int = 32_768
    memory_gb: float = 186.0
    usable: float = 0.88
    bandwidth_gb_s: float = 8000.0
    link_gb_s: float = 300.0
    disk_gb_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}: got {value}, expected a positive number", field=name)
        if self.usable > 1:
            raise ConfigError(f"usable: got {self.usable}, expected at most 1", field="usable")


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


def _bytes(key: str, label: str, value: float) -> Figure:
    return Figure(key, label, value, "B", f"{value:,.0f} B")


def _ratio(key: str, label: str, value: float) -> Figure:
    return Figure(key, label, value, "x", f"{value:.2f}x" if math.isfinite(value) else "BF16 does not fit")


def _hint_figures(model: ModelDims, load: Workload) -> tuple[Figure, ...]:
    values = model.hinted_values()
    deeper = model.hinted_values(model.layers // 2)
    full = values * NVFP4_BITS / 8
    step = full * load.trajectories * load.trajectory_tokens
    default = values * DEFAULT_HINT_BITS / 8
    paper = deeper * PAPER_HINT_BITS / 8
    minutes, hours = step / load.link_gb_s / 1e9 / 60, step / load.disk_gb_s / 1e9 / 3600
    default_step = default * load.trajectories * load.trajectory_tokens
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


def weight_bytes(model: ModelDims, expert_bits: float) -> float:
    """Bytes of all weights when routed experts take `expert_bits` a value and the rest is BF16."""
    return model.expert_parameters * expert_bits / 8 + model.other_parameters * BF16_BITS / 8


def filled_batch(model: ModelDims, load: Workload, bits: float, *, state: bool) -> float:
    """Sequences that fit beside the weights, experts and KV cache at `bits` a value; 0 where weights do not fit."""
    free = load.memory_gb * 1e9 * load.usable - weight_bytes(model, bits)
    return max(free, 0.0) / (_kv_sequence_bytes(model, load, bits) + (_state_bytes(model) if state else 0))


def filled_tokens_per_second(model: ModelDims, load: Workload, bits: float, *, state: bool) -> float:
    """Decode rate of a full memory when memory traffic is the only limit.

    A step reads every weight (a large batch touches every expert) and every sequence's KV cache once, and reads and
    writes its state; compute, communication and activations are free.
    """
    batch = filled_batch(model, load, bits, state=state)
    traffic = _kv_sequence_bytes(model, load, bits) + (2 * _state_bytes(model) if state else 0)
    return batch / ((weight_bytes(model, bits) + batch * traffic) / (load.bandwidth_gb_s * 1e9))


def _kv_sequence_bytes(model: ModelDims, load: Workload, bits: float) -> float:
    return len(model.attention_layers) * model.kv_values * load.context * bits / 8


def _state_bytes(model: ModelDims) -> int:
    """FP32 state of linear attention a sequence."""
    return model.state_values * 4


def _roofline_figures(model: ModelDims, load: Workload) -> tuple[Figure, ...]:
    def need(bits: float) -> float:
        return weight_bytes(model, bits) + load.batch * _kv_sequence_bytes(model, load, bits)

    def gain(state: bool) -> float:
        slow = filled_tokens_per_second(model, load, BF16_BITS, state=state)
        fast = filled_tokens_per_second(model, load, NVFP4_BITS, state=state)
        return fast / slow if slow else math.inf

    def gigabytes(key: str, label: str, value: float) -> Figure:
        return Figure(key, label, value, "B", f"{value / 1e9:.1f} GB")

    where = f"batch {load.batch}, context {load.context:,}"
    figures = [
        gigabytes("weights_bf16", "weights, BF16", weight_bytes(model, BF16_BITS)),
        gigabytes("weights_nvfp4", "weights, experts in NVFP4", weight_bytes(model, NVFP4_BITS)),
        gigabytes("memory_bf16", f"weights and KV cache at {where}, BF16", need(BF16_BITS)),
        gigabytes("memory_nvfp4", f"weights and KV cache at {where}, NVFP4", need(NVFP4_BITS)),
        _ratio("equal_batch_ceiling", "ceiling of the speed-up at an equal batch", BF16_BITS / NVFP4_BITS),
        _ratio("equal_batch_speedup", f"traffic bound at {where}", need(BF16_BITS) / need(NVFP4_BITS)),
        _ratio("filled_speedup", "memory filled by a larger batch, state not counted", gain(state=False)),
    ]
    if model.state_values:
        figures.append(_ratio("filled_speedup_state", "the same with FP32 linear-attention state", gain(state=True)))
    return tuple(figures)


def render(table: PlanTable) -> Table:
    """The plan as a rich table."""
    load = table.workload
    out = Table("figure", "value", title=table.model.name)
    out.columns[1].justify = "right"
    for figure in table.figures:
        out.add_row(figure.label, figure.text)
    out.caption = (
        f"device: {load.memory_gb:g} GB, {load.usable:.0%} usable, {load.bandwidth_gb_s:g} GB/s; memory traffic is the "
        f"only limit. The paper reports up to {PAPER_SPEEDUP}x for Qwen3.5-35B-A3B on 4 GB200."
    )
    return out


def plan_command(
    model: Annotated[str, typer.Option(help="Built-in name, config.json or model directory.")] = "qwen3.5-35b-a3b",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of KV cache a sequence.")] = 32_768,
    memory_gb: Annotated[float, typer.Option(help="Device memory, 10^9 bytes.")] = 186.0,
    bandwidth_gb_s: Annotated[float, typer.Option(help="Device memory bandwidth.")] = 8000.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what hints, KV cache and weights of a model cost, and the ceiling of an FP4 speed-up."""
    load = Workload(batch=batch, context=context, memory_gb=memory_gb, bandwidth_gb_s=bandwidth_gb_s)
    table = plan(load_dims(model), load)
    if as_json:
        typer.echo(json.dumps(table.to_dict(), indent=2))
    else:
        Console().print(render(table))
