"""Which weights answered a request, and the refusal of others than a request asked for.

A request that pins `weight_version` is checked three times: before it is sent, so that no work is wasted; when its
first token or whole answer is there, since it may have waited through a weight update; and in between by the engine,
which ends it when an update comes (`max_version_diff: 0`, docs/refit.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import aiohttp

from trace_serve.server.engines.client import EngineClient, EngineView
from trace_serve.server.errors import ApiError, unavailable
from trace_serve.server.schemas.parsing import GenerationRequest

T = TypeVar("T")
HEADER = "x-trace-weight-version"
TIMEOUT_S = 5.0


async def check_loaded(client: EngineClient, engine: EngineView, wanted: GenerationRequest) -> None:
    """Asks the engine which weights serve, if the request names some.

    Raises:
        ApiError: 409, others do; 503, the engine does not say.
    """
    if wanted.weight_version is None:
        return
    try:
        beat = await client.get_json(engine.url, engine.api_key, "/trace/heartbeat", timeout_s=TIMEOUT_S)
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        raise unavailable("the engine does not say which weights serve", code="not_ready", retry_after_s=1.0) from exc
    _compare(wanted, beat.get("weight_version"))


async def answering(
    client: EngineClient, engine: EngineView, wanted: GenerationRequest, work: Callable[[], Awaitable[T]]
) -> T:
    """Awaits an answer; one that the engine ended because weights changed is refused as any other of other weights.

    Raises:
        ApiError: 409, or what the work raised.
    """
    try:
        return await work()
    except ApiError as error:
        if error.code == "generation_failed":
            await check_loaded(client, engine, wanted)
        raise


def header_value(version: object) -> str | None:
    """The label as a header can carry it; None where none can, and then the answer's metadata alone has it."""
    return version if isinstance(version, str) and version.isascii() and version.isprintable() else None


def name_answer(headers: dict[str, str], wanted: GenerationRequest, answer: Mapping[str, Any]) -> None:
    """Sets the header that names the weights of a whole answer.

    Raises:
        ApiError: 409, the request asked for others, or some of its tokens were sampled by others.
    """
    metadata = answer.get("metadata")
    found = metadata if isinstance(metadata, dict) else {}
    for span in found.get("weight_versions") or ():
        _compare(wanted, span["version"])
    _name(headers, wanted, found.get("weight_version"))


def name_stream(headers: dict[str, str], wanted: GenerationRequest, engine_headers: Mapping[str, str]) -> None:
    """Sets the header that names the weights of a stream's first token, from the headers of the engine's answer.

    Raises:
        ApiError: 409, the request asked for others.
    """
    label = engine_headers.get(HEADER)
    _name(headers, wanted, None if label is None else unquote(label))


def _name(headers: dict[str, str], wanted: GenerationRequest, version: object) -> None:
    _compare(wanted, version)
    headers.pop(HEADER, None)  # what the last heartbeat said of the engine, which may have changed since
    value = header_value(version)
    if value is not None:
        headers[HEADER] = value


def _compare(wanted: GenerationRequest, version: object) -> None:
    if wanted.weight_version is not None and version != wanted.weight_version:
        raise ApiError(
            409,
            f"weight_version: got {wanted.weight_version[:60]!r}, but weights {str(version)[:60]!r} are loaded; ask "
            "for those, or leave it out",
            kind="invalid_request_error",
            param="weight_version",
            code="weight_version_not_loaded",
        )
