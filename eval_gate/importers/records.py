"""What importers share: reading strictly, and the pieces that queries are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_gate.queries import check_encoding, parse_record, read_file
from trace_serve.errors import ConfigError, QueryError

RECORDED = "recorded"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_CHANGES_PROMPT = ("tools", "functions", "response_format", "documents", "chat_template_kwargs")


class UnsupportedRecordError(QueryError):
    """A record is well formed but has no counterpart among queries."""


@dataclass(frozen=True)
class Imported:
    """A query as a plain record, and where it came from."""

    place: str
    record: dict[str, Any]


@dataclass(frozen=True)
class ImportOptions:
    """What a format does not say by itself.

    Attributes:
        checker: how to compare with the expected answer; None takes the format's own way.
        answers: by record id, the expected answers; None when the records carry them.
        recorded: the answer that was recorded is the expected one.
        max_tokens: limit of an answer where the record has none.
        suite: suite of the queries.
        tokenizer: directory with `tokenizer.json`, for records that hold token ids.
    """

    checker: str | None = None
    answers: Mapping[str, Any] | None = None
    recorded: bool = False
    max_tokens: int = 1024
    suite: str | None = None
    tokenizer: Path | None = None

    def expected(self, record_id: str, recorded: str | None, place: str) -> Any:
        """The expected answer of a record that carries no gold answer.

        Raises:
            QueryError: there is none.
        """
        if self.answers is not None and record_id in self.answers:
            return self.answers[record_id]
        if self.recorded and recorded is not None:
            return recorded
        if self.answers is None and not self.recorded:
            raise QueryError(
                f"{place}: this format carries no expected answers; give --answers FILE, or --answers recorded",
                field="answers",
            )
        raise UnsupportedRecordError(f"{place}: no expected answer for {record_id!r}", field="answers")


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of a JSON-lines file with its place (`file:line`); the whole file is read first.

    Raises:
        QueryError: the file or a line is faulty.
    """
    raw = read_file(path)
    check_encoding(raw, str(path))
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, parse_record(line, place)


def json_document(path: Path) -> Any:
    """A whole JSON file.

    Raises:
        QueryError: it is too large, or not JSON.
    """
    raw = read_file(path)
    check_encoding(raw, str(path))
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise QueryError(f"{path}: not JSON: {exc}", field="in") from exc


def yaml_document(path: Path) -> Any:
    """A whole YAML file, plain values only (extra `gate-import`).

    Raises:
        ConfigError: PyYAML is not installed.
        QueryError: it is too large, or not YAML.
    """
    try:
        import yaml
    except ImportError as exc:
        raise ConfigError(f"{path}: needs PyYAML; install trace-serve[gate-import]", field="in") from exc
    try:
        return yaml.safe_load(read_file(path).decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise QueryError(f"{path}: not YAML: {' '.join(str(exc).split())}", field="in") from exc


def messages(raw: Any, place: str) -> list[dict[str, str]]:
    """OpenAI messages as ours: text only.

    Raises:
        QueryError: not messages, or with tools, images or audio.
    """
    if not isinstance(raw, list) or not raw:
        raise QueryError(f"{place}: messages: expected a list of at least one message", field="messages")
    return [_message(one, f"{place}: messages.{number}") for number, one in enumerate(raw)]


def _message(raw: Any, place: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise QueryError(f"{place}: got {type(raw).__name__}, expected an object", field="messages")
    role = raw.get("role")
    if role not in _ROLES or raw.get("tool_calls") or raw.get("function_call"):
        raise UnsupportedRecordError(
            f"{place}: role {role!r} with tools or functions cannot be replayed, expected system, user or assistant",
            field="messages",
        )
    content = raw.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(one, str) for one in texts):
            raise UnsupportedRecordError(f"{place}: content that is not text cannot be replayed", field="messages")
        content = "".join(one for one in texts if one)
    if not isinstance(content, str):
        raise QueryError(f"{place}: content: got {type(content).__name__}, expected a text", field="messages")
    return {"role": _ROLES[role], "content": content}


def from_request(body: Any, place: str, options: ImportOptions) -> dict[str, Any]:
    """Prompt and token limit of an OpenAI request body. Sampling settings are the gate's own, the same for both arms.

    Raises:
        QueryError: not a body, or one whose prompt depends on more than its messages.
    """
    if not isinstance(body, dict):
        raise QueryError(f"{place}: body: got {type(body).__name__}, expected an object", field="body")
    for name in _CHANGES_PROMPT:
        if body.get(name):
            raise UnsupportedRecordError(
                f"{place}: {name} changes what the model sees and cannot be replayed", field=name
            )
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or options.max_tokens
    if "messages" in body:
        return {"messages": messages(body["messages"], place), "max_tokens": limit}
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise UnsupportedRecordError(
            f"{place}: prompt: got {type(prompt).__name__}, expected messages or one text", field="prompt"
        )
    return {"prompt": prompt, "max_tokens": limit}


def checker(kind: str, expected: Any, place: str) -> dict[str, Any]:
    """A checker of the given kind for one or several acceptable answers.

    Raises:
        QueryError: the kind cannot hold such an answer.
    """
    several = expected if isinstance(expected, list) else [expected]
    texts = [one if isinstance(one, str) else json.dumps(one) for one in several]
    if not texts or not all(text.strip() for text in texts):
        raise QueryError(f"{place}: the expected answer is empty", field="expected")
    if kind == "contains":
        return {"type": "contains", "expected": texts if len(texts) > 1 else texts[0]}
    if kind == "prefix":
        return {"type": "prefix", "expected": texts if len(texts) > 1 else texts[0]}
    if len(texts) > 1:
        raise QueryError(f"{place}: {len(texts)} acceptable answers need --checker contains or prefix", field="checker")
    if kind == "numeric":
        try:
            return {"type": "numeric", "expected": float(texts[0].replace(",", ""))}
        except ValueError as exc:
            raise QueryError(f"{place}: expected answer {texts[0]!r} is not a number", field="expected") from exc
    return {"type": kind, "expected": texts[0]}


CHECKERS = ("exact", "normalized", "numeric", "contains", "prefix", "math")
"""Kinds that `--checker` may name."""


def load_answers(path: Path) -> dict[str, Any]:
    """Expected answers by id, from lines with `id` (or `custom_id`) and `expected`, or from an OpenAI batch output.

    Raises:
        QueryError: a line is neither, or repeats an id.
    """
    found: dict[str, Any] = {}
    for place, record in json_lines(path):
        name = record.get("id") if "expected" in record else None
        name = record.get("custom_id") if name is None else name
        if not isinstance(name, str):
            raise QueryError(
                f"{place}: expected id and expected, or a batch output line with custom_id", field="answers"
            )
        if name in found:
            raise QueryError(f"{place}: id {name!r} appears twice", field="answers")
        if "expected" in record:
            found[name] = record["expected"]
            continue
        text = response_text((record.get("response") or {}).get("body"))
        if text is None:
            raise QueryError(f"{place}: neither expected nor a response with a text", field="answers")
        found[name] = text
    return found


def response_text(body: Any) -> str | None:
    """The text of an OpenAI chat completion or completion; None when it has none."""
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None
