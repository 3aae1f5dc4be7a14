"""Checkers in processes of their own, so that one that hangs, crashes or eats memory costs one grade alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eval_gate.checkers.functions import BUILT_IN
from eval_gate.checkers.grade import MAX_ANSWER_CHARS
from eval_gate.checkers.outcome import CheckerError, Grade
from eval_gate.checkers.specs import Program, PythonFunction, UnitTests
from eval_gate.checkers.unit_tests import WITHOUT_ISOLATION, wall_limit_s

BATCH = 64
_SLOW = frozenset({"code", "math", "python"})
"""Checkers whose batch would not be done within the time of one check."""
_MODULES = {"math": "math_verify", "json_schema": "jsonschema"}
_START_TIMEOUT_S = 120.0
_LINE_LIMIT = 1 << 30
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PoolLimits:
    """Limits of the grader pool.

    Attributes:
        workers: processes.
        timeout_s: wall-clock limit of one check.
        memory_mb: address space of one process in MiB.
        code_without_isolation: run programs although they cannot be kept from the network.
        import_from: a directory from which checker functions may be imported, beside the installed packages.
    """

    workers: int = 2
    timeout_s: float = 30.0
    memory_mb: int = 2048
    code_without_isolation: bool = False
    import_from: Path | None = None


class GraderPool:
    """An async context manager; processes start when they are first needed and are replaced when they die."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers = [_Worker(self._limits) for _ in range(self._limits.workers)]
        self._closed = False

    async def __aenter__(self) -> Self:
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for worker in self._workers:
            await worker.stop()

    async def grade(self, checker: Program, response: str) -> Grade:
        """Grades one answer.

        Raises:
            CheckerError: the checker failed, took too long, or its process died; the answer is neither right nor wrong.
        """
        (result,) = await self.grade_many([(checker, response)])
        if isinstance(result, CheckerError):
            raise result
        return result

    async def grade_many(self, checks: Sequence[tuple[Program, str]]) -> list[Grade | CheckerError]:
        """Grades many answers, in their order; one that cannot be graded has its `CheckerError` in its place."""
        batches: list[list[tuple[Program, str]]] = []
        for check in checks:
            if not batches or len(batches[-1]) >= BATCH or batches[-1][0][0].type in _SLOW or check[0].type in _SLOW:
                batches.append([])
            batches[-1].append(check)
        return [result for batch in await asyncio.gather(*map(self._batch, batches)) for result in batch]

    async def _batch(self, checks: Sequence[tuple[Program, str]]) -> list[Grade | CheckerError]:
        worker = await self._idle.get()
        try:
            try:
                return await worker.run(checks)
            except CheckerError as exc:
                if len(checks) == 1 or self._closed:
                    return [exc] * len(checks)
            # One of them did it; alone, each shows whether it was the one.
            results: list[Grade | CheckerError] = []
            for check in checks:
                try:
                    results += await worker.run([check])
                except CheckerError as exc:
                    results.append(exc)
            return results
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One process, restarted as needed."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._modules: set[str] = set()

    async def run(self, checks: Sequence[tuple[Program, str]]) -> list[Grade | CheckerError]:
        for _, response in checks:
            if len(response) > MAX_ANSWER_CHARS:
                raise CheckerError(
                    f"answer has {len(response)} characters, more than the {MAX_ANSWER_CHARS} a checker reads"
                )
        kinds = ", ".join(sorted({checker.type for checker, _ in checks}))
        for checker, _ in checks:
            await self._imported(checker)
        limit_s = max([self._limits.timeout_s, *(wall_limit_s(c) + 2 for c, _ in checks if isinstance(c, UnitTests))])
        payload = [[checker.model_dump(mode="json", by_alias=True), response] for checker, response in checks]
        # A whole batch gets no longer than one check: what is slow is told apart one by one.
        answer = await self._exchange(["grade", limit_s, payload], limit_s, kinds)
        results = [_result(*entry) for entry in answer]
        if any(isinstance(result, CheckerError) and "out of memory" in str(result) for result in results):
            await self.stop()
        return results

    async def _imported(self, checker: Program) -> None:
        """Imports what a checker needs, which may take longer than a check and is no fault of the answer."""
        module = _MODULES.get(checker.type)
        if isinstance(checker, PythonFunction):
            module = checker.function.partition(":")[0]
            module = "reasoning_gym" if checker.function in BUILT_IN else module
        await self._started()
        if module is None or module in self._modules:
            return
        fault = await self._exchange(["import", module], _START_TIMEOUT_S, checker.type)
        if fault is not None:
            raise CheckerError(f"{checker.type}: cannot import {fault}")
        self._modules.add(module)

    async def _exchange(self, message: list[Any], limit_s: float, kinds: str) -> Any:
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(limit_s):
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            await self.stop()
            raise CheckerError(f"{kinds}: no grade in {limit_s:g} s") from None
        except (ConnectionError, ValueError) as exc:
            await self.stop()
            raise CheckerError(f"{kinds}: the checker's process failed: {exc}") from exc
        except BaseException:
            # Interrupted between question and answer: the next check must not read this one's answer.
            await self.stop()
            raise
        if not line.endswith(b"\n"):
            code = await process.wait()
            await self.stop()
            raise CheckerError(f"{kinds}: the checker's process died ({_describe(code)})")
        return json.loads(line)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._modules.clear()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        paths = [str(_PACKAGE_ROOT), *([str(self._limits.import_from)] if self._limits.import_from else [])]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        if self._limits.code_without_isolation:
            environment[WITHOUT_ISOLATION] = "1"
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "eval_gate.checkers.worker"),
                str(self._limits.memory_mb),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                limit=_LINE_LIMIT,
                # Ctrl-C at a terminal is for the gate, which ends its workers itself.
                start_new_session=True,
            )
        )
        try:
            self._process = process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Cancelled between fork and pipes, asyncio waits for ever for the end of a process that has ended.
            self._process = await starting
            await self.stop()
            raise
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        except BaseException as exc:
            await self.stop()
            if isinstance(exc, TimeoutError):
                raise CheckerError(f"no checker process in {_START_TIMEOUT_S:g} s") from None
            raise
        if not line:
            await self.stop()
            raise CheckerError("the checker's process did not start; is its memory limit too small?")
        return process

    async def stop(self) -> None:
        process, self._process = self._process, None
        self._modules.clear()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _result(passed: bool | None, extracted: str | None, fault: str | None) -> Grade | CheckerError:
    return CheckerError(fault or "no grade") if passed is None else Grade(passed, extracted)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
