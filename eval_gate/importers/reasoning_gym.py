"""reasoning-gym: generated puzzles, each scored by the task that made it (extra `gate-suites`).

https://github.com/open-thought/reasoning-gym.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import Imported, ImportOptions, json_lines
from trace_serve.errors import ConfigError, QueryError

_INSTRUCTION = "Give the final answer between <answer> and </answer>."
_FUNCTION = "eval_gate.checkers.reasoning_gym:score"


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a line of a saved data set; `metadata.source_dataset` names the task."""
    return each(json_lines(path), lambda place, raw: _build(place, raw, options))


def generate(task: str, count: int, seed: int, options: ImportOptions) -> Iterator[Imported]:
    """`count` items of a task.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such task.
    """
    try:
        with warnings.catch_warnings():
            # Some of its dependencies are written in a way that current Python warns of.
            warnings.simplefilter("ignore")
            import reasoning_gym
    except ImportError as exc:
        raise ConfigError(
            "--suite reasoning-gym: is not installed; install trace-serve[gate-suites]", field="suite"
        ) from exc
    try:
        entries = list(reasoning_gym.create_dataset(task, size=count, seed=seed))
    except ValueError as exc:
        raise ConfigError(f"--suite reasoning-gym:{task}: {exc}", field="suite") from exc
    places = ((f"reasoning-gym:{task}:{count}:{seed}: item {number}", entry) for number, entry in enumerate(entries))
    return each(places, lambda place, raw: _build(place, raw, options))


def _build(place: str, raw: Any, options: ImportOptions) -> dict[str, Any]:
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(task, str) or not isinstance(raw.get("question"), str):
        raise QueryError(f"{place}: expected question, answer and metadata.source_dataset", field="metadata")
    # Items hold tuples and the like, which the scorer has to see as they will be read back.
    entry = json.loads(json.dumps({key: raw.get(key) for key in ("question", "answer", "metadata")}, default=str))
    number = metadata.get("source_index", place.rpartition(":")[2].removeprefix(" item ")) if metadata else 0
    return {
        "id": f"{task}-{number}",
        "kind": task,
        "prompt": f"{raw['question']}\n\n{_INSTRUCTION}",
        "max_tokens": options.max_tokens,
        "checker": {"type": "python", "function": _FUNCTION, "options": {"task": task, "entry": entry}},
    }
