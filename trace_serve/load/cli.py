"""`trace-serve load`: one run, a search for the highest rate, or two servers compared."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trace_serve.errors import ConfigError
from trace_serve.load.compare import Arm, compare
from trace_serve.load.files import make_directory, write_whole
from trace_serve.load.plan import LoadPlan, make_plan
from trace_serve.load.render import render
from trace_serve.load.render_many import comparison_html, render_comparison, render_search, search_html, step_line
from trace_serve.load.report import LoadReport
from trace_serve.load.runner import run_plan
from trace_serve.load.search import parse_range, search
from trace_serve.load.slo import load_slo

Url = Annotated[str, typer.Argument(help="Base URL of the server, e.g. http://127.0.0.1:8080")]
Out = Annotated[Path, typer.Option(help="Directory for reports; made if it is not there.")]
Processes = Annotated[int, typer.Option(min=1, help="Load processes on this machine.")]
Search = Annotated[str, typer.Option(help="LOW:HIGH in requests a second: find the highest rate that meets --slo.")]
Against = Annotated[str, typer.Option(help="URL of a second server to compare with the first, e.g. FP4 with BF16.")]
CompareHints = Annotated[bool, typer.Option(help="Compare the server with hints off and on.")]
Rounds = Annotated[int, typer.Option(min=2, help="Blocks of each arm in a comparison.")]


def load_command(
    url: Url,
    out: Out = Path("load"),
    processes: Processes = 1,
    search: Search = "",
    against: Against = "",
    compare_hints: CompareHints = False,
    rounds: Rounds = 5,
    **fields: Any,
) -> int:
    """Load-test a running server. Exit code: 0 the SLO was met, 1 missed, 2 the run is invalid.

    Keys are read from TRACE_SERVE_API_KEY and, for swaps, TRACE_SERVE_ADMIN_KEY.
    """
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"URL: got {url!r}, expected one that begins with http:// or https://", field="url")
    if sum((bool(search), bool(against), compare_hints)) > 1:
        raise ConfigError("--search: got it with another of --against and --compare-hints, expected one of them")
    if search:
        return _search(url, given, search, out, processes)
    plan = make_plan(given)
    load_slo(plan.slo)
    if against or compare_hints:
        return _compare(url, against, plan, rounds, out, processes)
    report = run_plan(plan, url, out, processes=processes)
    console = Console()
    console.print(render(report))
    console.print(f"{out / 'report.html'}", style="dim")
    return report.exit_code


def _search(url: str, given: dict[str, Any], bounds: str, out: Path, processes: int) -> int:
    low, high = parse_range(bounds)
    given = {"arrivals": "poisson", **given}
    if given["arrivals"] not in ("poisson", "constant") or "rate" in given:
        raise ConfigError("--search: sets the rate of poisson or constant arrivals itself; leave --rate out")
    load_slo(make_plan({**given, "rate": low}).slo)
    make_directory(out)
    console = Console()

    def run(rate: float) -> LoadReport:
        return run_plan(make_plan({**given, "rate": rate}), url, out / f"rate-{rate:.4g}", processes=processes)

    result = search(low, high, run, lambda step: console.print(step_line(step)))
    write_whole(out / "search.json", result.model_dump_json(indent=1) + "\n")
    write_whole(out / "search.html", search_html(result))
    console.print(render_search(result))
    return result.exit_code


def _compare(url: str, against: str, plan: LoadPlan, rounds: int, out: Path, processes: int) -> int:
    if against:
        if not against.startswith(("http://", "https://")):
            raise ConfigError(f"--against: got {against!r}, expected an http:// or https:// URL", field="against")
        first, second = Arm(name="a", host=url), Arm(name="b", host=against)
    else:
        first = Arm(name="hints-off", host=url, changes={"hints": "off"})
        second = Arm(name="hints-on", host=url, changes={"hints": "fetch" if plan.hints == "fetch" else "on"})
    make_directory(out)
    console = Console()

    def run(arm: Arm, block: LoadPlan, directory: Path) -> LoadReport:
        report = run_plan(block, arm.host, directory, processes=processes)
        console.print(f"{directory.name}: {report.requests_per_s:.2f} requests/s, SLO {report.verdict.value}")
        return report

    result = compare(first, second, plan, rounds, out, run)
    write_whole(out / "comparison.json", result.model_dump_json(indent=1) + "\n")
    write_whole(out / "comparison.html", comparison_html(result))
    console.print(render_comparison(result))
    return result.exit_code


def _with_fields_of_the_plan() -> None:
    """Gives the command one option for each field of `LoadPlan`; their texts are checked by the plan alone."""
    named = inspect.signature(load_command, eval_str=True)
    own = [each for each in named.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, field in LoadPlan.model_fields.items():
        default = "none" if field.default is None else field.default
        option = typer.Option(help=f"{field.description}; default {default}".replace("[", "\\["), show_default=False)
        kind: Any = bool if field.annotation is bool else str | None
        annotation = Annotated[kind, option]
        initial = False if kind is bool else None
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=initial, annotation=annotation))
    vars(load_command)["__signature__"] = named.replace(parameters=own)
    load_command.__annotations__ = {each.name: each.annotation for each in own}


_with_fields_of_the_plan()
