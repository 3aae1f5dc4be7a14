"""Which arrivals leave early or read slowly: a seeded draw by index, so that two runs of one plan treat alike."""

from __future__ import annotations

import numpy as np

from trace_serve.load.exchange import Client
from trace_serve.load.plan import LoadPlan


def client_of(plan: LoadPlan, index: int) -> Client:
    """How the client of arrival `index` behaves."""
    if not plan.disconnect_share and not plan.slow_share:
        return Client.PLAIN
    drawn = np.random.default_rng([plan.seed, 8, index]).random()
    if drawn < plan.disconnect_share:
        return Client.LEAVES
    return Client.SLOW if drawn < plan.disconnect_share + plan.slow_share else Client.PLAIN
