"""Numbers as every report prints them."""

from __future__ import annotations

from eval_gate.verdict import Comparison, Verdict

NOT_SCORED = "not scored"
MAX_KINDS = 30


def kinds(verdict: Verdict) -> tuple[list[tuple[str, Comparison]], int]:
    """Kinds of query that a short report shows (of many, those with the largest gaps), and how many it leaves out."""
    every = list(verdict.kinds.items())
    if len(every) <= MAX_KINDS:
        return every, 0
    worst = sorted(every, key=lambda one: -1.0 if one[1].gap is None else one[1].gap, reverse=True)[:MAX_KINDS]
    return worst, len(every) - MAX_KINDS


def percent(share: float | None) -> str:
    """A share as a percentage with one digit."""
    return NOT_SCORED if share is None else f"{100 * share:.1f}%"


def points(gap: float | None) -> str:
    """A signed difference of shares in percentage points; positive is a loss."""
    return NOT_SCORED if gap is None else f"{100 * gap:+.1f}"


def interval(lower: float | None, upper: float | None) -> str:
    """Both bounds in percentage points."""
    return NOT_SCORED if lower is None or upper is None else f"[{points(lower)}, {points(upper)}]"


def margin(verdict: Verdict) -> str:
    """The margin in points; a relative one also as a share of the training pass rate."""
    policy, found = verdict.policy, verdict.overall.margin
    if policy.margin_kind == "absolute":
        return f"{100 * policy.margin:g}"
    in_points = "unknown" if found is None else f"{100 * found:.3g}"
    return f"{in_points} ({100 * policy.margin:g}% of the training pass rate)"


def p_value(p: float | None) -> str:
    """Three significant digits, without pretending to more."""
    if p is None:
        return NOT_SCORED
    return "< 0.0001" if p < 1e-4 else f"{p:.3g}"


def pass_rate(low: float | None, high: float | None) -> str:
    """One rate when every sample has a grade, else the range it can lie in."""
    return percent(low) if low == high else f"{percent(low)} to {percent(high)}"


def mean_tokens(mean: float | None) -> str:
    """Mean tokens of an answer, where the arm counts them."""
    return "unknown" if mean is None else f"{mean:.1f}"


def digest(value: str | None) -> str:
    """A digest short enough for a table."""
    return "unknown" if value is None else value[:19] + "…"
