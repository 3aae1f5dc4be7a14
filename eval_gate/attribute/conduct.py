"""How the answers under a recipe end: cut, repeated, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable

from eval_gate.arms.records import SampleRecord

_REFUSAL = re.compile(
    r"^\W*(?:i['’]?m sorry|sorry|i apologi[sz]e|unfortunately)\b.{0,80}?\b(?:can(?:no|['’])t|unable|not able|won['’]t)"
    r"|^\W*i (?:can(?:no|['’])t|am unable to|am not able to|won['’]t) (?:help|assist|answer|provide|do|comply|fulfil)"
    r"|^\W*as an ai\b",
    re.IGNORECASE | re.DOTALL,
)
"""English phrases that open a refusal. It counts a change between arms, not whether refusing was right."""


def is_refusal(text: str) -> bool:
    """Does the answer open with a refusal?"""
    return _REFUSAL.search(text[:400]) is not None


def count_refusals(records: Iterable[SampleRecord | None]) -> int:
    return sum(record is not None and record.text is not None and is_refusal(record.text) for record in records)
