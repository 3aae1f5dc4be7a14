"""`trace-serve plan`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trace_serve.plan.figures import PlanTable, plan, scheme_rows
from trace_serve.plan.hardware import Device, device_named
from trace_serve.plan.workload import Workload
from trace_serve.policy.dims import load_dims

PAPER_SPEEDUP = 5.4
"""Rollout decode speed-up that the paper reports on 4 GB200 with SGLang alone."""


def plan_command(
    model: Annotated[str, typer.Option(help="Built-in name, config.json or model directory.")] = "qwen3.5-35b-a3b",
    hardware: Annotated[str, typer.Option(help="gb200, b200 or h200.")] = "gb200",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of KV cache a sequence.")] = 32_768,
    trajectories: Annotated[int, typer.Option(help="Sequences of a training step.")] = 4096,
    trajectory_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 262_144,
    memory_gb: Annotated[float | None, typer.Option(help="Device memory, 10^9 bytes; default: the hardware's.")] = None,
    bandwidth_gb_s: Annotated[
        float | None, typer.Option(help="Device memory bandwidth; default: the hardware's.")
    ] = None,
    link_gb_s: Annotated[float, typer.Option(help="Network bandwidth for hints.")] = 300.0,
    disk_gb_s: Annotated[float, typer.Option(help="Storage bandwidth for hints.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what hints, KV cache and weights of a model cost, and the ceiling of an FP4 speed-up."""
    device = device_named(hardware)
    load = Workload(
        trajectories=trajectories,
        trajectory_tokens=trajectory_tokens,
        batch=batch,
        context=context,
        memory_gb=device.memory_gb if memory_gb is None else memory_gb,
        bandwidth_gb_s=device.bandwidth_gb_s if bandwidth_gb_s is None else bandwidth_gb_s,
        link_gb_s=link_gb_s,
        disk_gb_s=disk_gb_s,
    )
    table = plan(load_dims(model), load)
    schemes = scheme_rows(table.model, load)
    if as_json:
        typer.echo(json.dumps({**table.to_dict(), "hardware": vars(device), "hint_schemes": schemes}, indent=2))
        return
    console = Console()
    console.print(render(table, device))
    console.print(render_schemes(schemes))


def render(table: PlanTable, device: Device) -> Table:
    """The plan as a rich table."""
    load = table.workload
    out = Table("figure", "value", title=table.model.name)
    out.columns[1].justify = "right"
    for figure in table.figures:
        out.add_row(figure.label, figure.text)
    products = "" if device.fp4_products else " It has no FP4 products: experts are multiplied in BF16."
    out.caption = (
        f"{device.name}: {load.memory_gb:g} GB, {load.usable:.0%} usable, {load.bandwidth_gb_s:g} GB/s "
        f"({device.source}).{products} Memory traffic is the only limit. "
        f"The paper reports up to {PAPER_SPEEDUP}x for Qwen3.5-35B-A3B on 4 GB200."
    )
    return out


def render_schemes(rows: list[dict[str, Any]]) -> Table:
    """What hints cost under each scheme, as a rich table."""
    out = Table("hints", "bits", "B/token", "TB/step", "% of link", "repaired", "KL")
    for column in out.columns[1:]:
        column.justify = "right"
    for row in rows:
        out.add_row(
            row["label"] + ("" if row["offered"] else " *"),
            f"{row['bits_per_value']:g}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['bytes_per_step'] / 1e12:.1f}",
            f"{row['share_of_link']:.2%}",
            row["repaired"],
            "-" if row["kl"] is None else f"{row['kl']:g}",
        )
    out.caption = (
        "Bits a value; bit: the lowest of a code. All layers unless said; * not exported by the engine. "
        "Repaired codes and KL: measured on SmolLM2-135M as a mixture of four experts; mechanisms carry over, "
        "magnitudes may not. Link: what a full memory at its roofline writes."
    )
    return out
