"""Holm's step-down procedure over hypotheses that can be tested at any level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class HolmResult(NamedTuple):
    """What became of one hypothesis, and the level that it was last tested at."""

    rejected: bool
    level: float


def holm(tests: Sequence[Callable[[float], bool]], alpha: float) -> list[HolmResult]:
    """Rejects hypotheses so that the probability of any false rejection is at most `alpha`.

    The first rejection needs level alpha/S, the next alpha/(S-1), and so on; the procedure ends where none follows.

    Args:
        tests: level -> is the hypothesis rejected at it? A rejection at one level must hold at every larger one.

    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    left = dict(enumerate(tests))
    results: dict[int, HolmResult] = {}
    while left:
        level = alpha / len(left)
        found = next((index for index, test in left.items() if test(level)), None)
        if found is None:
            results |= {index: HolmResult(False, level) for index in left}
            break
        results[found] = HolmResult(True, level)
        del left[found]
    return [results[index] for index in range(len(tests))]
