"""Pass rates of paired queries as arrays: what the statistics need to know of a run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eval_gate.pairing import Pair
from eval_gate.stats.clustered import cluster_numbers
from eval_gate.stats.table import PairedTable


@dataclass(frozen=True)
class Outcomes:
    """One row a query.

    Attributes:
        training: float64 [n], pass rate of the training arm; NaN where a sample has no grade.
        serving: float64 [n], likewise.
        clusters: intp [n], number of the query's cluster; a query without one is a cluster of its own.
    """

    training: NDArray[np.float64]
    serving: NDArray[np.float64]
    clusters: NDArray[np.intp]

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> Outcomes:
        rows = list(pairs)
        return cls(
            np.array([pair.training_rate for pair in rows], dtype=np.float64),
            np.array([pair.serving_rate for pair in rows], dtype=np.float64),
            cluster_numbers([pair.query.cluster or ("", pair.query.id) for pair in rows]),
        )

    def __len__(self) -> int:
        return len(self.training)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Outcomes:
        return Outcomes(self.training[rows], self.serving[rows], self.clusters[rows])

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """bool [n]: every sample of both arms has a grade."""
        missing: NDArray[np.bool_] = np.isnan(self.training) | np.isnan(self.serving)
        return ~missing

    @cached_property
    def units(self) -> int:
        """Clusters: the rows that count as independent."""
        return len(np.unique(self.clusters))

    @property
    def clustered(self) -> bool:
        return self.units < len(self)

    def table(self, *, unscored: float) -> PairedTable:
        """The table of one binary sample an arm; an unscored pair counts as lost (`unscored` = 1) or gained (-1)."""
        left = int(len(self) - self.scored.sum())
        a, b = self.training, self.serving
        return PairedTable(
            both=int(((a == 1) & (b == 1)).sum()),
            only_a=int(((a == 1) & (b == 0)).sum()) + (left if unscored > 0 else 0),
            only_b=int(((a == 0) & (b == 1)).sum()) + (left if unscored < 0 else 0),
            neither=int(((a == 0) & (b == 0)).sum()),
        )

    def majority_table(self) -> PairedTable:
        """Scored pairs by majority of their samples."""
        rows = self.take(self.scored)
        a, b = rows.training > 0.5, rows.serving > 0.5
        return PairedTable(int((a & b).sum()), int((a & ~b).sum()), int((~a & b).sum()), int((~a & ~b).sum()))
