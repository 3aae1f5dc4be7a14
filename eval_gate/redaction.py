"""Takes personal data out of queries before either arm, a file or a report sees them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_gate import presidio
from eval_gate.queries import Query, QuerySet, canonical
from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class Redactor:
    """One way to redact a text.

    Attributes:
        name: what it is, with a version; part of the gate policy, and so of the signed verdict.
        apply: text to redacted text.
    """

    name: str
    apply: Callable[[str], str]


def load_redactor(spec: str) -> Redactor:
    """`presidio`, `presidio:MODEL` (see `presidio.load`), or `module:function` that takes and returns a text.

    Raises:
        ConfigError: it cannot be imported, or is not installed.
    """
    if spec.partition(":")[0] == presidio.SPEC:
        return Redactor(*presidio.load(spec))
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, name)
    except Exception as exc:
        raise ConfigError(f"--redact {spec}: cannot be imported: {type(exc).__name__}: {exc}", field="redact") from exc
    if not callable(function):
        raise ConfigError(f"--redact {spec}: is not a function, expected module:function", field="redact")
    return Redactor(f"{spec} {_version(module)}", function)


def redact(queries: QuerySet, redactor: Redactor) -> QuerySet:
    """Every message of every query redacted once; both arms are asked these.

    The checkers stay as they are: an answer that is only right with what was taken out cannot be right in either arm.

    Raises:
        ConfigError: the function raises or does not return a text; the query is named.
    """
    redacted = tuple(_redact_query(query, redactor) for query in queries.queries)
    data = canonical(redacted)
    return QuerySet(redacted, "sha256:" + hashlib.sha256(data).hexdigest(), f"{queries.source} (redacted)", data)


def _redact_query(query: Query, redactor: Redactor) -> Query:
    messages = []
    for message in query.messages:
        try:
            content = redactor.apply(message.content)
        except Exception as exc:
            raise ConfigError(
                f"--redact {redactor.name}: query {query.id!r}: {type(exc).__name__}: {exc}", field="redact"
            ) from exc
        if not isinstance(content, str):
            raise ConfigError(
                f"--redact {redactor.name}: query {query.id!r}: returned {type(content).__name__}, expected a text",
                field="redact",
            )
        messages.append(message.model_copy(update={"content": content}))
    return query.model_copy(update={"messages": tuple(messages)})


def _version(module: Any) -> str:
    """The module's `__version__`, else the start of its source's digest."""
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    source = inspect.getsourcefile(module)
    if source is None:
        return "unversioned"
    return "sha256:" + hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
