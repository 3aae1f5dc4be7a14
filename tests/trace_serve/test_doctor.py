from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from trace_serve import doctor, patching
from trace_serve.errors import EXIT_CONFIG, PatchError

SEAM = {"name": "kv-method", "kind": "hook", "target": "sglang.x", "ok": True, "detail": "ok"}


def script(body: str) -> tuple[str, ...]:
    return (sys.executable, "-c", body)


def printing(value: object) -> tuple[str, ...]:
    return script(f"print('a line of log'); print({json.dumps(value)!r})")


def test_each_seam_is_a_row_by_name() -> None:
    patch = {**SEAM, "name": "0003-flush", "kind": "patch", "ok": False, "detail": "clean"}
    gone = {**SEAM, "name": "flush", "kind": "registry", "ok": False, "detail": "our entry is missing (stale KV)"}
    moved = {**SEAM, "name": "collect", "ok": False, "detail": "parameters are ('self',)"}

    rows = doctor.check_seams(printing([patch, SEAM, gone, moved]))

    assert [(row.name, row.state) for row in rows] == [
        ("seam kv-method", "ok"),
        ("seam flush", "missing"),
        ("seam collect", "missing"),
    ]
    assert rows[1].detail == "sglang.x: our entry is missing (stale KV)"
    assert all("--force-reinstall" in row.remedy for row in rows[1:])


def test_a_seam_that_fails_while_a_patch_is_missing_is_mended_by_the_patch_first() -> None:
    broken = {**SEAM, "ok": False, "detail": "ImportError: no library\n\nmany more lines"}

    (row,) = doctor.check_seams(printing([broken]), patched=False)

    assert row.remedy == "trace-serve patch apply"
    assert row.detail == "sglang.x: ImportError: no library"


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("import sys; print('x', file=sys.stderr); raise SystemExit('libcuda.so.1 is gone')", "exit code 1: libcuda"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11: nothing printed"),
        ("print('{}')", "exit code 0: {}"),
        ("print('[]')", "exit code 0: []"),
        ("print('[1]')", "exit code 0"),
        ("print('[')", "exit code 0"),
    ],
)
def test_a_probe_that_crashes_or_talks_nonsense_is_a_red_row_with_its_last_line(body: str, detail: str) -> None:
    for check in (doctor.check_seams, doctor.check_kernels):
        (row,) = check(script(body))
        assert row.state == "missing"
        assert row.detail.startswith(detail)
        assert row.remedy


def test_a_probe_that_hangs_is_given_up() -> None:
    (row,) = doctor.check_seams(script("import time; time.sleep(60)"), timeout_s=0.5)

    assert (row.state, row.detail) == ("missing", "no answer within 0.5 s")


def test_a_probe_without_a_gpu_runs_the_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    body = (
        "import json, os; seam = dict(name=os.environ.get('SGLANG_USE_CPU_ENGINE', 'unset'), "
        "kind='hook', target='', ok=True, detail=''); print(json.dumps([seam]))"
    )

    (row,) = doctor.check_seams(script(body))

    assert row.name == ("seam unset" if Path("/dev/nvidiactl").exists() else "seam 1")


def test_one_usable_kernel_backend_is_enough() -> None:
    usable = {"name": "reference", "usable": True, "reason": ""}
    unusable = {"name": "triton", "usable": False, "reason": "runs on cuda, not on cpu"}

    (good,) = doctor.check_kernels(printing({"device": "cpu", "backends": [usable, unusable]}))
    (bad,) = doctor.check_kernels(printing({"device": "cpu", "backends": [unusable]}))

    assert (good.name, good.state) == ("kernels on cpu", "ok")
    assert good.detail == "reference; triton runs on cuda, not on cpu"
    assert bad.state == "missing"


def test_a_version_outside_the_pin_names_both() -> None:
    row = doctor.check_distribution("pytest", "trace-serve[dev]", "missing", {"pytest": SpecifierSet("==0.1")})

    assert row.state == "missing"
    assert row.detail.startswith("got ")
    assert row.detail.endswith("expected ==0.1")
    assert row.remedy == "pip install 'trace-serve[dev]'"


@pytest.mark.parametrize("absent", ["missing", "warn"])
def test_an_absent_distribution_is_as_bad_as_the_table_says(absent: doctor.State) -> None:
    row = doctor.check_distribution("no-such-distribution", "trace-serve[load]", absent, {})

    assert (row.state, row.detail) == (absent, "not installed, expected any version")


def test_the_pins_come_from_the_distributions_themselves() -> None:
    pins = doctor.read_pins()

    assert pins["sglang"] == SpecifierSet("==0.5.23")
    assert "httpx" not in {name for name, _, _ in doctor.DISTRIBUTIONS}
    if "torch" in pins:
        assert str(pins["torch"]).startswith("==")


@pytest.mark.parametrize(("version", "state"), [("3.11.7", "ok"), ("3.12.0", "ok"), ("3.10.9", "missing")])
def test_the_interpreter_is_checked_against_requires_python(version: str, state: str) -> None:
    assert doctor.check_python(">=3.11,<3.13", version).state == state


def test_a_plugin_left_out_by_the_environment_is_named() -> None:
    assert all(row.state == "ok" for row in doctor.check_entry_points({}))
    assert all(row.state == "ok" for row in doctor.check_entry_points({"SGLANG_PLUGINS": "other, trace_serve"}))

    row = doctor.check_entry_points({"SGLANG_PLUGINS": "other"})[-1]

    assert (row.name, row.state, row.remedy) == ("SGLANG_PLUGINS", "missing", "unset it")


def test_low_disk_and_few_open_files_only_warn(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path, free=1 << 30).state == "warn"
    assert doctor.check_disk(tmp_path, free=1 << 40).state == "ok"
    assert doctor.check_open_files(256).state == "warn"
    assert doctor.check_open_files(65536).state == "ok"
    assert doctor.check_open_files(-1).detail == "unlimited"


def test_no_sglang_at_the_target_is_one_row(tmp_path: Path) -> None:
    (row,) = doctor.check_patches(tmp_path)

    assert (row.name, row.state) == ("patches", "missing")
    assert "no installed sglang there" in row.detail


def test_a_fault_anywhere_is_exit_code_3_and_json_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, warned = doctor.Check("a", "ok", "fine"), doctor.Check("b", "warn", "low", "free some")
    bad = doctor.Check("c", "missing", "gone [markup]", "apply")

    monkeypatch.setattr(doctor, "run_checks", lambda: [good, warned])
    assert doctor.doctor_command(as_json=False) == 0
    assert "all 2 checks passed" in capsys.readouterr().out

    monkeypatch.setattr(doctor, "run_checks", lambda: [good, warned, bad])
    assert doctor.doctor_command(as_json=True) == EXIT_CONFIG
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["checks"][2] == {"name": "c", "state": "missing", "detail": "gone [markup]", "remedy": "apply"}
    assert doctor.doctor_command(as_json=False) == EXIT_CONFIG
    printed = capsys.readouterr().out
    assert "gone [markup]" in printed
    assert "1 of 3 checks failed. Start with: apply" in printed


def test_the_installed_sglang_is_the_released_one_or_the_patched_one() -> None:
    status = patching.status()

    assert status.version == "0.5.23"
    assert status.state in ("clean", "applied")
    rows = doctor.check_patches()
    assert len(rows) == len(status.patches)
    assert all((row.state == "ok") == (status.state == "applied") for row in rows)
    for patch in status.patches:
        assert patch.subject != patch.name
    with pytest.raises(PatchError, match="no installed sglang"):
        patching.status(Path(__file__).parent)
