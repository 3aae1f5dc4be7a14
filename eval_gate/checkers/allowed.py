"""Whether the checkers of a query file may and can run here, told before anything is sampled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from eval_gate.checkers import functions, sandbox, schema
from eval_gate.checkers.specs import Checker, JsonSchema, Judged, PythonFunction, UnitTests, program_of
from trace_serve.errors import ConfigError, QueryError

_PACKAGES = {
    "math": ("math_verify", "gate-math"),
    "json_schema": ("jsonschema", "gate-json"),
}


@dataclass(frozen=True)
class Permissions:
    """What a query file may make this machine do.

    Attributes:
        code: run programs from answers, with tests from the query file.
        code_network: run them even where they cannot be kept from the network.
        functions: checker functions, as `module:function`, that may be called.
        judge: a judge is configured.
    """

    code: bool = False
    code_network: bool = False
    functions: frozenset[str] = frozenset()
    judge: bool = False


def check_allowed(checkers: Iterable[tuple[str, Checker]], permissions: Permissions) -> None:
    """Checks every (query id, checker).

    Raises:
        ConfigError: a checker needs a permission or a package; the message names the query and the flag or extra.
        QueryError: a schema is none.
    """
    seen: set[str] = set()
    for query_id, checker in checkers:
        if isinstance(checker, Judged) and not permissions.judge:
            raise ConfigError(f"query {query_id!r}: has a judge; name one with --judge-url", field="judge_url")
        program = program_of(checker)
        if isinstance(program, JsonSchema):
            _need("json_schema", query_id)
            fault = schema.fault(program.json_schema)
            if fault is not None:
                raise QueryError(f"query {query_id!r}: not a JSON schema: {fault}", field="schema")
        if isinstance(program, PythonFunction):
            _check_function(query_id, program.function, permissions)
        if program.type in seen:
            continue
        seen.add(program.type)
        if isinstance(program, UnitTests):
            _check_code(query_id, permissions)
        elif program.type in _PACKAGES:
            _need(program.type, query_id)


def _need(kind: str, query_id: str) -> None:
    package, extra = _PACKAGES[kind]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"query {query_id!r}: checker {kind} needs {package}; install trace-serve[{extra}]", field="queries"
        )


def _check_code(query_id: str, permissions: Permissions) -> None:
    if not permissions.code:
        raise ConfigError(
            f"query {query_id!r}: checker code runs programs that a model wrote; allow it with --allow-code",
            field="allow_code",
        )
    if not permissions.code_network and sandbox.network_isolation() is None:
        raise ConfigError(
            "checker code: `unshare` cannot keep programs from the network on this machine; "
            "run where it can, or accept it with --allow-code-network",
            field="allow_code_network",
        )


def _check_function(query_id: str, function: str, permissions: Permissions) -> None:
    if function in functions.BUILT_IN:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                f"query {query_id!r}: {function} needs reasoning-gym; install trace-serve[gate-suites]", field="queries"
            )
        return
    if function not in permissions.functions:
        raise ConfigError(
            f"query {query_id!r}: calls {function}; a query file may come from anywhere, so allow it by name with "
            f"--allow-checker {function}",
            field="allow_checker",
        )
