"""Request dumps of SGLang (`/configure_logging`, crash dumps): pickles, opened in a process that can do no harm.

A pickle may run any code when it is opened, so `dump_reader` opens it where every name it asks for is an inert
stand-in, and passes plain JSON on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.checkers.sandbox import network_isolation
from eval_gate.importers.conversion import each
from eval_gate.importers.records import Imported, ImportOptions, UnsupportedRecordError, checker
from eval_gate.queries import MAX_FILE_BYTES
from trace_serve.errors import ConfigError, QueryError

_TIMEOUT_S = 300.0
_READER = Path(__file__).with_name("dump_reader.py")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a request. Its prompt is as the model saw it, chat template included: run with `--api completions`.

    Raises:
        ConfigError: requests hold token ids and there is no tokenizer for them.
        QueryError: not a dump.
    """
    decode = _Decoder(options.tokenizer)

    def build(place: str, raw: Any) -> dict[str, Any]:
        if raw.get("unreadable"):
            raise UnsupportedRecordError(f"{place}: {raw['unreadable']}", field="in")
        prompt = raw["text"] if raw["text"] is not None else decode(raw["input_ids"], place)
        expected = options.expected(raw["id"], raw["output"], place)
        return {
            "id": raw["id"],
            "prompt": prompt,
            "max_tokens": raw["max_new_tokens"] or options.max_tokens,
            "cluster": raw["session"],
            "checker": checker(options.checker or "normalized", expected, place),
        }

    return each(((f"{path}: request {n}", one) for n, one in enumerate(read_requests(path))), build)


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The requests of a dump as plain values.

    Raises:
        QueryError: the file is too large, or no dump.
    """
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise QueryError(f"{path}: cannot be read: {exc.strerror}", field="in") from exc
    if size > MAX_FILE_BYTES:
        raise QueryError(f"{path}: {size} bytes, expected at most {MAX_FILE_BYTES}", field="in")
    with path.open("rb") as source:
        try:
            # The file itself is all that the process gets: no environment, no network where that can be had.
            done = subprocess.run(
                [*(network_isolation() or ()), sys.executable, "-I", str(_READER)],
                stdin=source,
                capture_output=True,
                timeout=_TIMEOUT_S,
                env={"PATH": os.defpath},
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise QueryError(f"{path}: not read in {_TIMEOUT_S:g} s", field="in") from exc
    try:
        answer = json.loads(done.stdout)
    except ValueError as exc:
        raise QueryError(f"{path}: the reader died with exit code {done.returncode}", field="in") from exc
    if "error" in answer:
        raise QueryError(f"{path}: {answer['error']}", field="in")
    requests: list[dict[str, Any]] = answer["requests"]
    return requests


class _Decoder:
    """Token ids to text, without the tokens that the tokenizer puts in front by itself."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._tokenizer: Any = None
        self._prefix: list[int] = []

    def __call__(self, ids: list[int], place: str) -> str:
        if self._tokenizer is None:
            self._load(place)
        begin = len(self._prefix) if ids[: len(self._prefix)] == self._prefix else 0
        return str(self._tokenizer.decode(ids[begin:], skip_special_tokens=False))

    def _load(self, place: str) -> None:
        if self._directory is None:
            raise ConfigError(
                f"{place}: holds token ids; name the model's directory with --tokenizer", field="tokenizer"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as exc:
            raise ConfigError("--tokenizer: needs the package tokenizers", field="tokenizer") from exc
        file = self._directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"--tokenizer {self._directory}: has no tokenizer.json", field="tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._prefix = self._tokenizer.encode("").ids
