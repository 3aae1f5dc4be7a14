"""What the scheduler tells the HTTP process about weights: one small JSON file, replaced atomically."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "weights.json"


@dataclass(frozen=True)
class WeightStatus:
    """Attributes:
    version: counter of the weights that serve; 0 are those of the start.
    label: the trainer's name for that version.
    model_digest: digest of the directory that they came from; empty when a trainer sent them.
    session_open: an update session is open, so nothing is generated.
    quarantined: why the engine refuses to generate until a full update arrives; None while it serves.
    last_refused: why the last refused bucket or update was refused; None if there was none.
    """

    version: int = 0
    label: str = "default"
    model_digest: str = ""
    session_open: bool = False
    quarantined: str | None = None
    last_refused: str | None = None


def write(run_dir: Path | str, status: WeightStatus) -> None:
    """Replaces the file; readers see the old or the new one, never a part."""
    path = Path(run_dir) / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
    temporary.replace(path)


def read(run_dir: Path | str) -> WeightStatus:
    """The last status written; the initial one before the scheduler wrote any."""
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        return WeightStatus()
    return WeightStatus(**json.loads(path.read_text(encoding="utf-8")))
