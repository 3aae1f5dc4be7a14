"""Which weights computed what: the counter of weight updates, its labels, and how old a request's tokens are.

The counter is the truth (one value an update, also of updates that were given no label or a used one); a label is what
people and trainers call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

LIMIT_FIELD = "max_version_diff"
Spans = tuple[tuple[int, int, str], ...]


class Versions:
    """The labels of every version that this engine has served, the first one included.

    Attributes:
        labels: label of each value of the counter.
        digests: digest of the model directory that a version was read from; empty for weights that a trainer sent.
    """

    def __init__(self, label: str = "default", digest: str = "") -> None:
        self.labels = [label]
        self.digests = [digest]

    @property
    def current(self) -> int:
        return len(self.labels) - 1

    def next_label(self, given: str | None) -> str:
        """The label of the next version: the one given, or the last one with `+1` (`+2`, ...) behind it."""
        if given is not None:
            return given
        stem, plus, count = self.labels[-1].rpartition("+")
        return f"{stem}+{int(count) + 1}" if plus and count.isdigit() else f"{self.labels[-1]}+1"

    def add(self, label: str, digest: str = "") -> int:
        """Starts the next version and returns its counter."""
        self.labels.append(label)
        self.digests.append(digest)
        return self.current

    def spans(self, versions: Any) -> Spans:
        """Groups consecutive tokens of one version.

        Args:
            versions: int [T], counter of each token (tensor, array or list).

        Returns:
            (first, end, label) in order, without gaps; a token that no version computed has the label `unknown`.
        """
        values = np.asarray(versions)
        if values.size == 0:
            return ()
        starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
        ends = [*starts[1:], values.size]
        return tuple((begin, end, self._label(int(values[begin]))) for begin, end in zip(starts, ends, strict=True))

    def _label(self, version: int) -> str:
        return self.labels[version] if 0 <= version < len(self.labels) else "unknown"


def sampled_versions(events: Iterable[tuple[int, int]], rows: Sequence[int], prompt: int, output: int) -> list[int]:
    """The version that sampled each output token.

    Output token i is sampled by the forward pass that writes the row before it. That row says so itself, unless the
    request was retracted and the row computed again: then the token is older than the row, and the events know.

    Args:
        events: (version, output tokens that the request had when that version ended), in order.
        rows: version of each row, that is of each prompt and output token but the last.
        prompt: prompt tokens.
        output: output tokens.
    """
    out = [rows[min(prompt - 1 + i, len(rows) - 1)] for i in range(output)] if rows else [0] * output
    for version, count in events:
        for i in range(min(count, output)):
            out[i] = min(out[i], version)
    return out


def check_limit(limit: object) -> None:
    """Raises:
    ValueError: `max_version_diff` is not a whole number from 0.
    """
    if type(limit) is not int or limit < 0:
        raise ValueError(f"custom_params.{LIMIT_FIELD}: got {limit!r}, expected a whole number of updates from 0")
