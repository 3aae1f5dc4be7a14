"""The example is a directory of scripts; its tests import them as it does itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))
