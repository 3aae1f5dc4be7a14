"""Gathering a request's rows in the scheduler while its KV slots are its own, and sending them off with its answer.

A row belongs to the forward pass that sampled the token behind it. Slots are read when the request finishes, and when
it is retracted: what had been sampled by then keeps its rows, whatever the prefill that follows computes.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from trace_serve.engine import refit, rows, state
from trace_serve.errors import EngineError
from trace_serve.hints import wire
from trace_serve.hints.options import FIELD, HintOptions
from trace_serve.hints.sinks import Job, parse_target

logger = logging.getLogger(__name__)

_ATTRIBUTE = "trace_hints"
"""Attribute of SGLang's request that carries our `Collected`."""


@dataclass
class Collected:
    """What is known of one request's rows.

    Attributes:
        options: what it asked for.
        name: its hints' name.
        parts: rows read so far, one after the other from `options.first_token` on; only on the rank that answers.
        end: position behind the last row that was read.
        finished: the last part has been read.
        failure: why rows could not be read; empty where they could.
    """

    options: HintOptions
    name: str
    parts: list[rows.Rows] = field(default_factory=list)
    end: int = 0
    finished: bool = False
    failure: str = ""


def request_options(req: Any) -> tuple[HintOptions, str] | None:
    """Options and name of a request's hints, as `admit` left them; None for one that wants none."""
    custom = getattr(req.sampling_params, "custom_params", None)
    wanted = custom.get(FIELD) if isinstance(custom, dict) else None
    if wanted is None:
        return None
    raw = dict(wanted)
    name = raw.pop("name")
    return HintOptions(**raw), name


def collect(processor: Any, req: Any) -> None:
    """Reads the rows of a request that just finished, before its slots are released.

    Args:
        processor: SGLang's batch result processor, which holds the request-to-token table.
        req: one that did not ask for hints is left alone.
    """
    wanted = request_options(req)
    if wanted is None:
        return
    tokens = len(req.origin_input_ids) + len(req.output_ids_through_stop)
    count = tokens - 1 if req.output_ids_through_stop else tokens
    pool = processor.token_to_kv_pool_allocator.get_kvcache()
    _guarded(req, wanted, processor.req_to_token_pool, pool, count, finished=True)


def keep_before_retraction(req: Any, req_to_token_pool: Any, pool: Any) -> None:
    """Reads the rows of a request that loses its slots now and will be prefilled again.

    The row of its last token is not among them: the token behind it was not sampled yet.
    """
    wanted = request_options(req)
    if wanted is None or not req.output_ids:
        return
    count = len(req.origin_input_ids) + len(req.output_ids) - 1
    _guarded(req, wanted, req_to_token_pool, pool, count, finished=False)


def _guarded(
    req: Any, wanted: tuple[HintOptions, str], req_to_token_pool: Any, pool: Any, count: int, *, finished: bool
) -> None:
    """Reads the rows up to `count`; a failure is kept for the answer to tell, since the answer itself is sound."""
    options, name = wanted
    collected = getattr(req, _ATTRIBUTE, None) or Collected(options, name, end=options.first_token)
    setattr(req, _ATTRIBUTE, collected)
    collected.finished = finished
    begin, collected.end = min(collected.end, count), max(collected.end, count)
    found: rows.Rows | str | None
    try:
        slots = req_to_token_pool.req_to_token[req.kv.req_pool_idx, begin:count].to(torch.int64)
        found = rows.read(pool, slots, options)
    except Exception as exc:
        found = f"{type(exc).__name__}: {exc}"
        logger.exception("rows of request %s cannot be read", req.rid)
    # A rank that failed takes part as well, or the others would wait for it.
    engine = state.get()
    try:
        found = engine.ranks.gather(found, engine.widths)
    except Exception as exc:
        found = f"{type(exc).__name__}: {exc}"
        logger.exception("rows of request %s cannot be put together", req.rid)
    if isinstance(found, str):
        collected.failure = found
    elif found is not None:
        collected.parts.append(found)


