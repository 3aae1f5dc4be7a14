"""What a checker gives back, or raises when it could not do its work."""

from __future__ import annotations

from typing import NamedTuple


class Grade(NamedTuple):
    """`passed`, and the part of the answer that was compared (None when nothing comparable was found)."""

    passed: bool
    extracted: str | None


class CheckerError(Exception):
    """The checker itself failed; the answer is neither right nor wrong."""
