"""Settings of the commands from a file.

A setting comes from, in this order: the flag, the environment variable `EVAL_GATE_<COMMAND>_<FLAG>`, the file
(`--config FILE`, `EVAL_GATE_CONFIG`, else `eval-gate.toml` in the working directory), the default. The file has one
table a command and one key a flag, without the dashes in front.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError

DEFAULT_FILE = Path("eval-gate.toml")
ENVIRONMENT_PREFIX = "EVAL_GATE"


def load_settings(path: Path | None, flags: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Values by command and parameter.

    Args:
        path: the file; None reads `eval-gate.toml` where there is one.
        flags: by command, the long flag's name without dashes to the name of its parameter.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a table or key that is no command or flag.
    """
    if path is None:
        if not DEFAULT_FILE.is_file():
            return {}
        path = DEFAULT_FILE
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--config {path}: cannot be read: {exc.strerror}", field="config") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config {path}: not TOML: {exc}", field="config") from exc
    return {command: _table(path, command, table, flags) for command, table in raw.items()}


def _table(path: Path, command: str, table: Any, flags: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    if command not in flags or not isinstance(table, dict):
        raise ConfigError(
            f"--config {path}: [{command}] is not a command, expected tables among {', '.join(sorted(flags))}",
            field="config",
        )
    values = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in flags[command]:
            raise ConfigError(
                f"--config {path}: [{command}] {key}: `eval-gate {command}` has no flag --{name}", field=key
            )
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(one, str) for one in value)):
            raise ConfigError(f"--config {path}: [{command}] {key}: got {value!r}, expected a plain value", field=key)
        values[flags[command][name]] = value
    return values