def answer(req: Any) -> dict[str, Any] | None:
    """Sends the rows of a finished request to their sink; what its answer says of them, once.

    Nothing that goes wrong here takes the answer, the engine or another request with it: it is counted, and said.
    """
    collected = getattr(req, _ATTRIBUTE, None)
    if collected is None or not collected.finished or not req.finished() or state.get().ranks.rank:
        return None
    setattr(req, _ATTRIBUTE, None)
    engine = state.get()
    base = {"sink": collected.options.sink, "name": collected.name}
    try:
        if collected.failure:
            raise EngineError(collected.failure)
        hints = _hint_file(req, collected)
        base |= {"rows": hints.rows, "first_token": hints.first_token}
        return base | _send(hints, collected)
    except Exception as exc:
        engine.telemetry.add("hint_failures", 1)
        logger.exception("hints of request %s are lost", req.rid)
        return base | {"status": "failed", "reason": f"{type(exc).__name__}: {exc}"}


def _send(hints: wire.HintFile, collected: Collected) -> dict[str, Any]:
    engine = state.get()
    options = collected.options
    # Bits, whole scale bytes and codes, as they lie in memory until they are encoded.
    size = sum(
        site.bits.nbytes + site.bits.size + (0 if site.codes is None else site.codes.nbytes) for site in hints.sites
    )
    if options.sink == "inline":
        payload = wire.to_bytes(hints, scale=options.scale)
        limit = engine.spec.hint_inline_bytes
        if len(payload) > limit:
            engine.telemetry.add("hints_dropped", 1)
            reason = f"{len(payload)} bytes, more than the {limit} that an answer may carry; use another sink"
            return {"status": "dropped", "reason": reason}
        return {"status": "ok", "data": base64.b64encode(payload).decode()}
    job = Job(
        name=collected.name,
        target=parse_target(options.sink),
        encode=lambda: wire.to_bytes(hints, scale=options.scale),
        size_hint=size,
    )
    receipt = engine.send_hints(job)
    sent = {"status": receipt.status, "uri": receipt.uri}
    return {**sent, "reason": receipt.reason} if receipt.reason else sent


def _hint_file(req: Any, collected: Collected) -> wire.HintFile:
    engine = state.get()
    options = collected.options
    joined = rows.join(collected.parts)
    output = list(req.output_ids_through_stop)
    tokens = [*req.origin_input_ids, *output]
    first = min(options.first_token, len(tokens) - 1 if output else len(tokens))
    token_ids = np.asarray(tokens[first : first + len(joined)], dtype=np.int32)
    current = joined.versions == engine.weight_version
    keep = current if options.versions == "current" else np.ones_like(current)
    sites = tuple(replace(site, present=site.present & keep) for site in joined.sites)
    return wire.HintFile(
        token_ids=token_ids,
        sites=sites,
        recipe_id=engine.spec.recipe.recipe_id,
        model_digest=engine.model_digest,
        weight_versions=refit.spans(joined.versions),
        first_token=first,
        logprobs=_logprobs(req, first, len(joined)) if options.logprobs else None,
        routed_experts=joined.routed,
        routed_present=None if joined.routed is None else keep & (joined.versions >= 0),
        next_token_id=int(output[-1]) if output else None,
    )


def _logprobs(req: Any, first: int, count: int) -> Any:
    """float32 [T]: row t has the log-probability of the sampled token t + 1; NaN where that token is of the prompt."""
    out = np.full(count, np.nan, dtype=np.float32)
    values = req.logprob.output_token_logprobs_val or ()
    begin = len(req.origin_input_ids) - 1
    for i, value in enumerate(values[: len(req.output_ids_through_stop)]):
        row = begin + i - first
        if 0 <= row < count and value is not None:
            out[row] = value
    return out
