"""Lets these tests use the front-end's test servers, which live beside its own tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trace_serve" / "server"))
