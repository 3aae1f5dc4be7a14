"""What a caller says about one run of the gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eval_gate.checkers import Permissions, PoolLimits
from eval_gate.policy import GatePolicy


@dataclass(frozen=True)
class ArmConfig:
    """One arm as the user names it, and how to talk to it; see `arms.source.resolve`."""

    spec: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True)
class GateConfig:
    """One run.

    Attributes:
        training: version A, as trained.
        serving: version B, as served.
        queries: a suite's name or the path of a query file (see `suites.named`), or several of them.
        out: directory for results, verdict and reports; made when missing.
        policy: the settings the release is judged under.
        key: private key that signs the verdict; None leaves it unsigned.
        concurrency: requests in flight at one arm.
        timeout_s: limit of one attempt at one answer.
        startup_timeout_s: limit for an engine that the gate starts itself.
        resume: continue the results that an interrupted run left in `out`.
        permissions: what the query file may make this machine do.
        graders: limits of the processes that checkers run in.
        judge: the model behind checkers with a judge; its served name is the policy's.
        redact: what takes personal data out of the queries, see `redaction.load_redactor`.
        max_tokens: prompt and answer tokens of the whole run after which nothing more is asked.
        max_wall_s: seconds after which nothing more is asked.
        otel: file for the grades and the verdict as OpenTelemetry events; None writes none.
        reuse: results files of other runs whose exchanges may be taken over; the key of each (artifact digest, role,
            recipe, request, repeat) decides, never a served name.
    """

    training: ArmConfig
    serving: ArmConfig
    queries: str | tuple[str, ...]
    out: Path
    policy: GatePolicy = field(default_factory=GatePolicy)
    key: Path | None = None
    concurrency: int = 8
    timeout_s: float = 120.0
    startup_timeout_s: float = 600.0
    resume: bool = False
    reuse: tuple[Path, ...] = ()
    permissions: Permissions = field(default_factory=Permissions)
    graders: PoolLimits = field(default_factory=PoolLimits)
    judge: ArmConfig | None = None
    redact: str | None = None
    max_tokens: int | None = None
    max_wall_s: float | None = None
    otel: Path | None = None
