"""The two kinds of users: one that sends by the schedule, and ones that wait for their answers."""

from __future__ import annotations

from typing import Any

import gevent
from locust import FastHttpUser, constant, task
from locust.exception import StopUser

from trace_load.ask import ask
from trace_load.session import find


class _PlanUser(FastHttpUser):
    """A user of the process's session, with a pool of connections that never makes a request wait."""

    abstract = True
    host = "http://127.0.0.1:8080"
    wait_time = constant(0)
    connection_timeout = 10.0

    def __init__(self, environment: Any) -> None:
        self.session = find(environment)
        self.network_timeout = self.session.plan.timeout
        self.concurrency = self.session.max_in_flight + 8
        super().__init__(environment)


class OpenLoopUser(_PlanUser):
    """Sends this process's share of the schedule: one greenlet an arrival, never waiting for an answer."""

    @task
    def dispatch(self) -> None:
        session = self.session
        if session.times is None or session.dispatching:
            raise StopUser
        session.dispatching = True
        try:
            for index in range(session.worker, len(session.times), session.workers):
                due_s = float(session.times[index])
                while (wait_s := due_s - session.now) > 0:
                    gevent.sleep(wait_s)
                if len(session.asking) >= session.max_in_flight:
                    session.drop(index, due_s)
                else:
                    session.asking.spawn(ask, session, self.client, index, due_s)
                gevent.sleep(0)  # late arrivals leave at once, not after all the others that are late
        finally:
            session.dispatching, session.dispatched = False, True
        raise StopUser


class ClosedLoopUser(_PlanUser):
    """Asks again as soon as it has its answer: a slow server lowers the load. For comparison, and for saturation."""

    @task
    def chat(self) -> None:
        session = self.session
        while session.now < 0:
            gevent.sleep(-session.now)
        if session.now >= session.plan.total_s:
            raise StopUser
        session.asking.spawn(ask, session, self.client, session.next_index(), None).join()
