"""One line of `results.jsonl`: what an arm is, or one exchange with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from eval_gate.arms.evidence import ArmEvidence
from trace_serve.errors import ConfigError


class Role(StrEnum):
    """Which version an arm is: A (as trained) or B (as served)."""

    TRAINING = "training"
    SERVING = "serving"


class ErrorClass(StrEnum):
    """Why a sample has no grade. None of these is a wrong answer."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    RATE_LIMITED = "http_429"
    SERVER = "http_5xx"
    REQUEST = "http_4xx"
    RESPONSE = "bad_response"
    CHECKER = "checker"
    JUDGE = "judge"
    BUDGET = "budget"
    MISSING = "missing"


class Failure(BaseModel):
    """An error class and one line about what happened."""

    model_config = ConfigDict(frozen=True)

    kind: ErrorClass
    message: str


class PromptTokens(BaseModel):
    """The rendered prompt as an arm tokenized it, short enough to keep for every query.

    Attributes:
        count: tokens.
        digest: `sha256:` of the ids as little-endian 32-bit integers.
        head: the first tokens, where a missing BOS or another system prompt shows.
        tail: the last tokens, where another generation prompt shows.
    """

    model_config = ConfigDict(frozen=True)

    count: int
    digest: str
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int]) -> PromptTokens:
        packed = b"".join(token.to_bytes(4, "little", signed=True) for token in ids)
        digest = "sha256:" + hashlib.sha256(packed).hexdigest()
        return cls(count=len(ids), digest=digest, head=tuple(ids[:16]), tail=tuple(ids[-8:]))


class Judgement(BaseModel):
    """What the judge said of one answer.

    Attributes:
        key: digest of everything the judge saw and of who it was; the same key is the same judgement.
        passed: its verdict.
        text: its own words.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    passed: bool
    text: str


class SampleRecord(BaseModel):
    """One query, arm and repeat.

    Attributes:
        key: cache key of the exchange (see `cache_key`).
        checker: type of the program that grades the query; None in results that do not say.
        suite: of the query, and so `kind` and `cluster`, so that the results can be compared without the query file.
        request: the body that was sent.
        response: the body that came back, unparsed parts included; None when none came.
        text: the answer.
        latency_s: seconds from sending the last attempt to its answer.
        attempts: requests made, retries included.
        passed: the grade; None when there is none, and then `failure` says why.
        prompt: the tokens of the rendered prompt, where the arm can tell.
        judgement: the judge's part of the grade, where the checker has a judge.
    """

    model_config = ConfigDict(frozen=True)

    record: Literal["sample"] = "sample"
    key: str
    query_id: str
    role: Role
    sample: int
    suite: str = "default"
    kind: str = "default"
    cluster: str | None = None
    checker: str | None = None
    request: dict[str, Any]
    response: Any = None
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    latency_s: float | None = None
    attempts: int = 0
    passed: bool | None = None
    extracted: str | None = None
    prompt: PromptTokens | None = None
    judgement: Judgement | None = None
    failure: Failure | None = None


class ArmRecord(BaseModel):
    """What is known of an arm; written before its first sample.

    Attributes:
        planned: queries that the run meant to ask; fewer samples than that are a part, not the whole.
    """

    model_config = ConfigDict(frozen=True)

    record: Literal["arm"] = "arm"
    role: Role
    evidence: ArmEvidence
    planned: int | None = None


Record = Annotated[SampleRecord | ArmRecord, Field(discriminator="record")]
_RECORD: TypeAdapter[SampleRecord | ArmRecord] = TypeAdapter(Record)


def cache_key(*, artifact: str, role: Role, recipe_id: str | None, request: dict[str, Any], sample: int) -> str:
    """Identity of an exchange: artifact digest, role, recipe, the request without the model's name, repeat index.

    A served name says nothing about what answers under it, so it is left out and the digest is what counts.
    """
    body = {name: value for name, value in request.items() if name != "model"}
    parts = {"artifact": artifact, "role": role, "recipe_id": recipe_id, "request": body, "sample": sample}
    return "sha256:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ResultsLog:
    """Appends records to a file, one flushed line each, so that an interrupted run can be resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = path.open("a", encoding="utf-8")

    def append(self, record: SampleRecord | ArmRecord) -> None:
        self._handle.write(record.model_dump_json() + "\n")
        self._handle.flush()

    def close(self) -> None:
        self._handle.close()


def read_results(path: Path) -> list[SampleRecord | ArmRecord]:
    """Reads a results file. A last line without a newline was cut off by a kill, and is left out.

    Raises:
        ConfigError: the file cannot be read, or a complete line is not a record (the line is named).
    """
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}; expected a results.jsonl", field="results") from exc
    out = []
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        try:
            out.append(_RECORD.validate_json(line))
        except ValidationError as exc:
            fault = exc.errors(include_url=False)[0]
            raise ConfigError(f"{path}:{number}: not a result record: {fault['msg']}", field="results") from exc
    return out


def write_results(path: Path, records: Iterable[SampleRecord | ArmRecord]) -> str:
    """Replaces the file with exactly these records, and returns its digest."""
    data = "".join(record.model_dump_json() + "\n" for record in records).encode()
    return write_atomic(path, data)


def write_atomic(path: Path, data: bytes) -> str:
    """Writes through a temporary file and a rename; returns `sha256:` of the bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return "sha256:" + hashlib.sha256(data).hexdigest()
