"""Brings the admin API up and down beside the front-end, in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from trace_serve.errors import ConfigError, TraceServeError
from trace_serve.server.admin.app import create_admin_app
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.listening import listen
from trace_serve.server.policies.activation import Activator
from trace_serve.server.policies.audit import AuditLog
from trace_serve.server.policies.digests import DigestCache
from trace_serve.server.policies.registry import Registry
from trace_serve.server.policies.shadow import Shadow
from trace_serve.server.protocol import bounded_protocol
from trace_serve.server.service import Service
from trace_serve.server.tls import RenewedTls
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.admin")

STATE_DIR = ".trace-serve"
_TLS_TICKS = 10


def open_registry(settings: Settings) -> Registry | None:
    """The registry that the settings name, or None.

    Raises:
        ConfigError: it, or the state directory, cannot be used.
    """
    if settings.registry is None:
        return None
    cache = DigestCache(state_dir(settings) / "digests.json")
    return Registry(
        settings.registry,
        mode=settings.mode,
        public_key=settings.public_key,
        hints=settings.hint_dir is not None,
        cache=cache,
    )


def state_dir(settings: Settings) -> Path:
    """Where the server keeps what outlives it; made with mode 0700 if it is missing.

    Raises:
        ConfigError: it cannot be made.
    """
    assert settings.registry is not None
    path = settings.state_dir or settings.registry / STATE_DIR
    try:
        path.mkdir(mode=0o700, parents=settings.state_dir is not None, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"--state-dir: {path} cannot be made ({exc.strerror}); name one that can be written", field="state_dir"
        ) from exc
    return path


class Admin:
    """The admin API of one front-end.

    Args:
        settings: port, key and registry.
        front: what it changes.
        registry: where policies come from; None serves weight updates only.

    Raises:
        ConfigError: there is no key, the port is not free, or the audit log is damaged.
    """

    def __init__(self, settings: Settings, front: FrontEnd, registry: Registry | None) -> None:
        assert settings.admin_port is not None
        if settings.admin_key is None:
            raise ConfigError(
                "--admin-port: the admin API needs a key of its own; set TRACE_SERVE_ADMIN_KEY", field="admin_key"
            )
        self._settings, self._front, self._registry = settings, front, registry
        self._audit = None if registry is None else AuditLog(state_dir(settings) / "audit.jsonl")
        self._tls = RenewedTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._listener = listen(settings.admin_host, settings.admin_port, prefix="admin_", backlog=64)
        self._activator: Activator | None = None
        self._server: _Quiet | None = None
        self._task: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begins to listen, and to bring back the policy that was active before; the front-end is open."""
        settings = self._settings
        if self._registry is not None and self._audit is not None:
            state = state_dir(settings)
            self._activator = Activator(
                self._front.services, self._registry, self._audit, settings, state / "active.json", self._shadow
            )
            label = self._activator.remembered()
            if label is not None and self._front.services.active is None:
                self._restoring = asyncio.create_task(self._restore(self._activator, label))
        assert settings.admin_key is not None
        app = create_admin_app(self._front, self._activator, settings.admin_key.get_secret_value())
        config = uvicorn.Config(
            app,
            ssl_context_factory=self._tls.factory,
            loop="uvloop",
            http=bounded_protocol(settings.head_timeout_s),
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
        )
        self._server = _Quiet(config, self._tls)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        host, port = self._listener.getsockname()[:2]
        log.info("admin_listening", host=host, port=port)

    async def close(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        if self._activator is not None:
            await self._activator.close()
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()

    def _shadow(self, service: Service) -> Shadow:
        directory = state_dir(self._settings) / "shadow" / service.authorization.label
        counter = self._front.metrics.shadow_copies
        return Shadow(
            service, self._front.client, self._settings, directory, lambda result: counter.labels(result).inc()
        )

    async def _restore(self, activator: Activator, label: str) -> None:
        try:
            await activator.activate(label, actor="restart")
        except TraceServeError as exc:
            self._front.services.reason = f"{label}, which was active before, may not be served: {exc}"
            log.error("not_restored", policy=label, reason=str(exc))


class _Quiet(uvicorn.Server):
    """Signals belong to the front-end's server."""

    def __init__(self, config: uvicorn.Config, tls: RenewedTls) -> None:
        super().__init__(config)
        self._tls = tls

    async def on_tick(self, counter: int) -> bool:
        if counter % _TLS_TICKS == 0:
            self._tls.refresh()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
