"""A progress bar with the gap as it stands; the one renderer that runs before there is a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from eval_gate.report import format as fmt

if TYPE_CHECKING:
    from eval_gate.tally import Progress


@contextmanager
def live_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yields the callback for `run_gate`: one moving line an arm on a terminal, a line at every quarter elsewhere."""
    if not console.is_terminal:
        yield _quarterly(console)
        return
    bar = RichProgress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    )
    tasks = {}
    with bar:

        def update(progress: Progress) -> None:
            role = str(progress.role)
            if role not in tasks:
                tasks[role] = bar.add_task(role, total=progress.total, state="")
            bar.update(tasks[role], completed=progress.done, state=describe(progress))

        yield update


def _quarterly(console: Console) -> Callable[[Progress], None]:
    shown: set[tuple[str, str, int]] = set()

    def update(progress: Progress) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        mark = (str(progress.role), "starting" if progress.phase == "starting" else "", quarter)
        if mark not in shown:
            shown.add(mark)
            console.print(
                f"{progress.role:<9} {progress.done}/{progress.total} {describe(progress)}",
                highlight=False,
                soft_wrap=True,
            )

    return update


def describe(progress: Progress) -> str:
    """The changing part of one arm's line."""
    if progress.phase == "starting":
        return "starting"
    graded = progress.done - progress.failed
    parts = [f"pass {fmt.percent(progress.passed / graded)}" if graded else "pass -"]
    if progress.failed:
        parts.append(f"errors {progress.failed}")
    if progress.gap is not None:
        bounds = "" if progress.lower is None else f" {fmt.interval(progress.lower, progress.upper)}"
        parts.append(f"gap {fmt.points(progress.gap)}{bounds}")
    return ", ".join(parts)
