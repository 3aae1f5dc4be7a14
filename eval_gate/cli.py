"""The `eval-gate` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval_gate.arms.records import Role
from eval_gate.commands.aa import aa
from eval_gate.commands.compare import compare
from eval_gate.commands.options import MarginKind, Mode, Rule, Spending
from eval_gate.commands.plan import plan
from eval_gate.commands.report import report
from eval_gate.policy import GatePolicy
from eval_gate.report.progress import live_progress
from eval_gate.report.terminal import print_verdict
from eval_gate.run import ArmConfig, GateConfig, GateResult, run_gate
from eval_gate.signing import authorize, generate_key, verify_verdict
from trace_serve.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, TraceServeError

UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of the errors that the argument parser raises; where it lives depends on typer's version."""

app = typer.Typer(
    name="eval-gate",
    help="Decide whether a policy as served is as good as it was when trained.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


for command in (compare, plan, aa, report):
    app.command()(command)


@app.command()
def run(
    training: Annotated[str, typer.Option(help="As trained: a URL, a model directory or a policy directory (BF16).")],
    serving: Annotated[str, typer.Option(help="As served: a URL or a policy directory (its recipe).")],
    out: Annotated[Path, typer.Option(help="Directory for results, verdict and reports.")],
    queries: Annotated[
        str, typer.Option(help="A shipped suite (support, support-dev) or a JSON-lines file.")
    ] = "support",
    margin: Annotated[float, typer.Option(help="Largest acceptable loss of pass rate; 0.05 is 5 points.")] = 0.05,
    margin_kind: Annotated[
        MarginKind, typer.Option(help="absolute: points of pass rate; relative: a share of the training pass rate.")
    ] = MarginKind.ABSOLUTE,
    alpha: Annotated[float, typer.Option(help="One-sided error rate of PASS and of BLOCK.")] = 0.05,
    rule: Annotated[Rule, typer.Option(help="ci: confidence bounds; point: the measured gap alone.")] = Rule.CI,
    mode: Annotated[Mode, typer.Option(help="Claim about queries like these, or exactly these.")] = Mode.POPULATION,
    repeats: Annotated[int, typer.Option(help="Samples of each query and arm.")] = 1,
    looks: Annotated[int, typer.Option(help="Judge after each of so many equal parts, and stop on a clear case.")] = 1,
    spending: Annotated[
        Spending, typer.Option(help="obf: strict early, lenient last; pocock: the same at every look.")
    ] = Spending.OBF,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_queries: Annotated[int | None, typer.Option(help="Size of a seeded random subsample.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the subsample and of the order.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight at one arm.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one attempt at one answer.")] = 120.0,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds for an engine to start.")] = 600.0,
    error_cap: Annotated[float, typer.Option(help="Largest share of samples without a grade.")] = 0.02,
    baseline_floor: Annotated[float, typer.Option(help="Smallest pass rate of the training arm.")] = 0.20,
    training_model: Annotated[str | None, typer.Option(help="Served name at the training URL.")] = None,
    serving_model: Annotated[str | None, typer.Option(help="Served name at the serving URL.")] = None,
    training_key_env: Annotated[str | None, typer.Option(help="Variable with the training URL's API key.")] = None,
    serving_key_env: Annotated[str | None, typer.Option(help="Variable with the serving URL's API key.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key that signs the verdict.")] = None,
    allow_unproven: Annotated[bool, typer.Option(help="Judge arms that do not prove what they run.")] = False,
    reuse: Annotated[list[Path] | None, typer.Option(help="results.jsonl of another run to take answers from.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Replay queries through both versions and decide. Exit code: 0 PASS, 1 BLOCK, 2 INCONCLUSIVE, 3, 4, 130."""
    policy = GatePolicy.build(
        margin=margin,
        margin_kind=margin_kind.value,
        alpha=alpha,
        rule=rule.value,
        mode=mode.value,
        repeats=repeats,
        looks=looks,
        spending=spending.value,
        temperature=temperature,
        max_queries=max_queries,
        sample_seed=seed,
        error_cap=error_cap,
        baseline_floor=baseline_floor,
        allow_unproven=allow_unproven,
    )
    config = GateConfig(
        training=ArmConfig(training, _api_key(training_key_env, Role.TRAINING), training_model),
        serving=ArmConfig(serving, _api_key(serving_key_env, Role.SERVING), serving_model),
        queries=queries,
        out=out,
        policy=policy,
        key=key,
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        resume=resume,
        reuse=tuple(reuse or ()),
    )
    try:
        with live_progress(Console(stderr=True)) as on_progress:
            result = run_gate(config, on_progress)
    except KeyboardInterrupt:
        typer.echo("interrupted: no verdict; the results so far are kept, continue with --resume", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(result, as_json)
    raise typer.Exit(result.verdict.exit_code)


@app.command()
def verify(
    envelope: Annotated[Path, typer.Argument(help="Signed verdict (verdict.dsse.json).")],
    public_key: Annotated[Path, typer.Option(help="Public key of the signer.")],
    policy: Annotated[Path | None, typer.Option(help="Policy directory that the verdict must authorise.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Check a signed verdict, and with --policy that it authorises that policy. Exit code 3 when it does not."""
    verdict = verify_verdict(envelope, public_key)
    if policy is not None:
        from trace_serve.policy.manifest import load_policy

        loaded = load_policy(policy)
        authorize(
            verdict,
            policy_digest=loaded.digest,
            recipe_id=loaded.recipe_id,
            policy_name=loaded.name,
            policy_version=loaded.version,
        )
    if as_json:
        typer.echo(verdict.model_dump_json(indent=2))
        return
    typer.echo(f"signature valid: {verdict.outcome}, {verdict.policy_name or verdict.serving_evidence.source}")
    typer.echo(f"serving {verdict.subjects.serving or 'unknown'}")
    typer.echo(f"expires {verdict.expires:%Y-%m-%d %H:%M} UTC")
    if policy is not None:
        typer.echo(f"authorises {policy}")


@app.command()
def keygen(
    private_key: Annotated[Path, typer.Argument(help="File for the private key (owner-only).")],
    public_key: Annotated[
        Path | None, typer.Argument(help="File for the public key; default: the same with .pub.")
    ] = None,
) -> None:
    """Make an Ed25519 key pair for signing verdicts."""
    public = public_key or private_key.with_suffix(private_key.suffix + ".pub")
    generate_key(private_key, public)
    typer.echo(f"private {private_key}\npublic  {public}")


def _api_key(variable: str | None, role: Role) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"--{role}-key-env {variable}: not set in the environment, expected the API key", field="key_env"
        )
    return value


def _show(result: GateResult, as_json: bool) -> None:
    if as_json:
        typer.echo(result.verdict.model_dump_json(indent=2))
        return
    print_verdict(result.verdict, Console())
    paths = result.paths
    written = [paths.verdict, paths.html, paths.results, *([paths.envelope] if paths.envelope else [])]
    typer.echo("written: " + ", ".join(str(path) for path in written))


def main() -> None:
    """Entry point: every expected error is one line on stderr and an exit code."""
    try:
        code = app(standalone_mode=False)
    except UsageError as exc:
        message = " ".join(getattr(exc, "format_message", exc.__str__)().split())
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except TraceServeError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
