"""Redactors as an operator would write them; tests name them as `redactors:NAME`."""

from __future__ import annotations

import re

__version__ = "7"


def mask(text: str) -> str:
    return re.sub(r"SECRET\w*", "[gone]", text)


def broken(text: str) -> str:
    raise ValueError(f"cannot redact {text}")
