"""One engine that somebody else runs, reached by its URL: what it proves about itself, and whether it lives.

An engine of ours (`/trace/report`) proves what it loaded and is watched by its heartbeat, as a child process would be.
A plain SGLang server or a gateway (`smg`) proves nothing about weights. It is watched by a route that never
generates: `/readiness` where there is one (a gateway: it has a healthy worker), else `/v1/models` (SGLang: its HTTP
process answers, which says nothing about its scheduler). SGLang's `/health` samples a token and is not asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog

from trace_serve.errors import ConfigError, EngineError, TraceServeError
from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineClient, EngineLoad, EngineView
from trace_serve.server.limits import Limits
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.remote")

NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class RemoteAddress:
    """Attributes:
    url: base URL without a slash at its end.
    api_key: bearer key, empty when the engine wants none.
    """

    url: str
    api_key: str


def check_remote(settings: Settings) -> None:
    """Refuses settings that contradict each other, before anything is started.

    Raises:
        ConfigError: naming the flag.
    """
    if settings.engine_unverified and (settings.mode == "production" or not settings.engine_urls):
        got = "--mode production" if settings.mode == "production" else "no --engine-url"
        raise ConfigError(
            f"--engine-unverified: got it with {got}, expected --mode rollout and --engine-url; production serves only "
            "engines that report which weights they hold",
            field="engine_unverified",
        )
    if settings.engine_urls and settings.admin_port is not None:
        raise ConfigError(
            "--admin-port: got it with --engine-url, expected one of them; policies are exchanged only in engines that "
            "this server starts itself",
            field="admin_port",
        )
    remote_addresses(settings)


def remote_addresses(settings: Settings) -> tuple[RemoteAddress, ...]:
    """The engines that the settings name, each with its key.

    Raises:
        ConfigError: a URL that is none, one given twice, or a key file that does not fit.
    """
    urls = [part.strip().rstrip("/") for part in settings.engine_urls.split(",") if part.strip()]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"--engine-url: got {url[:200]!r}, expected a base URL like http://10.0.0.7:30000", field="engine_urls"
            )
    if len(set(urls)) < len(urls):
        raise ConfigError(f"--engine-url: got {', '.join(urls)}, expected each engine once", field="engine_urls")
    return tuple(RemoteAddress(url, key) for url, key in zip(urls, _keys(settings, len(urls)), strict=True))


def _keys(settings: Settings, engines: int) -> list[str]:
    if settings.engine_key_file is None:
        return [""] * engines
    try:
        lines = settings.engine_key_file.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--engine-key-file: cannot be read: {exc}", field="engine_key_file") from exc
    if len(lines) not in (1, engines):
        raise ConfigError(
            f"--engine-key-file: got {len(lines)} keys for {engines} engines, expected one for all or one a line for "
            "each --engine-url in turn",
            field="engine_key_file",
        )
    return lines * engines if len(lines) == 1 else lines


class UnprovenError(ConfigError):
    """The engine has no report, and the settings do not allow that."""


class RemoteEngine:
    """Asks one engine, once for each call of `beat`; keeps what the last one said.

    Attributes:
        view: the engine as requests see it; None until it has proven itself, and after it was lost.
        answers: whether the last beat was answered.
        doubt: why it should get no new traffic although it lives.
        weight_version: its label of the weights that serve.
        digest: of the directory that those weights are from; empty where a trainer sent them or nothing proves them.
        reason: why it is not in service.
    """

    def __init__(
        self, address: RemoteAddress, client: EngineClient, settings: Settings, authorization: Authorization
    ) -> None:
        self.address = address
        self.view: EngineView | None = None
        self.answers = False
        self.doubt: str | None = None
        self.weight_version: str | None = None
        self.digest: str | None = None
        self.reason = "it has not answered yet"
        self.unproven: UnprovenError | None = None
        self._client = client
        self._settings = settings
        self._authorization = authorization
        self._load = EngineLoad()
        self._watched_route: str | None = None
        self._misses = 0

    async def beat(self) -> str | None:
        """Asks the engine once.

        Returns:
            Why an engine that was in service is lost, on the beat that shows it; None otherwise.
        """
        fault = await self._fault()
        self.answers = fault is None
        if fault is None:
            self._misses = 0
            return None
        self.reason = str(fault)
        self._misses += 1
        final = isinstance(fault, EngineError) or self._misses >= self._settings.heartbeat_misses
        if self.view is None or not final:
            return None
        self.view = None
        self.doubt = None
        return self.reason

    def connection_refused(self) -> None:
        """Takes the engine out of the choice until its next answered beat."""
        self.answers = False
        self.reason = "it refuses connections"

    async def _fault(self) -> str | TraceServeError | None:
        """None when the engine serves; an error when it cannot be the engine it was; else why it is silent."""
        try:
            if self.view is None:
                self.view = await self._inspect()
                log.info("remote_engine_ready", url=self.address.url, unverified=self._watched_route is not None)
            if self._watched_route is not None:
                await self._get(self._watched_route)
                return None
            return await self._heartbeat()
        except TimeoutError:
            return f"no answer in {self._settings.heartbeat_timeout_s:g} s"
        except aiohttp.ClientResponseError as exc:
            hint = "; give its key with --engine-key-file" if exc.status in (401, 403) else ""
            return f"it answered {exc.status}{hint}"
        except TraceServeError as exc:
            return exc
        except (aiohttp.ClientError, ValueError) as exc:
            return str(exc) or type(exc).__name__

    async def _heartbeat(self) -> EngineError | None:
        beat = await self._get("/trace/heartbeat")
        age, label, digest = beat.get("age_s"), beat.get("weight_version"), str(beat.get("policy_digest") or "")
        changed = (label, digest) != (self.weight_version, self.digest)
        self.weight_version = label if isinstance(label, str) else None
        self.digest = digest
        if beat.get("alive") is not True:
            return EngineError(f"its scheduler shows no sign of life (last one {age} s ago)")
        silent_s = float(age) if isinstance(age, int | float) else 0.0
        self.doubt = None
        if silent_s > self._settings.heartbeat_stale_s:
            self.doubt = f"the scheduler of {self.address.url} gave its last sign of life {silent_s:.1f} s ago"
        elif beat.get("quarantined") is True:
            self.doubt = f"{self.address.url} holds weights of two versions after a failed update"
        if changed or not self.answers:  # it may be another process, or hold other weights
            self._check(await self._get("/trace/report"))
        return None

    def _check(self, report: dict[str, Any]) -> None:
        """Compares what the engine reports with what was authorised.

        Raises:
            EngineError: it serves something else. Weights that a trainer sent are no fault in rollout mode.
        """
        if self._settings.mode == "rollout" and report.get("policy_digest", "") is None:
            report = {**report, "policy_digest": self._authorization.digest}
        self._authorization.check_report(report)

    async def _inspect(self) -> EngineView:
        """Reads what the engine proves.

        Raises:
            UnprovenError: it proves nothing, and the settings do not allow that.
            EngineError: it serves something else than was authorised.
            aiohttp.ClientError, TimeoutError, ValueError: it does not answer as an engine does.
        """
        self.unproven = None
        name, told_length = await self._served_model()
        try:
            report = await self._get("/trace/report")
        except aiohttp.ClientResponseError as exc:
            if exc.status not in NO_SUCH_ROUTE:
                raise
            self._refuse_unproven()
            self._watched_route = await self._route_to_watch()
            self.digest = ""
            limits = _limits_of(self._authorization.path, told_length)
            return EngineView(*self._where, name, limits, {"unverified": True}, load=self._load)
        self._watched_route = None
        try:
            limits = Limits(context_length=int(report["context_length"]), vocab_size=int(report["vocab_size"]))
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"its report cannot be used: {exc!r}") from exc
        self._check(report)
        return EngineView(*self._where, name, limits, report, load=self._load)

    @property
    def _where(self) -> tuple[str, str]:
        return self.address.url, self.address.api_key

    def _refuse_unproven(self) -> None:
        if not self._settings.engine_unverified:
            self.unproven = UnprovenError(
                f"--engine-url {self.address.url}: it has no /trace/report, so nothing proves which weights it serves; "
                + (
                    "in production mode only engines of trace-serve are served"
                    if self._settings.mode == "production"
                    else "serve it with --engine-unverified if that does not matter"
                ),
                field="engine_urls",
            )
            raise self.unproven

    async def _served_model(self) -> tuple[str, int | None]:
        """The first model that the engine lists, and its context length if it says so."""
        listed = await self._get("/v1/models")
        try:
            card = listed["data"][0]
            name, length = str(card["id"]), card.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise ValueError("/v1/models: it lists no model") from exc
        return name, length if isinstance(length, int) else None

    async def _route_to_watch(self) -> str:
        try:
            await self._get("/readiness")
        except aiohttp.ClientResponseError as exc:
            if exc.status in NO_SUCH_ROUTE:
                return "/v1/models"
        return "/readiness"

    async def _get(self, path: str) -> dict[str, Any]:
        timeout_s = self._settings.heartbeat_timeout_s
        return await self._client.get_json(*self._where, path, timeout_s=timeout_s)


def _limits_of(policy: Path, told_length: int | None) -> Limits:
    """Vocabulary and context by the policy's own `config.json`, for an engine that does not report them.

    Raises:
        EngineError: the policy does not say.
    """
    try:
        config = json.loads((policy / "config.json").read_text("utf-8"))
        text = config.get("text_config", config)
        length, vocab_size = int(text["max_position_embeddings"]), int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise EngineError(f"{policy}/config.json: context length and vocabulary cannot be read: {exc!r}") from exc
    return Limits(context_length=min(length, told_length or length), vocab_size=vocab_size)
