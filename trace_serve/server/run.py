"""Runs a front-end until a signal or a lost engine ends it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn

from trace_serve.engine.settings import engine_config
from trace_serve.errors import EXIT_PASS, ConfigError, TraceServeError
from trace_serve.server.admin.run import Admin, open_registry
from trace_serve.server.app import create_app
from trace_serve.server.authorization import Authorization, authorize_policy
from trace_serve.server.engines.remote import check_remote
from trace_serve.server.engines.supervisor import EngineLike
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.listening import listen
from trace_serve.server.observe.logging_engine import FollowedEngine
from trace_serve.server.observe.logging_setup import configure_logging, hide
from trace_serve.server.policies.registry import Registry
from trace_serve.server.protocol import bounded_protocol
from trace_serve.server.service import EngineFactory
from trace_serve.server.tls import RenewedTls
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.server")
SHUTDOWN_MARGIN_S = 5.0
POLL_S = 1.0
"""How often the parent process and the certificate's files are looked at."""


def serve_policy(
    policy: str | None, settings: Settings, engines: Callable[[Settings], EngineFactory] | None = None
) -> int:
    """Authorises a policy and serves it; returns the exit code.

    Args:
        policy: its directory, or its label in the registry; None starts without one, for the admin API to activate.
        settings: of the server.
        engines: what makes engines; by default SGLang's.

    Raises:
        TraceServeError: the policy may not be served; nothing has been started.
    """
    configure_logging(settings.log_level, settings.log_format)
    for secret in (settings.api_key, settings.admin_key):
        if secret is not None:
            hide(secret.get_secret_value())
    with tempfile.TemporaryDirectory(prefix="trace-serve-hints-") as scratch:
        check_remote(settings)
        if settings.hint_dir is None and settings.mode == "rollout" and not settings.engine_urls:
            settings = settings.model_copy(update={"hint_dir": Path(scratch)})
        registry = open_registry(settings)
        authorization = _authorize(policy, settings, registry)
        if authorization is not None:
            log.info("authorized", **authorization.summary())
        return run_server(settings, authorization, (engines or engine_factory)(settings), registry)


def check_policy(policy: str | None, settings: Settings) -> int:
    """Authorises a policy and has SGLang resolve the arguments of its engine; prints both as JSON, serves nothing.

    Raises:
        TraceServeError: the policy may not be served, or not with these arguments.
    """
    check_remote(settings)
    authorization = _authorize(policy, settings, open_registry(settings))
    told: dict[str, Any] = {} if authorization is None else authorization.summary()
    if authorization is not None and not settings.engine_urls:
        from trace_serve.engine.launch import EngineProcess

        told |= EngineProcess(engine_config(settings, authorization.path, authorization.recipe)).resolve()
    print(json.dumps(told, indent=2))
    return EXIT_PASS


def _authorize(policy: str | None, settings: Settings, registry: Registry | None) -> Authorization | None:
    if policy is None and (registry is None or settings.admin_port is None):
        raise ConfigError(
            "POLICY: missing; name a policy directory, or start with --registry and --admin-port and activate one",
            field="policy",
        )
    if policy is None:
        return None
    if registry is not None and not Path(policy).is_dir():
        return registry.authorize(policy)
    return authorize_policy(
        Path(policy),
        mode=settings.mode,
        verdict=settings.verdict,
        public_key=settings.public_key,
        hints=settings.hint_dir is not None,
    )


def engine_factory(settings: Settings) -> EngineFactory:
    """Makes engines for policies; each one digests the files again, so that an edit after the check is noticed."""
    from trace_serve.engine.launch import EngineProcess

    def make(authorization: Authorization) -> EngineLike:
        engine = EngineProcess(engine_config(settings, authorization.path, authorization.recipe))
        return engine if settings.engine_log is not None else FollowedEngine(engine)

    return make


def run_server(
    settings: Settings,
    authorization: Authorization | None,
    factory: EngineFactory,
    registry: Registry | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or a lost engine, with the engine stopped afterwards.

    Returns:
        0 after a signal, else the exit code of the error that ended the engine for good.

    Raises:
        ConfigError: the address is not free; no engine has been started.
    """
    server: _Server | None = None

    def on_exit() -> None:
        if server is not None:
            server.should_exit = True

    app = create_app(settings, authorization, factory, on_exit=on_exit)
    front: FrontEnd = app.state.front
    if settings.admin_port is not None:
        front.attach(Admin(settings, front, registry))
    tls = RenewedTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    config = uvicorn.Config(
        app,
        ssl_context_factory=tls.factory,
        loop="uvloop",
        http=bounded_protocol(settings.head_timeout_s),
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_s + SHUTDOWN_MARGIN_S),
    )
    listener = listen(settings.host, settings.port)
    log.info("listening", host=settings.host, port=listener.getsockname()[1], tls=tls.context is not None)
    server = _Server(config, front, tls)
    server.run(sockets=[listener])
    if front.failure is not None:
        log.error("gave_up", reason=str(front.failure))
        return front.failure.exit_code
    return EXIT_PASS


class _Server(uvicorn.Server):
    """uvicorn, but a signal drains with error events for what is cut, and the process ends with 0."""

    def __init__(self, config: uvicorn.Config, front: FrontEnd, tls: RenewedTls) -> None:
        super().__init__(config)
        self._front = front
        self._tls = tls
        self._parent = os.getppid()
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._end, self._signals > 1)

    async def on_tick(self, counter: int) -> bool:
        if counter % round(POLL_S / 0.1) == 0:
            self._tls.refresh()
            if self._front.settings.exit_with_parent and os.getppid() != self._parent:
                log.info("parent_gone")
                self._end(True)
        return await super().on_tick(counter)

    def _end(self, now: bool) -> None:
        self._front.begin_drain(now=now)
        self.should_exit = True


def fail(error: TraceServeError) -> int:
    """Prints one line for a person and returns the exit code."""
    print(f"trace-serve: {error}", file=sys.stderr)
    return error.exit_code
