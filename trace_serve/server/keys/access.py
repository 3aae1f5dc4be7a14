"""Who sends a request, and whether that one may: the keys in force, kept up with the key file."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import SecretStr

from trace_serve.errors import ConfigError
from trace_serve.server.errors import ApiError
from trace_serve.server.keys.file import read_keys
from trace_serve.server.keys.key import SCOPES, KeyEntry, KeyLimits, KeyRing, Scope, hash_key
from trace_serve.server.keys.private import Stamp, stamp_of

log = structlog.get_logger("trace_serve.keys")

POLL_S = 1.0
"""How often, at most, the key file is looked at for a change."""
SINGLE_KEY_NAME = "api-key"
NO_LIMITS = KeyLimits()


@dataclass(frozen=True)
class Caller:
    """The client of one request.

    Attributes:
        name: under which its requests are counted and logged: the key's name in the key file, `api-key`, or without any
            keys a hash of whatever bearer it sent, or its address.
        limits: of its key; None values take the server's settings.
    """

    name: str
    limits: KeyLimits = NO_LIMITS


class AccessDenied(ApiError):
    """401: no key, or one that does not count; tells the client how to send one."""

    def __init__(self, message: str) -> None:
        super().__init__(401, message, kind="authentication_error", code="invalid_api_key")

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class Access:
    """Decides by the bearer key of a request.

    A key file that was edited is read again within `POLL_S`. One that cannot be used any more leaves the keys as they
    were and is logged as `key_file_refused`: a slip of an editor must not lock every client out.

    Args:
        api_key: a single key with every scope; only its hash is kept.
        key_file: further keys.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, api_key: SecretStr | None, key_file: Path | None) -> None:
        self._path = key_file
        self._single = [] if api_key is None else [_single_entry(api_key)]
        self._ring = KeyRing(self._single)
        self._seen: Stamp | None = None
        self._look_at = 0.0
        if key_file is not None:
            self._load(key_file)

    @property
    def open(self) -> bool:
        """Whether there are no keys at all, so that everybody may do everything."""
        return self._path is None and not self._single

    def check(self, authorization: str | None, host: str | None, scope: Scope | None) -> Caller:
        """The client that sent this `Authorization` header.

        Args:
            authorization: the header's value.
            host: the client's address, which counts where there is no key.
            scope: what the request needs; None is satisfied by any key.

        Raises:
            ApiError: 401 without a key that counts, 403 where it lacks the scope.
        """
        scheme, _, rest = (authorization or "").partition(" ")
        presented = rest.strip() if scheme.lower() == "bearer" else ""
        if self.open:
            claim = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            return Caller(claim if presented else host or "unknown")
        self._reload_if_changed()
        entry = self._ring.find(presented.encode("utf-8", "surrogateescape"))
        if entry is None:
            raise AccessDenied("missing or wrong API key; send 'Authorization: Bearer <key>'")
        if entry.expired(datetime.now(UTC)):
            raise AccessDenied(f"the API key {entry.name!r} has expired; ask for a new one")
        if scope is not None and scope not in entry.scopes:
            raise ApiError(
                403,
                f"the API key {entry.name!r} lacks the scope {scope!r} that this needs",
                kind="permission_error",
                code="missing_scope",
            )
        return Caller(entry.name, entry.limits)

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._look_at:
            return
        self._look_at = now + POLL_S
        stamp = stamp_of(self._path)
        if stamp == self._seen:
            return
        try:
            self._load(self._path)
            log.info("key_file_loaded", path=str(self._path), keys=len(self._ring))
        except ConfigError as exc:
            self._seen = stamp
            log.error("key_file_refused", reason=str(exc), keys_kept=len(self._ring))

    def _load(self, path: Path) -> None:
        content, stamp = read_keys(path)
        if self._single and any(entry.name == SINGLE_KEY_NAME for entry in content.keys):
            raise ConfigError(
                f"--key-file: {path} names a key {SINGLE_KEY_NAME!r}, which is that of --api-key; rename it",
                field="key_file",
            )
        self._ring = KeyRing([*self._single, *content.keys])
        self._seen = stamp


def _single_entry(api_key: SecretStr) -> KeyEntry:
    return KeyEntry(
        name=SINGLE_KEY_NAME,
        sha256=hash_key(api_key.get_secret_value()),
        created=datetime.now(UTC),
        scopes=list(SCOPES),
    )
