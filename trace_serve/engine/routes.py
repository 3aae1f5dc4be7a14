"""Routes that the engine's own HTTP server gains: `/trace/heartbeat` and `/trace/report`.

The report's `policy_digest` is that of the directory the weights came from last, None when a trainer sent them. Both
answer from shared memory and from what the scheduler reported at start, so they never wait for generation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trace_serve.engine import report, state
from trace_serve.engine.refit import status


def heartbeat() -> dict[str, Any]:
    """Age of the scheduler's last sign of life in seconds, whether it is below the limit, and which weights serve.

    `policy_digest` is None for weights that a trainer sent.
    """
    engine = state.get()
    serving = status.read(engine.spec.run_dir)
    age = engine.telemetry.age_s()
    limit = engine.spec.stall_limit_s
    return {
        "age_s": age,
        "limit_s": limit,
        "alive": age is not None and age < limit,
        "quarantined": bool(engine.telemetry.get("quarantined")),
        "weight_version": serving.label,
        "policy_digest": engine.spec.policy_digest if serving.version == 0 else serving.model_digest or None,
    }


def weights() -> dict[str, Any]:
    """Which weights serve, why not if none do, and how many requests were computed by weights of several versions."""
    engine = state.get()
    counted = ("weight_updates", "mixed_requests", "stale_requests", "stale_tokens")
    counters = {name: engine.telemetry.get(name) for name in counted}
    return {**dataclasses.asdict(status.read(engine.spec.run_dir)), **counters}


def install(app: Any, scheduler_infos: list[dict[str, Any]]) -> None:
    """Adds the routes to SGLang's FastAPI application."""
    loaded = scheduler_infos[0][report.KEY]

    async def trace_heartbeat() -> dict[str, Any]:
        return heartbeat()

    async def trace_report() -> dict[str, Any]:
        telemetry, beat = state.get().telemetry, heartbeat()
        return {
            **loaded,
            "policy_digest": beat["policy_digest"],
            "incidents": telemetry.incidents(),
            "hint_files": {
                "written": telemetry.get("hint_files"),
                "bytes": telemetry.get("hint_bytes"),
                "failed": telemetry.get("hint_failures"),
                "dropped": telemetry.get("hints_dropped"),
                "expired": telemetry.get("hints_expired"),
                "pending": telemetry.hints_pending,
            },
            "weights": weights(),
            "ready": beat["alive"] and not beat["quarantined"],
        }

    app.add_api_route("/trace/heartbeat", trace_heartbeat, methods=["GET"])
    app.add_api_route("/trace/report", trace_report, methods=["GET"])
