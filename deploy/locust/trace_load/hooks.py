"""Makes a session in each process, starts all processes at one moment, and turns what they measured into a report."""

from __future__ import annotations

import sys
import time
from typing import Any

import gevent
from locust import events, runners
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from trace_load import results, swaps
from trace_load.options import add_options, plan_of
from trace_load.session import Session, find
from trace_serve.errors import TraceServeError
from trace_serve.load.plan import make_plan

BEGIN = "trace-load-begin"
END = "trace-load-end"
LEAD_S = 0.5
LEAD_OF_WORKERS_S = 2.0
"""Until the first arrival, for users to start; workers also have to hear of it."""
PATIENCE_S = 30
"""Silence after which a worker is lost. Locust's 3 s end a test on a machine whose cores are all busy."""


def install() -> None:
    """Registers everything with locust; called once, by the locustfile."""
    runners.HEARTBEAT_LIVENESS = PATIENCE_S // runners.HEARTBEAT_INTERVAL
    events.init_command_line_parser.add_listener(add_options)
    events.init.add_listener(_init)
    events.test_start.add_listener(_start)
    events.report_to_master.add_listener(_report)
    events.worker_report.add_listener(_receive)
    events.quitting.add_listener(_quit)


_sessions: list[Session] = []
"""The session of this process, for the two events that come without an environment."""


def _init(environment: Environment, runner: Any, **_: Any) -> None:
    options = environment.parsed_options
    try:
        session = Session(plan_of(options), environment)
        results.check_directory(options)
    except TraceServeError as exc:
        if not isinstance(runner, WorkerRunner):
            print(f"error: {exc}", file=sys.stderr, flush=True)
        sys.exit(exc.exit_code)
    session.spawn_rate = options.spawn_rate
    options.run_time = None  # the plan has it
    environment.host = (environment.host or "").rstrip("/") or None
    environment.trace_load = session
    _sessions[:] = [session]
    if isinstance(runner, WorkerRunner):
        runner.register_message(BEGIN, _begin)
    elif isinstance(runner, MasterRunner):
        runner.register_message(END, _end)


def _start(environment: Environment, **_: Any) -> None:
    session, runner = find(environment), environment.runner
    if isinstance(runner, WorkerRunner):
        return
    session.reset()
    if isinstance(runner, MasterRunner):
        states = runner.clients
        clients = [client.id for client in (*states.ready, *states.spawning, *states.running)]
        at, plan = time.time() + LEAD_OF_WORKERS_S, session.plan.model_dump(mode="json", exclude_unset=True)
        for rank, client in enumerate(clients):
            message = {"at": at, "rank": rank, "workers": len(clients), "plan": plan}
            runner.send_message(BEGIN, message, client_id=client)
        session.begin(at, -1, len(clients))
    else:
        session.begin(time.time() + LEAD_S, 0, 1)
        gevent.spawn(_end_alone, session)
    swaps.start(session)


def _begin(environment: Environment, msg: Any, **_: Any) -> None:
    """A worker learns the plan, when to begin, and its part of the schedule."""
    session, order = find(environment), msg.data
    plan = make_plan(order["plan"])
    if plan.digest != session.plan.digest:  # locust takes --run-time from workers, which may be on other machines too
        try:
            session = Session(plan, environment)
        except TraceServeError as exc:
            environment.runner.send_message(END, {"fault": f"a load process cannot run the plan: {exc}"})
            return
        environment.trace_load, _sessions[:] = session, [session]
    session.reset()
    session.begin(order["at"], order["rank"], order["workers"])
    gevent.spawn(_end_of_worker, session)


def _end_of_worker(session: Session) -> None:
    session.wait_for_answers()
    session.environment.runner.send_message(END, {"totals": session.take()})


def _end_alone(session: Session) -> None:
    session.wait_for_answers()
    session.merged.merge(session.take())
    session.ended.add("this process")


def _end(environment: Environment, msg: Any, **_: Any) -> None:
    session = find(environment)
    if "totals" in msg.data:
        session.merged.merge(msg.data["totals"])
    else:
        session.faults.append(msg.data["fault"])
    session.ended.add(msg.node_id)


def _report(client_id: str, data: dict[str, Any]) -> None:
    if _sessions and _sessions[0].started:
        data["trace_load"] = _sessions[0].take()


def _receive(client_id: str, data: dict[str, Any]) -> None:
    if "trace_load" in data and _sessions:
        _sessions[0].merged.merge(data["trace_load"])


def _quit(environment: Environment, **_: Any) -> None:
    session = getattr(environment, "trace_load", None)
    if session is None or not session.started or isinstance(environment.runner, WorkerRunner):
        return
    swaps.stop(session)
    session.merged.merge(session.take())
    environment.process_exit_code = results.conclude_run(session)
    session.started = False
