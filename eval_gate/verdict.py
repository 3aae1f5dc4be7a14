"""The verdict: one object that every renderer reads and that is signed. It carries no logic."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.policy import GatePolicy
from eval_gate.preflight import Finding
from eval_gate.stats.rule import Outcome


def _nan_is_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


Score = Annotated[float | None, BeforeValidator(_nan_is_none)]
"""A number that may not exist: None (never 0) for what was not scored."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmSummary(_Part):
    """Counts of one arm over all queries and repeats.

    Attributes:
        samples: queries times repeats.
        passed: samples graded right.
        failed: samples graded wrong.
        unscored: samples without a grade, by error class.
        pass_rate: passed / samples when every sample has a grade, else None.
        pass_rate_low: pass rate if every ungraded sample had been wrong.
        pass_rate_high: pass rate if every ungraded sample had been right.
        truncated: answers that ended at the token limit.
        degenerate: truncated answers that are one unit repeated.
        mean_completion_tokens: over the samples that report it.
        attempts: requests made, retries included.
    """

    samples: int
    passed: int
    failed: int
    unscored: dict[str, int]
    pass_rate: Score
    pass_rate_low: Score
    pass_rate_high: Score
    truncated: int
    degenerate: int
    mean_completion_tokens: Score
    attempts: int


class Comparison(_Part):
    """Paired comparison over one group of queries.

    Attributes:
        n: queries in the group; `scored` of them have every sample of both arms graded.
        gap: mean of (training pass rate less serving pass rate) over the scored queries; positive is a loss.
        lower: lower confidence bound of the gap, whatever the unscored queries would have been.
        upper: upper confidence bound, likewise, and never under the zero-discordance floor.
        margin: what the bounds are held against, as a difference of pass rates.
        both: scored queries that pass in both arms (with repeats: by majority), and so on for the other three.
        mcnemar_exact_p: two-sided exact p value of the discordant pairs.
    """

    n: int
    scored: int
    training_pass_rate: Score
    serving_pass_rate: Score
    gap: Score
    lower: Score
    upper: Score
    margin: Score
    both: int
    only_training: int
    only_serving: int
    neither: int
    mcnemar_exact_p: Score


class SuiteResult(_Part):
    """One suite: every suite must pass.

    Attributes:
        level: one-sided level of the upper bound; the policy's alpha, or this look's part of it.
        block_level: one-sided level of the lower bound; smaller with several suites (Holm).
    """

    suite: str
    outcome: Outcome
    comparison: Comparison
    level: float
    block_level: float


class LookResult(_Part):
    """What one look at the data showed.

    Attributes:
        look: 1 for the first.
        queries: queries in it and in the looks before it, of `planned`.
        outcome: BLOCK if a suite blocks, PASS if all pass, else INCONCLUSIVE.
    """

    look: int
    queries: int
    planned: int
    outcome: Outcome
    suites: tuple[SuiteResult, ...]


class FlippedQuery(_Part):
    """A query that one arm answers right and the other wrong.

    Attributes:
        direction: `lost`: only the training-time version passes; `gained`: only the serving-time version.
        first_difference: index of the first character in which the answers differ.
        first_different_word: index of the first word in which they differ.
    """

    id: str
    suite: str
    kind: str
    direction: Literal["lost", "gained"]
    prompt: str
    expected: str
    training_answer: str
    serving_answer: str
    first_difference: int
    first_different_word: int


class Subjects(_Part):
    """Digests of what was judged and by what; None where an endpoint does not say."""

    serving: Digest | None
    training: Digest | None
    queries: Digest
    gate_policy: Digest
    results: Digest


class Verdict(_Part):
    """What the gate found.

    Attributes:
        reasons: why, the cause first.
        exit_code: 0 PASS, 1 BLOCK, 2 INCONCLUSIVE, 4 INCONCLUSIVE for want of answers (infrastructure).
        method: how the bounds were computed.
        floor: smallest upper bound that this many queries can support.
        queries_needed: fewest queries with which the margin can be passed at all.
        looks: the sequential path; empty when the data were looked at once.
        cause: short name of the deciding cause, for machines.
    """

    schema_version: Literal[1] = 1
    outcome: Outcome
    exit_code: int
    cause: str
    reasons: tuple[str, ...] = Field(min_length=1)
    policy: GatePolicy
    method: str
    floor: Score
    queries_needed: int
    overall: Comparison
    suites: tuple[SuiteResult, ...]
    looks: tuple[LookResult, ...] = ()
    kinds: dict[str, Comparison]
    training: ArmSummary
    serving: ArmSummary
    findings: tuple[Finding, ...]
    training_evidence: ArmEvidence
    serving_evidence: ArmEvidence
    subjects: Subjects
    query_source: str
    recipe_id: str | None
    policy_name: str | None
    policy_version: str | None
    created: AwareDatetime
    expires: AwareDatetime
    flipped: tuple[FlippedQuery, ...]
    tools: dict[str, str]

    def expired(self, now: datetime | None = None) -> bool:
        return (now or datetime.now(UTC)) >= self.expires

    @property
    def labels(self) -> tuple[str, ...]:
        """What every report must say beside the outcome."""
        out = []
        if self.policy.rule == "point":
            out.append("plain rule (--rule point): chance is not accounted for")
        if self.policy.mode == "fixed-set":
            out.append("fixed set: a claim about exactly these queries")
        if self.looks and self.looks[-1].queries < self.looks[-1].planned:
            last = self.looks[-1]
            out.append(
                f"stopped at look {last.look} of {self.policy.looks}, after {last.queries} of {last.planned} queries; "
                "a gap measured up to a stop is biased away from the margin"
            )
        if self.policy.allow_unproven and any(finding.concern == "unproven" for finding in self.findings):
            out.append("unproven arms allowed (--allow-unproven): what they run was not shown")
        return tuple(out)
