"""Load test of a running server, for plain locust; `trace-serve load` runs the same and prints a report.

    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8080 --headless --users 4 --run-time 30s
    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8080 --headless --arrivals poisson --rate 2

`locust -f deploy/locust/locustfile.py --help` lists the options; docs/load-tests.md explains them.
"""

from __future__ import annotations

from trace_load import hooks
from trace_load.shapes import PlanShape
from trace_load.users import ClosedLoopUser, OpenLoopUser

__all__ = ["ClosedLoopUser", "OpenLoopUser", "PlanShape"]

hooks.install()
