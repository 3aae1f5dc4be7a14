"""Several remote engines as one: which of them a request goes to, and what happens when one is lost or returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import structlog

from trace_serve.errors import EngineError, TraceServeError
from trace_serve.server.authorization import Authorization
from trace_serve.server.engines.client import EngineClient, EngineView
from trace_serve.server.engines.remote import RemoteAddress, RemoteEngine
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.remote")


class RemotePool:
    """Watches engines that others run; takes the place of a `Supervisor`, but starts and restarts nothing.

    An engine is out of the choice from the first unanswered beat. Requests inside it are cut with an error after
    `heartbeat_misses` of them, or at once when it answers that its scheduler is frozen or that it serves something
    else. It is back with its next answered beat, after its report was checked again.

    Args:
        addresses: the engines, at least one.
        client: HTTP to them.
        settings: intervals and time-outs.
        authorization: what they have to serve.
        on_lost: called with the URL of an engine that was in service, and why it is not any more.
        on_give_up: called once when no engine can ever serve: each answers, and none proves what it serves.
    """

    def __init__(
        self,
        addresses: Sequence[RemoteAddress],
        client: EngineClient,
        settings: Settings,
        authorization: Authorization,
        *,
        on_lost: Callable[[str, str], None],
        on_give_up: Callable[[TraceServeError], None],
    ) -> None:
        self._remotes = [RemoteEngine(address, client, settings, authorization) for address in addresses]
        self._authorized = authorization.digest
        self._interval_s = settings.heartbeat_interval_s
        self._on_lost = on_lost
        self._on_give_up = on_give_up
        self._tasks: list[asyncio.Task[None]] = []
        self._served = False
        self.failure: TraceServeError | None = None
        self.restarts = 0

    @property
    def engine(self) -> EngineView | None:
        """The engine with the fewest requests of this server, of those without doubt if there are any."""
        return self._least([remote for remote in self._remotes if remote.answers])

    @property
    def views(self) -> dict[str, EngineView | None]:
        """Every engine by host and port; None while it is not in service."""
        names = {urlsplit(remote.address.url).netloc: remote for remote in self._remotes}
        return {name: remote.view if remote.answers else None for name, remote in names.items()}

    @property
    def doubt(self) -> str | None:
        """Why no engine should get new traffic, although one lives; None when one is well."""
        doubts = [remote.doubt for remote in self._remotes if remote.answers]
        return None if not doubts or None in doubts else doubts[0]

    @property
    def reason(self) -> str:
        return "; ".join(f"{remote.address.url}: {remote.reason}" for remote in self._remotes if not remote.answers)

    @property
    def weight_version(self) -> str | None:
        """The label of the weights that serve; None while engines differ, since an answer may come from any."""
        labels = {remote.weight_version for remote in self._remotes if remote.answers}
        return labels.pop() if len(labels) == 1 else None

    @property
    def digest(self) -> str | None:
        """Of the directory that the weights are from; that of an engine which differs from the others, if one does."""
        digests = {remote.digest for remote in self._remotes if remote.answers}
        return next((each for each in digests if each != self._authorized), self._authorized if digests else None)

    def alternative(self, refused: EngineView) -> EngineView | None:
        """Where a request goes that could not be sent to an engine, because it took no connection."""
        for remote in self._remotes:
            if remote.address.url == refused.url:
                remote.connection_refused()
        return self._least(
            [
                remote
                for remote in self._remotes
                if remote.answers and remote.view is not None and remote.view.limits == refused.limits
            ]
        )

    def start(self) -> None:
        """Begins to watch; returns at once."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(remote)) for remote in self._remotes]

    async def stop(self) -> None:
        """Stops watching; the engines go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Refuses: weights of engines that others run are exchanged by their owners.

        Raises:
            EngineError: always.
        """
        raise EngineError("engines given by --engine-url get their weights from whoever runs them")

    async def read_weight_version(self) -> None:
        """Asks every engine at once, instead of at its next beat."""
        await asyncio.gather(*(self._beat(remote) for remote in self._remotes))

    def replace(self, reason: str) -> None:
        """Does nothing but say so: an engine that others run is not restarted from here."""
        log.error("remote_engine_not_replaced", reason=reason)

    async def _watch(self, remote: RemoteEngine) -> None:
        while self.failure is None:
            await self._beat(remote)
            await asyncio.sleep(self._interval_s)

    async def _beat(self, remote: RemoteEngine) -> None:
        before = remote.answers
        lost = await remote.beat()
        self._served = self._served or remote.answers
        if before and not remote.answers:
            log.warning("remote_engine_silent", url=remote.address.url, reason=remote.reason)
        if lost is not None:
            log.error("remote_engine_lost", url=remote.address.url, reason=lost)
            self._on_lost(remote.address.url, lost)
        hopeless = not self._served and all(each.unproven for each in self._remotes)
        if hopeless and remote.unproven is not None and self.failure is None:
            self.failure = remote.unproven
            self._on_give_up(remote.unproven)

    def _least(self, remotes: list[RemoteEngine]) -> EngineView | None:
        views = [(remote.doubt is not None, remote.view) for remote in remotes if remote.view is not None]
        if not views:
            return None
        return min(views, key=lambda each: (each[0], each[1].load.in_flight))[1]
