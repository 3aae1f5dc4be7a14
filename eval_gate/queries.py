"""Query files: one JSON object a line, read whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval_gate.checkers import Checker
from eval_gate.looks import shuffled
from trace_serve.errors import QueryError

MAX_RECORD_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}

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
        return self.checker.shown


@dataclass(frozen=True)
class QuerySet:
    """The queries of one file, in file order.

    Attributes:
        queries: at least one.
        digest: `sha256:` of the file's bytes.
        source: the file's name, for reports.
        data: the file's bytes where there is no such file: the queries were generated, merged or redacted.
    """

    queries: tuple[Query, ...]
    digest: str
    source: str
    data: bytes | None = field(default=None, repr=False)

    def sample(self, limit: int | None, seed: int) -> QuerySet:
        """A seeded random subset of at most `limit` queries, in seeded random order.

        The first lines of a file are often its easy ones, so a prefix would not do.
        """
        return replace(self, queries=tuple(shuffled(self.queries, seed)[:limit]))


def load_queries(path: Path) -> QuerySet:
    """Reads a JSON-lines query file.

    Raises:
        QueryError: the file cannot be read, or a record is faulty; the message names `file:line`.
    """
    raw = read_file(path)
    queries = parse_queries(raw, str(path))
    return QuerySet(queries, "sha256:" + hashlib.sha256(raw).hexdigest(), path.name)


def read_file(path: Path) -> bytes:
    """A whole file of bounded size.

    Raises:
        QueryError: it is not a regular file, too large or cannot be read.
    """
    if not path.is_file():
        raise QueryError(f"{path}: not a regular file, expected a JSON-lines query file", field="queries")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise QueryError(f"{path}: {size} bytes, expected at most {MAX_FILE_BYTES}; split the file", field="queries")
    try:
        return path.read_bytes()
    except OSError as exc:
        raise QueryError(f"{path}: cannot be read: {exc.strerror}", field="queries") from exc


def parse_queries(raw: bytes, name: str) -> tuple[Query, ...]:
    """Reads JSON lines that are already in memory; `name` stands for the file in messages. Raises as `load_queries`."""
    check_encoding(raw, name)
    queries: list[Query] = []
    first_seen: dict[str, int] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        query = _parse_line(line, f"{name}:{number}")
        if query.id in first_seen:
            raise QueryError(
                f"{name}:{number}: id {query.id!r} is already used on line {first_seen[query.id]}; ids must be unique",
                field="id",
            )
        first_seen[query.id] = number
        queries.append(query)
    if not queries:
        raise QueryError(f"{name}: no queries, expected at least one JSON object a line", field="queries")
    return tuple(queries)


def canonical(queries: Iterable[Query]) -> bytes:
    """The queries as a query file; reading it gives the same queries."""
    lines = [query.model_dump_json(by_alias=True, exclude_defaults=True) for query in queries]
    return "".join(line + "\n" for line in lines).encode()


def generated(queries: Sequence[Query], source: str) -> QuerySet:
    """A query set that does not come from a file."""
    data = canonical(queries)
    return QuerySet(parse_queries(data, source), "sha256:" + hashlib.sha256(data).hexdigest(), source, data)


def merge(sets: Sequence[QuerySet]) -> QuerySet:
    """Several query sets as one; ids must be unique over all of them."""
    if len(sets) == 1:
        return sets[0]
    return generated([query for one in sets for query in one.queries], " + ".join(one.source for one in sets))


def check_encoding(raw: bytes, name: str) -> None:
    """Refuses a byte order mark, whose bytes would otherwise become part of the first key.

    Raises:
        QueryError: there is one.
    """
    for mark, encoding in _MARKS.items():
        if raw.startswith(mark):
            raise QueryError(
                f"{name}:1: starts with the byte order mark of {encoding}; save the file as UTF-8 without one",
                field="queries",
            )


def _parse_line(line: bytes, place: str) -> Query:
    try:
        return Query.model_validate(parse_record(line, place))
    except ValidationError as exc:
        message = validation_message(exc)
        raise QueryError(f"{place}: {message}", field=message.partition(":")[0]) from exc


def validation_message(exc: ValidationError) -> str:
    """The first fault, as `field: what is wrong`."""
    fault = exc.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}"


def parse_record(line: bytes, place: str) -> dict[str, Any]:
    """One line as a JSON object, without repeated keys, NaN or unpaired surrogates.

    Raises:
        QueryError: it is none, or too long; `place` is in the message.
    """
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
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} appears twice")
        out[key] = value
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
