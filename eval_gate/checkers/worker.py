"""A process of the grader pool: reads batches of checks from stdin, writes their grades to stdout, one JSON line each.

It runs what a query file and a model's answer bring along, so it has no secrets in its environment, a limit on its
memory, and an alarm that the kernel enforces even when a check holds the interpreter lock or the gate is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from typing import Any

from pydantic import TypeAdapter

from eval_gate.checkers.grade import grade
from eval_gate.checkers.outcome import CheckerError
from eval_gate.checkers.specs import Program

_PROGRAM: TypeAdapter[Program] = TypeAdapter(Program)


def main() -> None:
    """Serves until stdin ends. Argument: MiB of address space.

    A line is `["import", module]`, or `["grade", seconds of one check, [[checker, answer], ...]]`.
    """
    memory_mb = int(sys.argv[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, hard))
    # What a check prints must not be taken for an answer of ours.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "import":
            print(json.dumps(_import(*arguments)), file=answers, flush=True)
            continue
        limit_s, checks = arguments
        results = []
        for spec, text in checks:
            # A little later than the pool's own limit, which replaces the worker and says why.
            signal.setitimer(signal.ITIMER_REAL, limit_s + 2)
            results.append(_check(spec, text))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(results), file=answers, flush=True)


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as exc:
        return f"{module}: {type(exc).__name__}: {exc}"
    return None


def _check(spec: dict[str, Any], text: str) -> list[Any]:
    try:
        return [*grade(_PROGRAM.validate_python(spec), text), None]
    except CheckerError as exc:
        return [None, None, str(exc)]
    except MemoryError:
        return [None, None, f"{spec['type']}: out of memory"]
    except ImportError as exc:
        return [None, None, f"{spec['type']}: {exc}"]
    except Exception as exc:
        return [None, None, f"{spec['type']}: {type(exc).__name__}: {exc}"]


if __name__ == "__main__":
    main()
