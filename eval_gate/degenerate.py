"""Output that is not language: one short unit repeated until the token limit."""

from __future__ import annotations

MAX_UNIT_CHARS = 12
MIN_REPEATS = 4


def is_degenerate(text: str, finish_reason: str | None, completion_tokens: int | None) -> bool:
    """True for an answer that ran to its limit and holds nothing but one unit repeated, or nothing visible at all.

    The unit must repeat at least four times, and about once a generated token when their number is known, so that a
    cut-off "7777" in an arithmetic answer of many tokens is not taken for a loop.
    """
    if finish_reason != "length":
        return False
    visible = text.strip()
    if not visible:
        return True
    needed = max(MIN_REPEATS, round(0.8 * completion_tokens) if completion_tokens else 0)
    return any(_repeats(visible, size) >= needed for size in range(1, min(MAX_UNIT_CHARS, len(visible) // 2) + 1))


def _repeats(text: str, size: int) -> int:
    """How often the first `size` characters repeat over the whole text (spaces between units allowed), else 0."""
    unit = text[:size]
    padded = (text + " ") if not text.endswith(" ") else text
    for candidate, body in ((unit, text), (unit + " ", padded)):
        whole, rest = divmod(len(body), len(candidate))
        if body == candidate * whole + candidate[:rest]:
            return whole
    return 0
