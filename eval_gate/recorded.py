"""Recorded results read back for a comparison: those of a gate run, or one JSON object a sample from elsewhere."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.records import ArmRecord, ErrorClass, Failure, Role, SampleRecord
from eval_gate.attribute.tokens import PackedTokens
from eval_gate.pairing import ItemSet
from trace_serve.errors import ConfigError

_PLACE = ("suite", "kind", "cluster")
_TEXTS = ("suite", "kind", "cluster", "prompt", "expected")
_COUNT = (int, type(None))
_STRING = (str, type(None))
_BLANK = SampleRecord(key="", query_id="", role=Role.TRAINING, sample=0, request={})


@dataclass(slots=True)
class RecordedQuery:
    """What recorded results say of a query; an `eval_gate.pairing.Item`."""

    id: str
    suite: str = "default"
    kind: str = "default"
    cluster: str | None = None
    prompt_text: str = ""
    expected_text: str = ""


@dataclass(frozen=True)
class RecordedSet:
    """Queries known only from results; an `eval_gate.pairing.ItemSet`."""

    queries: Sequence[RecordedQuery]
    digest: str
    source: str


@dataclass
class RecordedArm:
    """One arm's recorded results.

    Attributes:
        evidence: from the file's arm record; only the file's name where there is none.
        samples: without requests, and of responses the tokens alone.
        repeats: samples a query, by the largest index.
        digest: `sha256:` of the file.
        planned: queries that its run meant to ask; None where the file does not say.
    """

    role: Role
    evidence: ArmEvidence
    samples: list[SampleRecord] = field(default_factory=list)
    queries: dict[str, RecordedQuery] = field(default_factory=dict)
    repeats: int = 0
    digest: str = ""
    planned: int | None = None


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the cyclic garbage collector, which would walk hundreds of thousands of live records again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_arm(path: Path, role: Role, *, only: bool = False) -> RecordedArm:
    """Reads a file as one arm. Of a gate run's file with both arms, the samples of `role` count; else all of them.

    With `only`, a file that holds just the other arm is refused.

    A line of another program is `{"id": "q1", "passed": true}`, with `sample` (index from 0), `suite`, `kind`,
    `cluster`, `prompt`, `expected`, `text`, `finish_reason` and `error` where known; `passed` null or `error` is a
    sample without a grade.

    Raises:
        ConfigError: the file cannot be read, a line is no such record, or a sample appears twice (the line is named).
    """
    arms = {wanted: RecordedArm(wanted, ArmEvidence(source=str(path))) for wanted in Role}
    hashed = hashlib.sha256()
    seen: dict[tuple[Role, str, int], int] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                hashed.update(line)
                if line.strip():
                    _add(arms, seen, line, role, f"{path}:{number}", number)
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot be read: {exc.strerror}; expected recorded results", field="results"
        ) from exc
    found = arms[role] if arms[role].samples else next((arm for arm in arms.values() if arm.samples), None)
    if found is None or (only and found.role is not role):
        wanted = f"samples of the {role} arm" if only else "one JSON object a sample"
        raise ConfigError(f"{path}: no samples, expected {wanted}", field="results")
    found.digest = "sha256:" + hashed.hexdigest()
    if found.role is not role:
        found.samples = [sample.model_copy(update={"role": role}) for sample in found.samples]
        found.role = role
    return found


def common_queries(training: RecordedArm, serving: RecordedArm) -> RecordedSet:
    """Every query of either file; one that is in a single file has no grade in the other, it is not dropped.

    Raises:
        ConfigError: the files put a query into different suites or clusters.
    """
    queries = dict(training.queries)
    for name, query in serving.queries.items():
        known = queries.setdefault(name, query)
        if (known.suite, known.cluster) != (query.suite, query.cluster):
            raise ConfigError(
                f"query {name!r}: suite {known.suite!r}, cluster {known.cluster!r} in one file, {query.suite!r} and "
                f"{query.cluster!r} in the other; expected the same",
                field="results",
            )
    named = [(query.id, query.suite, query.cluster) for query in queries.values()]
    digest = "sha256:" + hashlib.sha256(orjson.dumps(sorted(named, key=lambda row: row[0]))).hexdigest()
    return RecordedSet(list(queries.values()), digest, "recorded results")


def check_whole(arms: Iterable[RecordedArm]) -> None:
    """Refuses results that are a part of what their run planned: their queries are not a sample of any fixed size.

    Raises:
        ConfigError: naming the arm.
    """
    for arm in arms:
        if arm.planned is not None and len(arm.queries) < arm.planned:
            raise ConfigError(
                f"{arm.evidence.source}: results of {len(arm.queries)} queries, but its run planned {arm.planned}: it "
                "stopped at a look or did not end; give --queries, and --looks, --seed and --max-queries of that run",
                field="queries",
            )


def check_covered(queries: ItemSet, arms: Iterable[RecordedArm]) -> None:
    """Refuses results of queries that the query file does not have.

    Raises:
        ConfigError: naming the first such query.
    """
    known = {query.id for query in queries.queries}
    for arm in arms:
        other = next((name for name in arm.queries if name not in known), None)
        if other is not None:
            raise ConfigError(
                f"{arm.evidence.source}: query {other!r} is not in {queries.source}; expected results of its queries",
                field="queries",
            )


def _add(
    arms: dict[Role, RecordedArm],
    seen: dict[tuple[Role, str, int], int],
    line: bytes,
    role: Role,
    place: str,
    number: int,
) -> None:
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"{place}: not JSON: {exc}", field="results") from exc
    if not isinstance(raw, dict):
        raise ConfigError(f"{place}: got {type(raw).__name__}, expected a JSON object", field="results")
    if raw.get("record") == "arm":
        record = _valid(ArmRecord, raw, place)
        arms[record.role].evidence, arms[record.role].planned = record.evidence, record.planned
        return
    if raw.get("record") == "sample":
        owner, name, sample = raw.get("role"), raw.get("query_id"), raw.get("sample")
        if owner not in (Role.TRAINING, Role.SERVING):
            raise ConfigError(f"{place}: role {owner!r}, expected training or serving", field="role")
        owner = Role(owner)
    else:
        owner, name, sample = role, raw.get("id"), raw.get("sample", 0)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{place}: id {name!r}, expected a name", field="id")
    if type(sample) is not int or not 0 <= sample < 64:
        raise ConfigError(f"{place}: sample {sample!r}, expected an index from 0 to 63", field="sample")
    passed = raw.get("passed")
    if passed is not None and type(passed) is not bool:
        raise ConfigError(f"{place}: passed {passed!r}, expected true, false or null", field="passed")
    first = seen.setdefault((owner, name, sample), number)
    if first != number:
        raise ConfigError(f"{place}: sample {sample} of {name!r} is already on line {first}", field="id")
    arm = arms[owner]
    arm.samples.append(_sample(raw, owner, name, sample, passed, place))
    arm.repeats = max(arm.repeats, sample + 1)
    if name not in arm.queries:
        arm.queries[name] = _query(raw, name, place)


def _sample(raw: dict[str, Any], role: Role, name: str, sample: int, passed: bool | None, place: str) -> SampleRecord:
    failure = None
    if raw.get("failure") is not None:
        failure = _valid(Failure, raw["failure"], place)
    elif raw.get("error") is not None or passed is None:
        failure = Failure(kind=ErrorClass.MISSING, message=str(raw.get("error") or "no grade was recorded"))
        passed = None
    counts = (raw.get("prompt_tokens"), raw.get("completion_tokens"))
    if not (isinstance(counts[0], _COUNT) and isinstance(counts[1], _COUNT)):
        raise ConfigError(f"{place}: token counts {list(counts)}, expected whole numbers", field="completion_tokens")
    text, finish = raw.get("text"), raw.get("finish_reason")
    if not (isinstance(text, _STRING) and isinstance(finish, _STRING)):
        raise ConfigError(f"{place}: text or finish_reason is not a string", field="text")
    attempts = raw.get("attempts", 1)
    # The fields were checked above; validation by the model would cost more than all the rest of the comparison.
    return _BLANK.model_copy(
        update={
            "query_id": name,
            "role": role,
            "sample": sample,
            "text": text,
            "response": PackedTokens.of(raw.get("response")),
            "finish_reason": finish,
            "prompt_tokens": counts[0],
            "completion_tokens": counts[1],
            "attempts": attempts if type(attempts) is int else 1,
            "passed": passed,
            "failure": failure,
        }
    )


def _query(raw: dict[str, Any], name: str, place: str) -> RecordedQuery:
    if raw.get("record") == "sample":
        raw = {key: raw.get(key) for key in _PLACE} | {"prompt": _prompt(raw.get("request"))}
    values = {key: raw[key] for key in _TEXTS if raw.get(key) is not None}
    wrong = next((key for key, value in values.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise ConfigError(f"{place}: {wrong} {values[wrong]!r}, expected a string", field=wrong)
    return RecordedQuery(
        name,
        values.get("suite", "default"),
        values.get("kind", "default"),
        values.get("cluster"),
        values.get("prompt", ""),
        values.get("expected", ""),
    )


def _prompt(request: object) -> str:
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not messages:
        return str(request.get("prompt", "")) if isinstance(request, dict) else ""
    last = messages[-1]
    content = last.get("content") if isinstance(last, dict) else None
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _valid(model: Any, raw: Any, place: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{place}: {where}: {fault['msg']}", field=where or "results") from exc
