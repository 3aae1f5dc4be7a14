"""What the base install has to do without: importing the gate brings none of the optional packages."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = (
    "torch",
    "transformers",
    "sglang",
    "sympy",
    "math_verify",
    "jsonschema",
    "reasoning_gym",
    "yaml",
    "presidio_analyzer",
    "opentelemetry",
)


def test_the_command_line_imports_no_optional_package() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); import eval_gate.commands.app, "
        "eval_gate.run, eval_gate.conclude, eval_gate.compare_files, eval_gate.planning, eval_gate.suites.named, "
        "eval_gate.arms.transformers, eval_gate.checkers.worker, eval_gate.importers.conversion as c, importlib; "
        "[importlib.import_module(name) for name in c.FORMATS.values()]"
    )
    done = subprocess.run([sys.executable, "-c", code, *OPTIONAL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
