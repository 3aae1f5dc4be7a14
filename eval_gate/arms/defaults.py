"""Reads what a model directory says about stopping and sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval_gate.arms.evidence import GenerationDefaults
from trace_serve.errors import ConfigError

_SAMPLING = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "typical_p")
"""Settings that our requests leave out, so that a server takes them from the model's files. Temperature and top_p are
always sent."""


def read_defaults(directory: Path) -> GenerationDefaults:
    """Stop ids and sampling defaults of a Hugging Face model directory.

    Raises:
        ConfigError: a file that is there is not a JSON object.
    """
    generation = _read(directory / "generation_config.json")
    config = _read(directory / "config.json")
    stop = _ids(generation.get("eos_token_id"))
    if not stop:
        text = config.get("text_config")
        stop = _ids(config.get("eos_token_id")) or _ids(text.get("eos_token_id") if isinstance(text, dict) else None)
    sampling = {
        name: float(value)
        for name in _SAMPLING
        if isinstance(value := generation.get(name), int | float) and not isinstance(value, bool)
    }
    return GenerationDefaults(stop_ids=tuple(sorted(stop)), sampling=sampling)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read as JSON: {exc}", field="arm") from exc
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: got {type(raw).__name__}, expected a JSON object", field="arm")
    return raw


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if type(one) is int]
