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


LENGTH_RATIO = 1.5
LENGTH_DIFFERENCE = 8.0
"""Mean tokens of an answer that differ by this factor and this many are said in every report."""


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


class TokenDifference(_Part):
    """The first token in which two answers differ, of those that both arms recorded.

    Attributes:
        index: of the token, the answer's first being 0.
        training: the token as text, or `id N` where only ids were recorded; None where the answer had ended.
        serving: likewise.
    """

    index: int
    training: str | None
    serving: str | None


class FlippedQuery(_Part):
    """A query that one arm answers right and the other wrong.

    Attributes:
        direction: `lost`: only the training-time version passes; `gained`: only the serving-time version.
        prompt: as reports show it, cut at 4,000 characters; `expected` and the answers likewise.
        first_difference: index of the first character in which the answers differ.
        first_different_word: index of the first word in which they differ.
        first_different_token: None unless both arms recorded tokens.
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
    first_different_token: TokenDifference | None = None


class TokenBin(_Part):
    """How many pairs of answers part at tokens `first` to `last`, both included."""

    first: int
    last: int
    pairs: int


class KindDivergence(_Part):
    """Pairs of answers of one kind of query, how many of them part, and the median of their first different token."""

    pairs: int
    diverged: int
    median: Score


class Divergence(_Part):
    """Where the tokens of the two arms' answers part. At temperature 0 that is the arms' doing, above it also chance.

    Attributes:
        unit: what was compared: `token ids`, or `tokens` (their text) where an arm sent no ids.
        answered: pairs of answers that both arms gave, right or wrong.
        pairs: of them, those with the tokens of both arms.
        diverged: of `pairs`, those whose tokens are not all the same.
        quantiles: index of the first different token that a share of the diverged pairs has or is under, by that share.
        bins: the diverged pairs by the index of their first different token; each bin is twice as wide as the last.
        training_tokens: mean tokens of an answer, over `pairs`.
        serving_tokens: likewise.
        kinds: the same counts by kind of query.
    """

    unit: Literal["token ids", "tokens"]
    answered: int
    pairs: int
    diverged: int
    quantiles: dict[str, int]
    bins: tuple[TokenBin, ...]
    training_tokens: float
    serving_tokens: float
    kinds: dict[str, KindDivergence]


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
        flipped: lost ones first; those that would make the verdict too large are left out.
        flipped_left_out: how many are.
        divergence: None unless both arms recorded the tokens of an answer.
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
    flipped_left_out: int = 0
    divergence: Divergence | None = None
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
        out += self._length_asymmetry()
        if self.policy.allow_unproven and any(finding.concern == "unproven" for finding in self.findings):
            out.append("unproven arms allowed (--allow-unproven): what they run was not shown")
        return tuple(out)

    def _length_asymmetry(self) -> list[str]:
        one, two = self.training.mean_completion_tokens, self.serving.mean_completion_tokens
        if one is None or two is None or max(one, two) < LENGTH_RATIO * min(one, two):
            return []
        # Answers of a few tokens differ by such a factor through a word.
        if abs(one - two) < LENGTH_DIFFERENCE:
            return []
        return [
            f"answers of other lengths: {one:.1f} tokens from the training arm, {two:.1f} from the serving arm; "
            "one of them may not stop where the other does"
        ]
