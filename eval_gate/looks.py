"""Which queries belong to which look at the data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from trace_serve.errors import ConfigError


class Unit(Protocol):
    """What a schedule needs to know of a query."""

    @property
    def id(self) -> str: ...
    @property
    def suite(self) -> str: ...
    @property
    def cluster(self) -> str | None: ...


Q = TypeVar("Q", bound=Unit)


def shuffled(queries: Sequence[Q], seed: int) -> list[Q]:
    """The queries in the random order that a run with this seed asks them in."""
    order = list(queries)
    random.Random(f"eval-gate/{seed}").shuffle(order)
    return order


def schedule(queries: Sequence[Q], looks: int) -> tuple[tuple[Q, ...], ...]:
    """Splits queries, in the order given, into parts of equal numbers of independent queries.

    Every look takes its share of every suite, and a cluster is never split, so that what one look adds to a suite is
    independent of what the looks before it saw. The order must be random for a look to stand for the rest.

    Raises:
        ConfigError: a suite has fewer independent queries than there are looks.
    """
    if looks == 1:
        return (tuple(queries),)
    suites: dict[str, dict[object, list[Q]]] = {}
    for query in queries:
        units = suites.setdefault(query.suite, {})
        units.setdefault(query.cluster or ("", query.id), []).append(query)
    parts: list[list[Q]] = [[] for _ in range(looks)]
    for suite, units in suites.items():
        if len(units) < looks:
            raise ConfigError(
                f"--looks {looks}: suite {suite} has {len(units)} independent queries, expected one a look at least",
                field="looks",
            )
        for index, members in enumerate(units.values()):
            parts[index * looks // len(units)] += members
    return tuple(tuple(part) for part in parts)
