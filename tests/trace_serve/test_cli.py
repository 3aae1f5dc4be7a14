"""The command line as a user meets it: a process of its own, its exit code and its streams."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import typer

from trace_serve import cli
from trace_serve.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, ConfigError, EngineError


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trace_serve", *args], capture_output=True, text=True, check=False)


def test_help_lists_every_command_and_is_quick() -> None:
    started = time.perf_counter()
    done = run("--help")
    first = time.perf_counter() - started
    started = time.perf_counter()
    run("--help")

    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)
    # The better of two, because the machine may be busy.
    assert min(first, time.perf_counter() - started) < 3.0


def test_help_imports_no_heavy_module() -> None:
    script = "import sys; from trace_serve.cli import main; main(['--help']); print(*sorted(sys.modules), sep=chr(10))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    imported = set(done.stdout.split("\n"))
    assert not imported & {"torch", "sglang", "numpy", "fastapi", "transformers", "pydantic", "unidiff"}
    assert "trace_serve.cli" in imported


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_listed_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = cli.COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))

    assert cli.main([name, "--help"]) == 0
    assert f"trace-serve {name}" in capsys.readouterr().out


def test_version_is_that_of_the_distribution() -> None:
    done = run("--version")

    assert (done.returncode, done.stdout) == (0, f"trace-serve {version('trace-serve')}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["patchh"], "Did you mean 'patch'?"),
        (["--nonsense"], "No such option: --nonsense"),
        (["patch", "status", "--nonsense"], "No such option: --nonsense"),
        (["patch", "status", "--target"], "requires an argument"),
        (["patch", "status", "--target", "/nonexistent"], "/nonexistent: no installed sglang there"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_3(args: list[str], message: str) -> None:
    done = run(*args)

    assert done.returncode == EXIT_CONFIG
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("port: got 0,\n expected 1", field="port"), EXIT_CONFIG, "error: port: got 0, expected 1\n"),
        (ConfigError("got 0, expected 1", field="port"), EXIT_CONFIG, "error: got 0, expected 1 [port]\n"),
        (EngineError("the engine died"), EXIT_INFRASTRUCTURE, "error: the engine died\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch.cuda"),
            EXIT_CONFIG,
            "error: this command needs torch.cuda, expected it installed; run `pip install 'trace-serve[engine]'`\n",
        ),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
        (typer.Exit(4), 4, ""),
    ],
)
def test_an_error_of_a_command_becomes_a_line_and_its_exit_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr("trace_serve.doctor.doctor_command", failing)

    assert cli.main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.err == line


@pytest.mark.parametrize("error", [ValueError("a defect"), ModuleNotFoundError("No module named 'x'", name="x")])
def test_a_defect_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr("trace_serve.doctor.doctor_command", failing)

    with pytest.raises(type(error)):
        cli.main(["doctor"])


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3), ("text", 0), (True, 0)])
def test_a_number_that_a_command_returns_is_the_exit_code(
    returned: object, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_serve.doctor.doctor_command", lambda: returned)

    assert cli.main(["doctor"]) == code
