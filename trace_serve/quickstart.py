"""`trace-serve quickstart`: two policies built from the sample model, gated, signed, served and asked, on this machine.

Every step can be interrupted and run again: what is there is kept, and a gate continues where it stopped.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trace_serve.errors import EXIT_INFRASTRUCTURE, ConfigError, EngineError, PatchError, TraceServeError
from trace_serve.recipe import PRESETS, Recipe

DEFAULT, MILD = "default", "mild"
RECIPES = {
    DEFAULT: PRESETS["default"],
    MILD: Recipe(experts="bf16", kv="nvfp4", kv_layers=(26, 27, 28, 29), k_rotation=64),
}
"""`mild` was chosen on the suite `support-dev`, not on the one the gate uses: of eleven milder recipes it was the one
whose upper bound of the loss lay furthest below the margin (docs/sample-recipes.md)."""
QUESTION = "What is the capital of France?"
CONCURRENCY = 24


@dataclass(frozen=True)
class Layout:
    """Where everything lies below the output directory; the mild policy's gate run is the root itself."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    def policy(self, preset: str) -> Path:
        return self.root / "policies" / f"sample-{preset}"

    def gate(self, preset: str) -> Path:
        return self.root if preset == MILD else self.root / preset

    @property
    def private_key(self) -> Path:
        return self.root / "keys" / "gate.pem"

    @property
    def public_key(self) -> Path:
        return self.root / "keys" / "gate.pub"

    @property
    def hints(self) -> Path:
        return self.root / "hints"


class Steps:
    """Numbered steps with their time, on one console."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self._total, self._number = console, total, 0

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Shows a title while its body runs, then the seconds it took; yields a function that adds to the title."""
        self._number += 1
        head = f"[bold]{self._number}/{self._total}[/] {title}"
        begin = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(head) as status:
                yield lambda text: status.update(f"{head} [dim]{escape(text)}[/]")
            self.console.print(f"{head} [dim]{time.monotonic() - begin:.0f} s[/]")
        else:
            self.console.print(head)
            yield lambda text: None
            self.console.print(f"    {time.monotonic() - begin:.0f} s")

    @contextmanager
    def gate(self, title: str) -> Iterator[Any]:
        """A step that draws the gate's own progress bars."""
        from eval_gate.report.progress import live_progress

        self._number += 1
        self.console.print(f"[bold]{self._number}/{self._total}[/] {title}")
        with live_progress(self.console) as update:
            yield update


def quickstart_command(
    out: Annotated[Path, typer.Option(help="Directory for everything the quickstart makes.")] = Path("runs/quickstart"),
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Leave the server up until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.", min=0, max=65535)] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove what an earlier run left first.")] = False,
) -> None:
    """Build, gate, sign, serve and ask the sample policies."""
    console = Console()
    layout = Layout(out)
    if fresh and out.exists():
        shutil.rmtree(out)
    begin = time.monotonic()
    run(layout, console, port=port, keep_serving=keep_serving)
    console.print(f"done in {(time.monotonic() - begin) / 60:.1f} minutes; everything is in {out}")


def run(layout: Layout, console: Console, *, port: int = 0, keep_serving: bool = False) -> None:
    """The whole quickstart.

    Raises:
        PatchError: SGLang is not patched.
        TraceServeError: a step failed; running again continues there.
    """
    _require_patches()
    steps = Steps(console, 6)
    _build(layout, steps)
    verdicts = {preset: _gate(layout, preset, steps) for preset in (DEFAULT, MILD)}
    passed = [preset for preset in (MILD, DEFAULT) if verdicts[preset].outcome == "PASS"]
    with steps.step("production mode refuses what the gate did not pass") as note:
        refusals = _refusals(layout, [p for p in (DEFAULT, MILD) if p not in passed], note)
    for who, reason in refusals:
        console.print(f"    [red]refused[/] {who}: {escape(reason)}")
    if not passed:
        raise TraceServeError(
            f"neither policy passed the gate, so none is served in production mode; see {layout.root / 'report.html'}"
        )
    _serve(layout, passed[0], steps, port=port, keep_serving=keep_serving)


def _require_patches() -> None:
    from trace_serve.patching.status import State, status

    found = status(None, None)
    if found.state is not State.APPLIED:
        raise PatchError(f"SGLang in {found.root} is {found.state}, expected patched; run `trace-serve patch apply`")


def _build(layout: Layout, steps: Steps) -> None:
    from trace_serve.policy.build import build_policy
    from trace_serve.policy.sample import build_sample_model

    layout.root.mkdir(parents=True, exist_ok=True)
    (layout.root / "policies").mkdir(exist_ok=True)
    with steps.step("sample model: SmolLM2-135M as a Mixtral of 4 experts") as note:
        build_sample_model(layout.model, progress=note)
    with steps.step("two policies: W4A4 experts with NVFP4 KV, and a milder recipe") as note:
        for preset in (DEFAULT, MILD):
            note(preset)
            build_policy(
                layout.model, layout.policy(preset), name=f"sample-{preset}", version="1", recipe=RECIPES[preset]
            )


