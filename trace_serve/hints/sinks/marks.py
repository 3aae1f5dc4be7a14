"""An explicit sign that hints will not come, left beside where they would be."""

from __future__ import annotations

import json
from typing import Literal

MarkKind = Literal["dropped", "failed", "expired"]
KINDS: tuple[MarkKind, ...] = ("dropped", "failed", "expired")


def file_name(name: str, kind: MarkKind) -> str:
    return f"{name}.{kind}.json"


def content(name: str, kind: MarkKind, reason: str) -> bytes:
    """One JSON object: `schema_version` 1, `name`, `status`, `reason`."""
    return json.dumps({"schema_version": 1, "name": name, "status": kind, "reason": reason}).encode() + b"\n"


def reason_of(data: bytes) -> str:
    """The reason that a mark gives; a mark that cannot be read is a mark nevertheless."""
    try:
        return str(json.loads(data)["reason"])
    except (ValueError, KeyError, TypeError):
        return "the mark is damaged"
