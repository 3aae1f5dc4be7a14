"""What the users, the shape and the hooks of one locust process share."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import gevent
from gevent.pool import Group
from locust.env import Environment

from trace_serve.load.clients import client_of
from trace_serve.load.exchange import Exchange, Outcome
from trace_serve.load.plan import LoadPlan
from trace_serve.load.schedules import Times, schedule
from trace_serve.load.slo import load_slo
from trace_serve.load.totals import Totals
from trace_serve.load.workloads import open_workload

FORGOTTEN_S = 15.0
"""How long after the drain the first process waits for the others before it goes on without them."""


class Session:
    """One run in one process: master, worker or both.

    Args:
        plan: equal in every process of the run.
        environment: locust's.

    Raises:
        ConfigError: the plan's files cannot be used.
    """

    def __init__(self, plan: LoadPlan, environment: Environment) -> None:
        self.plan = plan
        self.environment = environment
        self.slo = load_slo(plan.slo)
        self.workload = open_workload(plan)
        self.times: Times | None = schedule(plan, self.workload.stamps_s) if plan.is_open else None
        self.totals = Totals(plan.warmup, self.slo, plan.keep_requests)
        self.merged = Totals(plan.warmup, self.slo, plan.keep_requests)
        self.asking = Group()
        self.worker, self.workers = 0, 1
        self.spawn_rate: float | None = None
        self.reset()

    def reset(self) -> None:
        """Before a run; the web interface may start several."""
        self.totals.clear()
        self.merged.clear()
        self.began = time.perf_counter()
        self.began_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.dispatching = False
        self.dispatched = not self.plan.is_open
        self.asked = 0
        self.ended: set[str] = set()
        self.faults: list[str] = []
        self.swaps: list[dict[str, Any]] = []
        self.swapper: gevent.Greenlet | None = None
        self.started = False

    def begin(self, unix_s: float, worker: int, workers: int) -> None:
        """Sets the moment that schedule offsets count from, and this process's share of the schedule."""
        self.began = time.perf_counter() + unix_s - time.time()
        self.worker, self.workers = worker, workers
        self.started = True

    @property
    def now(self) -> float:
        """Seconds since the run began; negative before."""
        return time.perf_counter() - self.began

    @property
    def max_in_flight(self) -> int:
        """This process's part of the cap."""
        whole, rest = divmod(self.plan.max_in_flight, self.workers)
        return whole + (self.worker < rest)

    def next_index(self) -> int:
        """Of a closed loop's next request; processes take turns."""
        index = self.worker + self.asked * self.workers
        self.asked += 1
        return index

    def drop(self, index: int, due_s: float) -> None:
        client = client_of(self.plan, index)
        reason = "dropped at the cap of requests in flight"
        self.totals.add(Exchange(index, due_s, Outcome.DROPPED, client, reason=reason))

    def wait_for_answers(self) -> None:
        """Returns when the load is over: all is answered, or the drain is, and what is still open is `unfinished`."""
        while self.now < self.plan.total_s or not self.dispatched:
            gevent.sleep(0.05)
        self.asking.join(timeout=max(self.plan.total_s + self.plan.drain - self.now, 0))
        self.asking.kill()

    def take(self) -> dict[str, Any]:
        """The totals since the last call, to be merged elsewhere."""
        wire = self.totals.to_wire()
        self.totals.clear()
        return wire

    @property
    def overdue(self) -> bool:
        """Whether a process that has not reported its end yet will not."""
        return self.now > self.plan.total_s + self.plan.drain + FORGOTTEN_S


def find(environment: Environment) -> Session:
    """The session that `hooks` made for this process."""
    session: Session = environment.trace_load
    return session
