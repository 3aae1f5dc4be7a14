"""How many users run and when the test is over: the plan says."""

from __future__ import annotations

from locust import LoadTestShape, User
from locust.runners import MasterRunner

from trace_load.session import find
from trace_load.users import ClosedLoopUser, OpenLoopUser


class PlanShape(LoadTestShape):
    """One dispatcher a process for an open loop, `--users` users for a closed one, until all processes have ended."""

    use_common_options = True

    def tick(self) -> tuple[int, float, list[type[User]]] | None:
        assert self.runner is not None
        session = find(self.runner.environment)
        if session.started and (len(session.ended) >= session.workers or session.overdue):
            return None
        if session.plan.is_open:
            # Counted at the start: a worker that is lost is not replaced, and the report says that it is missing.
            connected = self.runner.worker_count if isinstance(self.runner, MasterRunner) else 1
            count = session.workers if session.started else max(connected, 1)
            return count, float(count), [OpenLoopUser]
        users = session.plan.users
        return users, session.spawn_rate or float(users), [ClosedLoopUser]
