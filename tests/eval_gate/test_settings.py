"""Where a setting comes from: the flag before the environment before the file before the default."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.cli import main

Call = Callable[..., tuple[int, str, str]]
FILE = """
[run]
training = "http://127.0.0.1:9"
serving = "http://127.0.0.1:9"
out = "out"
queries = "support-dev"
repeats = 2
json = true
"""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs the command line in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eval-gate", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def repeats(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)["repeats"]


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "eval-gate.toml").write_text(FILE.replace("repeats = 2", ""))
    assert repeats(call("run", "--dry-run")) == 1
    (tmp_path / "eval-gate.toml").write_text(FILE)
    assert repeats(call("run", "--dry-run")) == 2
    monkeypatch.setenv("EVAL_GATE_RUN_REPEATS", "3")
    assert repeats(call("run", "--dry-run")) == 3
    assert repeats(call("run", "--dry-run", "--repeats", "4")) == 4


def test_another_file_can_be_named(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eval-gate.toml").write_text("[run]\nrepeats = 9\n")
    (tmp_path / "other.toml").write_text(FILE)
    assert repeats(call("--config", "other.toml", "run", "--dry-run")) == 2
    monkeypatch.setenv("EVAL_GATE_CONFIG", "other.toml")
    assert repeats(call("run", "--dry-run")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nmargins = 1\n", r"[run] margins: `eval-gate run` has no flag --margins"),
        ("[walk]\nmargin = 1\n", "[walk] is not a command"),
        ("margin = 1\n", "[margin] is not a command"),
        ("[run\n", "not TOML"),
        ("[run]\nrepeats = 'two'\n", "'--repeats': Input should be a valid integer"),
        ("[run]\nmargin = {a = 1}\n", "expected a plain value"),
    ],
)
def test_a_faulty_file_is_one_line_and_exit_code_3(call: Call, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "eval-gate.toml").write_text(text)
    code, _, err = call("run", "--training", "http://a", "--serving", "http://a", "--out", "out", "--dry-run")
    assert code == 3
    assert message in err
    assert err.count("\n") == 1


def test_a_dry_run_starts_asks_and_writes_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "eval-gate.toml").write_text(FILE)
    code, out, _ = call("run", "--dry-run", "--max-queries", "10")
    facts = json.loads(out)
    assert (code, facts["queries"], facts["requests"]) == (0, 10, 40)
    assert [path.name for path in tmp_path.iterdir()] == ["eval-gate.toml"]
    code, _, err = call("run", "--dry-run", "--training", "no/such/dir")
    assert (code, "neither a URL" in err) == (3, True)
