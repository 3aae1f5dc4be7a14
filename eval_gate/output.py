"""The directory of a run: which files it has, and what an earlier run left there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval_gate.arms.records import ArmRecord, SampleRecord, read_results, write_results
from eval_gate.config import GateConfig
from eval_gate.report.write import ReportPaths
from eval_gate.session import Recorded
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class GatePaths:
    """Files of a run; `envelope` is None without a key."""

    results: Path
    verdict: Path
    envelope: Path | None
    html: Path
    markdown: Path
    junit: Path
    gate_policy: Path


@dataclass(frozen=True)
class GateResult:
    """What a run gives back."""

    verdict: Verdict
    paths: GatePaths


def claim(config: GateConfig) -> GatePaths:
    """Makes the directory ready for a run: verdict and reports of an earlier one are removed.

    Raises:
        ConfigError: it cannot be used, or holds results and the run is not to be resumed.
    """
    out = config.out
    reports = ReportPaths.below(out)
    paths = GatePaths(
        results=out / "results.jsonl",
        verdict=reports.verdict,
        envelope=out / "verdict.dsse.json" if config.key is not None else None,
        html=reports.html,
        markdown=reports.markdown,
        junit=reports.junit,
        gate_policy=out / "gate-policy.json",
    )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: exists and is not a directory", field="out")
    if paths.results.exists() and not config.resume:
        raise ConfigError(
            f"--out {out}: holds results of an earlier run; add --resume to continue it, or choose another directory",
            field="out",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A verdict of an earlier run must not be taken for this one's while it runs or after it is interrupted.
        for path in (paths.verdict, out / "verdict.dsse.json", paths.html, paths.markdown, paths.junit):
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {out}: cannot be written: {exc.strerror}", field="out") from exc
    return paths


def recorded_before(config: GateConfig, results: Path) -> Recorded:
    """Reads earlier records, and cuts the own results file back to its complete lines so that it can be continued."""
    others = [record for path in config.reuse for record in read_results(path)]
    own: list[SampleRecord | ArmRecord] = []
    if config.resume and results.exists():
        own = read_results(results)
        write_results(results, own)
    return Recorded(own, others)
