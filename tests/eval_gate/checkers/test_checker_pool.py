"""Checkers in the process pool: what each takes for right, and that a fault is never a wrong answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import TypeAdapter, ValidationError

from eval_gate.checkers import (
    Checker,
    CheckerError,
    Grade,
    GraderPool,
    Permissions,
    PoolLimits,
    Program,
    allowed,
    check_allowed,
    sandbox,
)
from eval_gate.checkers.pool import BATCH
from trace_serve.errors import ConfigError, QueryError

CHECKER: TypeAdapter[Checker] = TypeAdapter(Checker)
PROGRAM: TypeAdapter[Program] = TypeAdapter(Program)
HANGS = {"type": "regex", "pattern": r"(a+)+$"}
HANG_ANSWER = "a" * 40 + "b"
FUNCTIONS = """
import ctypes, os, sys, time
def crash(answer): ctypes.string_at(0)
def leave(answer): os._exit(3)
def eat(answer): return len(bytearray(64 << 30)) > 0
def sleep(answer): time.sleep(60)
def shout(answer):
    print("[[true, null, null]]", flush=True)
    return answer == "yes"
def pair(answer, *, expected): return answer.strip() == expected, answer.strip()
def odd(answer): return "yes"
def fail(answer): raise KeyError("no")
def secrets(answer): return "GATE_TEST_SECRET" in os.environ
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "gate_test_functions.py").write_text(FUNCTIONS)
    return tmp_path


@pytest_asyncio.fixture
async def pool(functions: Path) -> AsyncIterator[GraderPool]:
    async with GraderPool(PoolLimits(workers=1, timeout_s=5.0, memory_mb=1024, import_from=functions)) as pool:
        yield pool


def program(spec: dict[str, Any]) -> Program:
    return PROGRAM.validate_python(spec)


async def outcome(pool: GraderPool, spec: dict[str, Any], answer: str) -> bool | str:
    """The grade, or the checker's fault in words."""
    try:
        return (await pool.grade(program(spec), answer)).passed
    except CheckerError as exc:
        return str(exc)


async def call(pool: GraderPool, name: str, answer: str = "yes", **options: Any) -> bool | str:
    return await outcome(
        pool, {"type": "python", "function": f"gate_test_functions:{name}", "options": options}, answer
    )


async def test_a_hanging_check_costs_its_own_grade_alone(pool: GraderPool) -> None:
    exact = program({"type": "exact", "expected": "x"})
    checks = [(exact, "x")] * 3 + [(program(HANGS), HANG_ANSWER)] + [(exact, "y")] * 3
    results = await pool.grade_many(checks)
    assert [r.passed if isinstance(r, Grade) else "fault" for r in results] == [
        *(True, True, True, "fault", False, False, False)
    ]
    assert "regex: no grade in 5 s" in str(results[3])


async def test_crashes_memory_and_exceptions_are_faults_and_the_pool_goes_on(pool: GraderPool) -> None:
    assert "SIGSEGV" in str(await call(pool, "crash"))
    assert "exit code 3" in str(await call(pool, "leave"))
    assert "out of memory" in str(await call(pool, "eat")) or "MemoryError" in str(await call(pool, "eat"))
    assert "KeyError" in str(await call(pool, "fail"))
    assert "expected a bool" in str(await call(pool, "odd"))
    assert "cannot import" in str(await outcome(pool, {"type": "python", "function": "no_such:f"}, "x"))
    assert await call(pool, "pair", " yes ", expected="yes") is True
    assert await call(pool, "pair", "no", expected="yes") is False


async def test_what_a_check_prints_is_not_taken_for_a_grade(pool: GraderPool) -> None:
    assert await call(pool, "shout", "no") is False
    assert await call(pool, "shout", "yes") is True


