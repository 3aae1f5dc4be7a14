"""Activates policies in turn over the admin API while the load runs."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from itertools import cycle
from typing import Any

import gevent

from trace_load.session import Session

UNFINISHED = "not finished when the run ended"


def start(session: Session) -> None:
    """Begins after the warm-up; does nothing where the plan swaps nothing."""
    session.swapper = gevent.spawn(_swap_in_turn, session) if session.plan.swap_url else None


def stop(session: Session) -> None:
    if session.swapper is not None:
        session.swapper.kill()


def _swap_in_turn(session: Session) -> None:
    plan = session.plan
    labels = cycle(label.strip() for label in plan.swap_policies.split(",") if label.strip())
    at_s = plan.warmup + plan.swap_every
    while at_s < plan.total_s:
        gevent.sleep(max(at_s - session.now, 0))
        label = next(labels)
        record: dict[str, Any] = {"at_s": session.now, "policy": label, "seconds": 0.0, "fault": UNFINISHED}
        session.swaps.append(record)
        began = time.perf_counter()
        record["fault"] = _activate(session, label)
        record["seconds"] = time.perf_counter() - began
        at_s += plan.swap_every


def _activate(session: Session, label: str) -> str:
    """Why the server did not activate it; empty when it did."""
    key = session.environment.parsed_options.swap_key
    request = urllib.request.Request(
        session.plan.swap_url.rstrip("/") + "/admin/activate",
        data=json.dumps({"policy": label}).encode(),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json", "x-trace-actor": "load-test"},
    )
    try:
        with urllib.request.urlopen(request, timeout=session.plan.timeout):
            return ""
    except urllib.error.HTTPError as exc:
        return f"status {exc.code}: {exc.read(300).decode('utf-8', 'replace')}"
    except OSError as exc:
        return str(exc) or type(exc).__name__
