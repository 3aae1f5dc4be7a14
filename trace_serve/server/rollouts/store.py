"""Records of recent rollouts, kept in memory for the client that made them: bounded in number, bytes and age."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from trace_serve.server.errors import ApiError, not_found

GONE_KEPT = 4
"""For each record that may be kept, so many that are gone are remembered with the reason."""


@dataclass(frozen=True)
class _Kept:
    owner: str
    at: float
    body: bytes


@dataclass(frozen=True)
class _Gone:
    owner: str
    code: str
    reason: str


class RolloutStore:
    """Lives inside the event loop; nothing here blocks.

    Args:
        max_count: finished records that are kept; the oldest goes first.
        max_bytes: of all finished records together, as JSON.
        ttl_s: age at which a record goes, in seconds since the answer ended.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_count: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._running: dict[str, str] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._gone: OrderedDict[str, _Gone] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Of the records that are kept."""
        return self._bytes

    def begin(self, rollout_id: str, owner: str) -> None:
        """A request that will be recorded was admitted.

        Args:
            rollout_id: the request's own id.
            owner: whose key may read the record.
        """
        self._running[rollout_id] = owner

    def finish(self, rollout_id: str, record: dict[str, Any]) -> None:
        """Keeps the record of an answer that ended well."""
        owner = self._running.pop(rollout_id, None)
        if owner is None:
            return
        body = orjson.dumps(record)
        if len(body) > self._max_bytes:
            self._bury(rollout_id, owner, "rollout_too_large", f"it has {len(body)} bytes, more than are kept at all")
            return
        self._kept[rollout_id] = _Kept(owner, self._clock(), body)
        self._bytes += len(body)
        self._trim()

    def fail(self, rollout_id: str, reason: str) -> None:
        """The request ended without a whole answer."""
        owner = self._running.pop(rollout_id, None)
        if owner is not None:
            self._bury(rollout_id, owner, "rollout_failed", f"its request failed: {reason}")

    def get(self, rollout_id: str, owner: str) -> dict[str, Any]:
        """The record of a finished rollout.

        Raises:
            ApiError: 404 for an id that this owner's requests never had, or whose request still runs; 410 with the
                reason for a record that was here.
        """
        self._trim()
        kept = self._kept.get(rollout_id)
        if kept is not None and kept.owner == owner:
            record: dict[str, Any] = orjson.loads(kept.body)
            return record
        gone = self._gone.get(rollout_id)
        if gone is not None and gone.owner == owner:
            raise ApiError(
                410,
                f"the rollout {rollout_id} is gone: {gone.reason}",
                kind="invalid_request_error",
                param="rollout_id",
                code=gone.code,
            )
        if self._running.get(rollout_id) == owner:
            raise not_found(
                f"the rollout {rollout_id} is not finished yet; ask again when its answer has ended",
                param="rollout_id",
                code="rollout_running",
            )
        raise not_found(
            f"no rollout {rollout_id[:60]!r} of this key; expected the x-trace-rollout header of an answer that was "
            "asked for with trace_hints or return_rollout",
            param="rollout_id",
            code="rollout_unknown",
        )

    def readable_by(self, rollout_id: str, owner: str) -> bool:
        """Whether nobody else is known to have made this rollout; ids of an earlier life of the server are unknown."""
        if rollout_id in self._running:
            return self._running[rollout_id] == owner
        known = self._kept.get(rollout_id) or self._gone.get(rollout_id)
        return known is None or known.owner == owner

    def _trim(self) -> None:
        oldest_allowed = self._clock() - self._ttl_s
        while self._kept:
            rollout_id, kept = next(iter(self._kept.items()))
            if kept.at < oldest_allowed:
                code, reason = "rollout_expired", f"records are kept for {self._ttl_s:g} s"
            elif len(self._kept) > self._max_count or self._bytes > self._max_bytes:
                code, reason = "rollout_evicted", "newer ones needed the room"
            else:
                return
            del self._kept[rollout_id]
            self._bytes -= len(kept.body)
            self._bury(rollout_id, kept.owner, code, reason)

    def _bury(self, rollout_id: str, owner: str, code: str, reason: str) -> None:
        self._gone[rollout_id] = _Gone(owner, code, reason)
        while len(self._gone) > GONE_KEPT * self._max_count:
            self._gone.popitem(last=False)
