"""Requests that weights change under: which versions computed them, and those that lag too far behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trace_serve.engine.refit.versions import LIMIT_FIELD, sampled_versions

META_KEY = "weight_version_spans"
CARRIER = "_trace_weight_versions"
_EVENTS = "_trace_version_events"
_SUMMARY = "_trace_version_summary"


def in_flight(scheduler: Any) -> list[Any]:
    """Requests that have computed something and are not finished."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    every = {*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue, *chunked}
    return [req for req in every if not req.finished() and (req.output_ids or req.kv.holds_kv)]


def note(requests: Iterable[Any], version: int) -> None:
    """Records that `version` ends while these requests are in flight."""
    for req in requests:
        events: list[tuple[int, int]] = req.__dict__.setdefault(_EVENTS, [])
        events.append((version, len(req.output_ids)))


def events_of(req: Any) -> list[tuple[int, int]]:
    """(version, output tokens at its end) of every version that ended while the request was in flight."""
    found: list[tuple[int, int]] = req.__dict__.get(_EVENTS, [])
    return found


def limit_of(req: Any) -> int | None:
    """`max_version_diff` of the request's custom parameters."""
    custom = getattr(req.sampling_params, "custom_params", None)
    limit = custom.get(LIMIT_FIELD) if isinstance(custom, dict) else None
    return limit if type(limit) is int else None


def cut(requests: Iterable[Any], version: int) -> int:
    """Ends the requests whose oldest token lags more versions behind `version` than they allow; returns how many.

    They end with finish reason `abort` and what they have, at the next token: a trainer drops such a sample anyway.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    count = 0
    for req in requests:
        limit, events = limit_of(req), events_of(req)
        if limit is None or not events or version - events[0][0] <= limit:
            continue
        req.to_finish = FINISH_ABORT(
            f"{LIMIT_FIELD} {limit} exceeded: the first tokens are {version - events[0][0]} weight versions old"
        )
        count += 1
    return count


def keep(req: Any, summary: dict[str, Any]) -> None:
    """Leaves a summary with its request until the answer is sent."""
    req.__dict__[_SUMMARY] = summary


def take(req: Any) -> dict[str, Any] | None:
    """The summary of a finished request, once."""
    found: dict[str, Any] | None = req.__dict__.pop(_SUMMARY, None) if req.finished() else None
    return found


def summarize(req: Any, rows: list[int], version: int, spans: Any) -> dict[str, Any]:
    """The answer's `weight_version_spans`.

    Args:
        req: a finished request that weights changed under.
        rows: version of each of its rows.
        version: that serves now.
        spans: `Versions.spans`.

    Returns:
        `rows` and `sampled`, lists of [first, end, label] over rows (prompt and output but the last token) and over
        output tokens; `version_diff`, newest minus oldest version; `stale_tokens`, those more than the request's
        `max_version_diff` behind `version`, 0 without one.
    """
    prompt, output = len(req.origin_input_ids), len(req.output_ids_through_stop)
    sampled = sampled_versions(events_of(req), rows, prompt, output)
    every = [*rows, *sampled]
    limit = limit_of(req)
    tokens = [*rows[:prompt], *sampled]
    return {
        "rows": [list(span) for span in spans(rows)],
        "sampled": [list(span) for span in spans(sampled)],
        "version_diff": max(every) - min(every) if every else 0,
        "stale_tokens": 0 if limit is None else sum(version - token > limit for token in tokens),
    }