async def test_checks_do_not_see_the_environment(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_TEST_SECRET", "key")
    assert await call(pool, "secrets") is False


async def test_an_interrupted_check_does_not_leave_its_answer_to_the_next(pool: GraderPool) -> None:
    assert await call(pool, "shout") is True
    task = asyncio.create_task(call(pool, "sleep"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await call(pool, "shout", "no") is False


async def test_an_oversize_answer_is_a_fault_of_its_own(pool: GraderPool) -> None:
    exact = program({"type": "exact", "expected": "x"})
    oversize, small = await pool.grade_many([(exact, "x" * 1_000_001), (exact, "x")])
    assert isinstance(oversize, CheckerError)
    assert small == Grade(True, "x")


async def test_many_checks_keep_their_order(pool: GraderPool) -> None:
    checks = [(program({"type": "numeric", "expected": i}), str(i + i % 2)) for i in range(3 * BATCH + 5)]
    results = await pool.grade_many(checks)
    assert [isinstance(r, Grade) and r.passed for r in results] == [i % 2 == 0 for i in range(3 * BATCH + 5)]


async def test_a_worker_ends_with_the_pool(functions: Path) -> None:
    async with GraderPool(PoolLimits(workers=1, import_from=functions)) as pool:
        await call(pool, "shout")
        (worker,) = pool._workers
        assert worker._process is not None
        pid = worker._process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


ORPHANING = """
import asyncio
from eval_gate.checkers import GraderPool, PoolLimits
from eval_gate.checkers.specs import Regex

async def main():
    async with GraderPool(PoolLimits(workers=1, timeout_s=1)) as pool:
        await pool.grade(Regex(type="regex", pattern="a"), "a")
        print(pool._workers[0]._process.pid, flush=True)
        await pool.grade(Regex(type="regex", pattern="(a+)+$"), "a" * 40 + "b")

asyncio.run(main())
"""


def test_a_hanging_worker_does_not_outlive_a_gate_that_was_killed() -> None:
    gate = subprocess.Popen([sys.executable, "-c", ORPHANING], stdout=subprocess.PIPE, text=True)
    assert gate.stdout is not None
    with gate.stdout:
        worker = int(gate.stdout.readline())
    gate.kill()
    gate.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    pytest.fail("the worker is still there")


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("70", r"<think>\boxed{12}</think> \boxed{70}", True),
        ("70", r"<think>\boxed{70}</think> \boxed{12}", False),
        ("70", r"\boxed{12}, no, \boxed{70}", True),
        (r"\frac{1}{2}", "The result is $0.5$.", True),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", True),
        ("x^2 + 2x + 1", r"\boxed{x^2 + 1}", False),
        (r"\boxed{\{1, 2\}}", r"$\boxed{\{2, 1\}}$", True),
        ("3", "I do not know.", False),
        ("5", "", False),
    ],
)
async def test_math_compares_values_of_the_last_box(pool: GraderPool, expected: str, answer: str, right: bool) -> None:
    assert await outcome(pool, {"type": "math", "expected": expected}, answer) is right


async def test_an_expected_expression_that_is_none_is_a_fault(pool: GraderPool) -> None:
    assert "not a mathematical expression" in str(await outcome(pool, {"type": "math", "expected": " "}, "3"))


async def test_json_schema_reads_the_first_value_amid_prose(pool: GraderPool) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    spec = {"type": "json_schema", "schema": schema}
    assert await outcome(pool, spec, 'Here:\n```json\n{"a": 1}\n```') is True
    assert await outcome(pool, spec, '{"a": "1"}') is False
    assert await outcome(pool, spec, "none") is False
    elsewhere = {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/schema.json"}}
    assert "Unresolvable" in str(await outcome(pool, elsewhere, "{}"))


needs_isolation = pytest.mark.skipif(sandbox.network_isolation() is None, reason="unshare does not work here")


@needs_isolation
@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def f(x):\n    return x + 1", True),
        ("def f(x):\n    return x", False),
        ("def f(x", False),
        ("import os\nos._exit(0)", False),
        ("import sys\nsys.exit(0)", False),
        ("while True: pass", False),
        ("x = ' ' * 10**11", False),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 2)\ndef f(x): return x + 1", False),
        ("import os\nif len(os.listdir('/proc/self/fd')) and 'HOME' in os.environ:\n    f = lambda x: x + 1", True),
    ],
)
async def test_programs_pass_when_the_tests_ran_to_their_end(pool: GraderPool, program: str, right: bool) -> None:
    spec = {"type": "code", "tests": "assert f(1) == 2", "cpu_s": 1, "memory_mb": 256}
    assert await outcome(pool, spec, f"First:\n```python\nbroken(\n```\nNow:\n```python\n{program}\n```") is right


@needs_isolation
async def test_a_program_that_only_waits_is_not_a_wrong_answer(pool: GraderPool) -> None:
    spec = {"type": "code", "tests": "pass", "cpu_s": 1}
    assert "neither an end" in str(await outcome(pool, spec, "import time\ntime.sleep(60)"))


@needs_isolation
async def test_programs_cannot_leave_processes_behind(pool: GraderPool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = textwrap.dedent(f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(1.5)
            open({str(mark)!r}, "w").close()
            os._exit(0)
    """)
    assert await outcome(pool, {"type": "code", "tests": "pass"}, source) is True
    await asyncio.sleep(2.5)
    assert not mark.exists()


async def test_reasoning_gym_scores_with_the_task_that_asked(pool: GraderPool) -> None:
    entry = {"question": "60 + 93 =", "answer": "153", "metadata": {"source_dataset": "chain_sum"}}
    spec = {
        "type": "python",
        "function": "eval_gate.checkers.reasoning_gym:score",
        "options": {"task": "chain_sum", "entry": entry},
    }
    assert await outcome(pool, spec, "<answer>153</answer>") is True
    assert await outcome(pool, spec, r"\boxed{154}") is False


def test_dangerous_checkers_need_a_permission_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(spec: dict[str, Any], **permissions: Any) -> None:
        check_allowed([("q1", CHECKER.validate_python(spec))], Permissions(**permissions))

    code = {"type": "code", "tests": "pass"}
    with pytest.raises(ConfigError, match=r"'q1'.*--allow-code"):
        check(code)
    monkeypatch.setattr(sandbox, "network_isolation", lambda: None)
    with pytest.raises(ConfigError, match="--allow-code-network"):
        check(code, code=True)
    check(code, code=True, code_network=True)
    function = {"type": "python", "function": "os:system"}
    with pytest.raises(ConfigError, match="--allow-checker os:system"):
        check(function)
    check(function, functions=frozenset({"os:system"}))
    judged = {
        "type": "judged",
        "checker": {"type": "exact", "expected": "a"},
        "judge": {"type": "judge", "rubric": "r"},
    }
    with pytest.raises(ConfigError, match="--judge-url"):
        check(judged)
    with pytest.raises(QueryError, match="not a JSON schema"):
        check({"type": "json_schema", "schema": {"type": "thing"}})
    monkeypatch.setattr(allowed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install trace-serve\[gate-math\]"):
        check({"type": "math", "expected": "1"})


def test_a_judge_is_never_the_only_checker() -> None:
    judge = {"type": "judge", "rubric": "polite"}
    for spec in (judge, {"type": "judged", "judge": judge}, {"type": "judged", "checker": judge, "judge": judge}):
        with pytest.raises(ValidationError):
            CHECKER.validate_python(spec)
