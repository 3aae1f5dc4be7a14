"""Math sets of sgl-eval (`problem`, `expected_answer`), its prediction files, and the AIME sets in its wheel.

https://pypi.org/project/sgl-eval/.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval_gate.importers.conversion import each
from eval_gate.importers.records import Imported, ImportOptions, checker, json_lines
from trace_serve.errors import ConfigError, QueryError

SHIPPED = ("aime24", "aime25", "aime26")
SHIPPED_MAX_TOKENS = 32_768
_INSTRUCTION = "Solve this problem. Put the final answer, and nothing else, inside \\boxed{}."


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One query a line, graded by mathematical equality with the last box."""

    def build(place: str, raw: dict[str, Any]) -> dict[str, Any]:
        problem, expected = raw.get("problem"), raw.get("expected_answer")
        if not isinstance(problem, str) or not problem or expected is None:
            raise QueryError(f"{place}: expected problem and expected_answer", field="problem")
        return {
            "id": str(raw.get("id", f"{path.stem}:{place.rpartition(':')[2]}")),
            "prompt": f"{_INSTRUCTION}\n\n{problem}",
            "max_tokens": options.max_tokens,
            "checker": checker(options.checker or "math", expected, place),
        }

    return each(json_lines(path), build)


def shipped_path(name: str) -> Path:
    """The file of an AIME set in the installed sgl-eval, found without importing it.

    Raises:
        ConfigError: sgl-eval is not installed, or no longer ships the set.
    """
    spec = importlib.util.find_spec("sgl_eval")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"--suite {name}: ships with sgl-eval; install trace-serve[gate-aime], or sgl-eval alone with --no-deps",
            field="suite",
        )
    path = Path(spec.origin).parent / "_vendored/nemo_skills/dataset" / name / "test.txt"
    if not path.is_file():
        raise ConfigError(f"--suite {name}: the installed sgl-eval has no {path.name} for it", field="suite")
    return path
