"""API keys: how they are made, what is kept of them, and which one a request carries.

A key is 256 random bits, so its plain SHA-256 can be neither inverted nor guessed: salt and a slow hash defend short
human passwords, and here would only make every request slow.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

PREFIX = "tsk_"
"""Starts every key, so that scanners for leaked secrets can find one."""

Scope = Literal["generate", "hints", "report", "metrics"]
"""What a key opens: sampling; hint files and rollouts; `/trace/report`; `/metrics` where that needs a key."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("generate", "hints", "report")

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Count = Annotated[int, Field(ge=1, le=2**40)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KeyLimits(_Strict):
    """What one key may use; None takes the server's setting.

    Attributes:
        requests_per_minute: requests that pass the checks of their fields, in a window of 60 s.
        tokens_per_minute: prompt and completion tokens in a window of 60 s.
        concurrent: requests running and waiting at once.
    """

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent: _Count | None = None


class KeyEntry(_Strict):
    """One key as the key file keeps it.

    Attributes:
        name: who it was given to; names the key in logs.
        sha256: hex digest of the key's UTF-8 bytes; the key itself is kept nowhere.
        created, expires: points in time with a zone; None never expires.
        scopes: what it opens.
        limits: what it may use.
    """

    name: KeyName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    scopes: Annotated[list[Scope], Field(min_length=1)] = Field(default_factory=lambda: list(DEFAULT_SCOPES))
    limits: KeyLimits = KeyLimits()

    def expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


class KeyFile(_Strict):
    """The contents of a key file."""

    version: Literal[1]
    keys: list[KeyEntry]

    @model_validator(mode="after")
    def _unique(self) -> KeyFile:
        for what, values in (("name", [k.name for k in self.keys]), ("sha256", [k.sha256 for k in self.keys])):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is there twice, expected once")
        return self


def mint_key() -> str:
    """A new key: the prefix and 32 random bytes in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What is kept of a key: the hex SHA-256 of its UTF-8 bytes."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_entry(name: str, key: str, *, expires: datetime | None, scopes: Iterable[Scope], limits: KeyLimits) -> KeyEntry:
    """The entry of a key made now.

    Raises:
        pydantic.ValidationError: a bad name, no scope, or a limit below 1.
    """
    return KeyEntry(
        name=name,
        sha256=hash_key(key),
        created=datetime.now(UTC).replace(microsecond=0),
        expires=expires,
        scopes=list(scopes),
        limits=limits,
    )


class KeyRing:
    """Finds the entry of a presented key in time that depends on the number of entries alone."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = [(bytes.fromhex(entry.sha256), entry) for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, presented: bytes) -> KeyEntry | None:
        """The entry whose key this is, expired or not; every entry is compared, whichever matches."""
        digest = hashlib.sha256(presented).digest()
        found: KeyEntry | None = None
        for kept, entry in self._entries:
            if hmac.compare_digest(kept, digest):
                found = entry
        return found
