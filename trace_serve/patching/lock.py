"""The lock: which SGLang release the patches are for, and each touched file's digest before and after them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import PatchError

_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest(content: bytes | None) -> str | None:
    """SHA-256 in hex; None for a file that does not exist."""
    return None if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class LockedFile:
    """Digests of one file; `before` is None for a file that the patches create."""

    before: str | None
    after: str


@dataclass(frozen=True)
class Lock:
    sglang: str
    files: Mapping[str, LockedFile]

    @property
    def filename(self) -> str:
        return f"sglang-{self.sglang}.lock"

    def to_json(self) -> str:
        files = {path: {"before": file.before, "after": file.after} for path, file in sorted(self.files.items())}
        return json.dumps({"sglang": self.sglang, "files": files}, indent=2) + "\n"


def find_lock(directory: Path) -> Path:
    """The only `sglang-*.lock` of a patch directory.

    Raises:
        PatchError: there is none, or more than one.
    """
    found = sorted(directory.glob("sglang-*.lock"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise PatchError(
            f"{directory}: got lock files {names}, expected exactly one sglang-<version>.lock; "
            "write it with `trace-serve patch lock` and remove the others",
            field="patches",
        )
    return found[0]


def load_lock(path: Path) -> Lock:
    """Reads and checks one lock file.

    Raises:
        PatchError: unreadable, not JSON, or not of the documented form.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        lock = Lock(
            sglang=_text(raw["sglang"]), files={_text(key): _locked(file) for key, file in raw["files"].items()}
        )
    except OSError as exc:
        raise PatchError(f"{path}: cannot be read: {exc.strerror}", field=path.name) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PatchError(
            f"{path}: not a patch lock ({exc!r}); write it anew with `trace-serve patch lock`", field=path.name
        ) from exc
    if lock.filename != path.name:
        raise PatchError(f"{path}: locks sglang {lock.sglang}, expected the name {lock.filename}", field=path.name)
    return lock


def _locked(raw: Any) -> LockedFile:
    before = None if raw["before"] is None else _hex(raw["before"])
    return LockedFile(before=before, after=_hex(raw["after"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}, expected a string")
    return value


def _hex(value: Any) -> str:
    if not _DIGEST.fullmatch(_text(value)):
        raise ValueError(f"got {value!r}, expected a SHA-256 in hex")
    return str(value)