def _gate(layout: Layout, preset: str, steps: Steps) -> Any:
    from eval_gate.keys import generate_key
    from eval_gate.report.terminal import print_verdict
    from eval_gate.run import ArmConfig, GateConfig, run_gate

    if not (layout.private_key.exists() and layout.public_key.exists()):
        shutil.rmtree(layout.private_key.parent, ignore_errors=True)
        generate_key(layout.private_key, layout.public_key)
    out = layout.gate(preset)
    other = layout.gate(DEFAULT if preset == MILD else MILD) / "results.jsonl"
    config = GateConfig(
        training=ArmConfig(str(layout.model)),
        serving=ArmConfig(str(layout.policy(preset))),
        queries="support",
        out=out,
        key=layout.private_key,
        concurrency=CONCURRENCY,
        resume=(out / "results.jsonl").exists(),
        reuse=(other,) if other.exists() else (),
    )
    with steps.gate(f"gate: sample-{preset} as served against the model as trained, on the real engine") as update:
        result = run_gate(config, update)
    print_verdict(result.verdict, steps.console, flipped=3)
    return result.verdict


def _refusals(layout: Layout, blocked: list[str], note: Callable[[str], None]) -> list[tuple[str, str]]:
    """Starts a production server for each policy that did not pass, and one without a verdict; all must refuse."""
    attempts = [(f"sample-{p}", layout.policy(p), layout.gate(p) / "verdict.dsse.json") for p in blocked]
    attempts.append(("sample-mild without a verdict", layout.policy(MILD), layout.root / "no-verdict.dsse.json"))
    return [(who, _refusal(layout, policy, verdict, note, who)) for who, policy, verdict in attempts]


def _refusal(layout: Layout, policy: Path, verdict: Path, note: Callable[[str], None], who: str) -> str:
    from trace_serve.server.process import ServerProcess

    note(who)
    server = ServerProcess(
        policy,
        mode="production",
        verdict=verdict,
        public_key=layout.public_key,
        log_path=layout.root / "refused.log",
    )
    with server:
        try:
            server.wait_ready(120)
        except ConfigError as exc:
            return str(exc)
        except TraceServeError as exc:
            if exc.exit_code == EXIT_INFRASTRUCTURE:
                raise
            return str(exc)
    raise TraceServeError(f"{who} was served in production mode without a passing verdict; this is a defect")


def _serve(layout: Layout, preset: str, steps: Steps, *, port: int, keep_serving: bool) -> None:
    from trace_serve.server.process import ServerProcess

    console = steps.console
    server = ServerProcess(
        layout.policy(preset),
        mode="production",
        verdict=layout.gate(preset) / "verdict.dsse.json",
        public_key=layout.public_key,
        hint_dir=layout.hints,
        port=port,
        api_key=secrets.token_hex(16),
        log_path=layout.root / "server.log",
        engine_log=layout.root / "engine.log",
    )
    with server:
        with steps.step(f"serve sample-{preset} in production mode") as note:
            server.wait_ready(600, progress=lambda waited: note(f"engine starting, {waited:.0f} s"))
            answer, hint_file = _ask(server, layout, f"sample-{preset}")
        console.print(f"    [cyan]{QUESTION}[/]  {escape(answer)}")
        _show_hints(hint_file, console)
        if keep_serving:
            _keep(server, f"sample-{preset}", console)


def _ask(server: Any, layout: Layout, model: str) -> tuple[str, Path]:
    """One chat request with hints; the hint file is fetched over HTTP as a trainer would."""
    from trace_serve.hints import wire

    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
        "trace_hints": True,
    }
    headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            rollout = response.headers["x-trace-rollout"]
            answer = str(json.load(response)["choices"][0]["message"]["content"])
        request = urllib.request.Request(f"{server.url}/v1/rollouts/{rollout}/hints", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            payload = response.read()
    except urllib.error.HTTPError as exc:
        raise EngineError(f"{exc.url}: {exc.code} {exc.read().decode(errors='replace')[:300]}") from exc
    path = layout.root / "hints.safetensors"
    wire.write_bytes(path, payload)
    return answer, path


def _show_hints(path: Path, console: Console) -> None:
    from trace_serve.hints import wire
    from trace_serve.hints.inspect import summarize

    summary = summarize(wire.read(path))
    table = Table(title=f"rounding hints of that answer ({path.name}, {summary['rows']} tokens)", title_justify="left")
    for column in ("site", "layers", "hints, B/token", "full codes, B/token"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for name, site in summary["sites"].items():
        table.add_row(name, str(site["layers"]), f"{site['bytes_per_token']:,}", f"{site['full_bytes_per_token']:,}")
    table.add_section()
    table.add_row("this model", "", f"{summary['bytes_per_token']:,}", f"{summary['full_bytes_per_token']:,}")
    table.add_row("the paper's 35B model", "", "", f"{summary['paper_bytes_per_token']:,}")
    console.print(table)


def _keep(server: Any, model: str, console: Console) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
    }
    console.print("serving until Ctrl-C; try:\n")
    typer.echo(
        f"curl -s {server.url}/v1/chat/completions -H 'Authorization: Bearer {server.api_key}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
    typer.echo(
        f"""
from openai import OpenAI

client = OpenAI(base_url="{server.url}/v1", api_key="{server.api_key}")
answer = client.chat.completions.create(**{body!r})
print(answer.choices[0].message.content)
"""
    )
    try:
        while server.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("stopping")
        return
    raise TraceServeError(f"the server ended with code {server.poll()}; see its log")
