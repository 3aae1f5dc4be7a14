"""An attribution on a terminal, and its progress while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from eval_gate.attribute.result import Attribution
from eval_gate.report import format as fmt
from eval_gate.report.terminal import COLOURS
from eval_gate.verdict import ArmSummary

if TYPE_CHECKING:
    from eval_gate.attribute.run import StepProgress

NOT_RECORDED = "n/r"


def print_attribution(found: Attribution, console: Console) -> None:
    """Prints the conclusions, every recipe that was tried, and how its answers moved."""
    lines = [Text(found.conclusions[0], style="bold"), *(Text(line) for line in found.conclusions[1:])]
    title = Text.assemble(("where the gap comes from  ", "bold"), found.described)
    console.print(Panel(Group(*lines), title=title, title_align="left"))
    if not found.steps:
        return
    console.print(_recipes(found))
    console.print(_answers(found))
    for reason in found.left_out:
        console.print(Text(f"not tried: {reason}", style="dim"))


def _recipes(found: Attribution) -> Table:
    table = Table(
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        caption=f"gap in points of {found.queries} queries, positive = lost; margin {100 * found.policy.margin:g}"
        + (" points" if found.policy.margin_kind == "absolute" else "% of the BF16 pass rate"),
        caption_justify="left",
    )
    table.add_column("", justify="right")
    table.add_column("in FP4", min_width=20)
    for column in ("gap", "interval", "lost", "gained", "outcome"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, step in enumerate(found.steps, start=1):
        paired = step.comparison
        table.add_row(
            str(number),
            step.described,
            fmt.points(paired.gap),
            fmt.interval(paired.lower, paired.upper),
            str(paired.only_training),
            str(paired.only_serving),
            Text(step.outcome, style=COLOURS[step.outcome]),
        )
    return table


def _answers(found: Attribution) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption=ANSWER_NOTE, caption_justify="left")
    for column in ("", *ANSWER_COLUMNS):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("BF16", *bf16_cells(found.bf16, found.bf16_refusals))
    for index in range(len(found.steps)):
        table.add_row(str(index + 1), *answer_cells(found, index))
    return table


ANSWER_COLUMNS = ("same", "at", "|dlogp|", "top-1", "KL k1", "KL k3", "routers", "cut", "repeat", "refuse")
ANSWER_NOTE = (
    "same: answers without a difference; at: median place of the first different token of the others; "
    "log-probabilities, top-1, KL and routers over the tokens that both saw in the same context; "
    f"cut: at the token limit; repeat: one unit to it; refuse: opens with a refusal; {NOT_RECORDED}: not recorded"
)


def bf16_cells(arm: ArmSummary, refusals: int) -> tuple[str, ...]:
    return (*("",) * 7, str(arm.truncated), str(arm.degenerate), str(refusals))


def answer_cells(found: Attribution, index: int) -> tuple[str, ...]:
    """How the answers of one step moved, in the order of `ANSWER_COLUMNS`."""
    step = found.steps[index]
    drift = step.drift
    return (
        str(drift.identical),
        "-" if drift.first_difference is None else f"{drift.first_difference:g}",
        number(drift.mean_abs_logprob),
        NOT_RECORDED if drift.top1 is None else fmt.percent(drift.top1),
        number(drift.kl_k1),
        number(drift.kl_k3),
        NOT_RECORDED if drift.router is None else fmt.percent(drift.router),
        str(step.serving.truncated),
        str(step.serving.degenerate),
        str(step.refusals),
    )


def number(value: float | None) -> str:
    return NOT_RECORDED if value is None else f"{value:.4f}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


@contextmanager
def live_steps(console: Console) -> Iterator[Callable[[StepProgress], None]]:
    """Yields the callback for `attribute`: a bar an engine on a terminal, a line when one begins and ends elsewhere."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    tasks: dict[int, TaskID] = {}
    with Progress(*columns, console=console) as bar:

        def update(progress: StepProgress) -> None:
            if progress.engine not in tasks:
                tasks[progress.engine] = bar.add_task(_name(progress), total=progress.total, state="")
            bar.update(tasks[progress.engine], completed=progress.done, state=_state(progress))

        yield update


def _lines(console: Console) -> Callable[[StepProgress], None]:
    shown: set[tuple[int, str]] = set()

    def update(progress: StepProgress) -> None:
        state = _state(progress)
        if (progress.engine, state) not in shown:
            shown.add((progress.engine, state))
            console.print(f"{_name(progress)}{': ' + state if state else ''}", highlight=False, soft_wrap=True)

    return update


def _name(progress: StepProgress) -> str:
    return f"{progress.engine}/{progress.budget} {progress.label}"


def _state(progress: StepProgress) -> str:
    if progress.reading is None:
        return ""
    paired = progress.reading.comparison
    return f"gap {fmt.points(paired.gap)} {fmt.interval(paired.lower, paired.upper)} {progress.reading.outcome}"
