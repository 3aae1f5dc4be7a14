"""Query files: one JSON object a line, read whole or not at all."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval_gate.checkers import Checker
from trace_serve.errors import QueryError

MAX_RECORD_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class Query(BaseModel):
    """One question and how its answer is graded.

    Attributes:
        id: unique in the file; the two arms are paired by it.
        suite: every suite must pass on its own.
        kind: what reports group by.
        messages: the conversation; `prompt` is short for a single user turn.
        max_tokens: limit of the answer, in tokens.
        checker: the grader of the answer.
        cluster: queries that share it are not independent (one template, customer or conversation).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name
    suite: Name = "default"
    kind: Name = "default"
    messages: tuple[Message, ...] = Field(min_length=1)
    max_tokens: int = Field(default=256, ge=1, le=131_072, strict=True)
    checker: Checker
    cluster: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _prompt_is_one_turn(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "prompt" not in raw:
            return raw
        if "messages" in raw:
            raise ValueError("has both prompt and messages, expected one of them")
        values = {key: value for key, value in raw.items() if key != "prompt"}
        return {**values, "messages": [{"role": "user", "content": raw["prompt"]}]}

    @property
    def prompt_text(self) -> str:
        """The conversation as readers of a report see it."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "\n".join(f"[{message.role}] {message.content}" for message in self.messages)

    @property
    def expected_text(self) -> str:
        """What the checker looks for, as readers of a report see it."""
        if self.checker.type == "regex":
            return f"/{self.checker.pattern}/"
        expected = self.checker.expected
        if isinstance(expected, float):
            return f"{expected:.12g}"
        return expected if isinstance(expected, str) else json.dumps(expected)


@dataclass(frozen=True)
class QuerySet:
    """The queries of one file, in file order.

    Attributes:
        queries: at least one.
        digest: `sha256:` of the file's bytes.
        source: the file's name, for reports.
    """

    queries: tuple[Query, ...]
    digest: str
    source: str

    def sample(self, limit: int | None, seed: int) -> QuerySet:
        """A seeded random subset of at most `limit` queries, in seeded random order.

        The first lines of a file are often its easy ones, so a prefix would not do.
        """
        order = list(self.queries)
        random.Random(f"eval-gate/{seed}").shuffle(order)
        return replace(self, queries=tuple(order if limit is None else order[:limit]))


def load_queries(path: Path) -> QuerySet:
    """Reads a JSON-lines query file.

    Raises:
        QueryError: the file cannot be read, or a record is faulty; the message names `file:line`.
    """
    if not path.is_file():
        raise QueryError(f"{path}: not a regular file, expected a JSON-lines query file", field="queries")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise QueryError(f"{path}: {size} bytes, expected at most {MAX_FILE_BYTES}; split the file", field="queries")
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise QueryError(f"{path}: cannot be read: {exc.strerror}", field="queries") from exc
    queries: list[Query] = []
    first_seen: dict[str, int] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        query = _parse_line(line, f"{path}:{number}")
        if query.id in first_seen:
            raise QueryError(
                f"{path}:{number}: id {query.id!r} is already used on line {first_seen[query.id]}; ids must be unique",
                field="id",
            )
        first_seen[query.id] = number
        queries.append(query)
    if not queries:
        raise QueryError(f"{path}: no queries, expected at least one JSON object a line", field="queries")
    return QuerySet(tuple(queries), "sha256:" + hashlib.sha256(raw).hexdigest(), path.name)


def _parse_line(line: bytes, place: str) -> Query:
    if len(line) > MAX_RECORD_BYTES:
        raise QueryError(f"{place}: record of {len(line)} bytes, expected at most {MAX_RECORD_BYTES}", field="queries")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise QueryError(f"{place}: not UTF-8 at byte {exc.start + 1} of the line", field="queries") from exc
    try:
        record = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise QueryError(
            f"{place}: unpaired surrogate in a string; write the character itself", field="queries"
        ) from exc
    except RecursionError as exc:
        raise QueryError(f"{place}: nested too deeply", field="queries") from exc
    except ValueError as exc:
        raise QueryError(f"{place}: not a JSON object on one line: {exc}", field="queries") from exc
    if not isinstance(record, dict):
        raise QueryError(f"{place}: got {type(record).__name__}, expected a JSON object", field="queries")
    try:
        return Query.model_validate(record)
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        raise QueryError(f"{place}: {where + ': ' if where else ''}{message}", field=where or "queries") from exc


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} appears twice")
        out[key] = value
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
