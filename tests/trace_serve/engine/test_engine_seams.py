"""Every seam, broken on purpose, stops the start and is named; every patch changes what it says it changes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trace_serve import patching
from trace_serve.engine import spec, start, state
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.errors import EXIT_CONFIG, ConfigError, SeamError
from trace_serve.patching.series import load_series
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
PATCHES = [patch.name.removesuffix(".patch") for patch in load_series(patching.patch_dir()).patches]


@pytest.fixture(scope="module")
def broken() -> dict[str, Any]:
    """What `seam_breaker` found: one process that imports SGLang once and is forked for each case."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    environment.pop("SGLANG_PLUGINS", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "seam_breaker.py")],
        capture_output=True,
        text=True,
        timeout=850,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def declared_hooks() -> int:
    """Number of `Hook(...)` written in the hook files, counted without importing SGLang."""
    sources = (HERE.parents[2] / "trace_serve/engine/hooks").glob("*.py")
    calls = (node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return sum(isinstance(call.func, ast.Name) and call.func.id == "Hook" for call in calls)


def test_each_broken_seam_stops_the_start_and_is_named(broken: dict[str, Any]) -> None:
    cases = [case for case in broken["seams"] if case["how"] != "refused"]
    wrong = [
        (case["how"], case["seam"], case["code"], case["output"][-400:])
        for case in cases
        if case["code"] != spec.EXIT_SEAM
        or f"seam {case['seam']} (" not in case["output"].rpartition(spec.FAILURE_PREFIX)[2]
    ]
    assert wrong == []
    seen = {how: {case["seam"] for case in cases if case["how"] == how} for how in ("gone", "deaf", "unpatched")}
    assert len(seen["gone"] - seen["deaf"]) >= declared_hooks(), "every hook was taken away once"
    assert len(seen["deaf"]) == 5, "every registry was made deaf once"
    assert seen["unpatched"] == set(PATCHES)


def test_what_nothing_would_verify_is_refused_by_name(broken: dict[str, Any]) -> None:
    """These starts have no broken seam, so they also show that the checks before pass."""
    cases = [case for case in broken["seams"] if case["how"] == "refused"]
    assert {case["code"] for case in cases} == {EXIT_CONFIG}
    for case in cases:
        assert f"{spec.FAILURE_PREFIX}{case['seam']}: " in case["output"]
    assert len(cases) == 7


def test_every_patch_has_a_probe_and_changes_what_it_says(broken: dict[str, Any]) -> None:
    assert broken["patches"] == {
        "0001-bootstrap-entry-points": {"with": ["sglang.bootstrap"], "without": []},
        "0002-mixtral-moe-quantization": {"with": "MixtralForCausalLM", "without": "QuantMixtralForCausalLM"},
        "0003-flush-after-weight-update": {"with": 1, "without": 0},
        "0004-tied-embeddings": {"with": ["the embedding"] * 2, "without": ["a head of its own"] * 2},
        "0005-host-memory-without-cuda": {"with": False, "without": True},
        "0008-routed-experts-without-chunks": {"with": 100, "without": 4},
        "0006-stream-logprobs": {"with": 1, "without": 0},
        "0007-olmoe-config": {
            "with": {"k_norm": 8, "eps": [1e-6], "renormalize": True},
            "without": {"k_norm": 16, "eps": [1e-5], "renormalize": False},
        },
    }
    assert set(broken["patches"]) == set(PATCHES)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of an engine state that stands for this process's."""
    engine = SimpleNamespace(spec=spec.EngineSpec(recipe=Recipe(), run_dir=str(tmp_path)))
    monkeypatch.setattr(state, "get", lambda: engine)
    return tmp_path


def published(directory: Path, pid: int, **seams: str) -> None:
    (directory / f"seams-{pid}.json").write_text(json.dumps(seams))


def process(pid: int, *, alive: bool = True) -> Any:
    return SimpleNamespace(pid=pid, is_alive=lambda: alive)


def test_a_scheduler_that_did_not_report_or_has_a_broken_seam_stops_the_start(run_dir: Path) -> None:
    processes = [process(11), process(12)]
    published(run_dir, 11, forward="ok", heartbeat="ok")
    with pytest.raises(SeamError, match="scheduler 12 did not report its seams, so the plugin did not run in it"):
        start.schedulers_ready([{}, {}], None, processes)
    published(run_dir, 12, forward="the hook is not applied (captured rows have no slots)", heartbeat="ok")
    with pytest.raises(SeamError, match="scheduler 12: seam forward: the hook is not applied"):
        start.schedulers_ready([{}, {}], None, processes)
    published(run_dir, 12, forward="ok")
    start.schedulers_ready([{}, {}], None, processes)


def test_schedulers_behind_a_controller_are_asked_by_the_process_ids_it_names(run_dir: Path) -> None:
    published(run_dir, 21, forward="ok")
    with pytest.raises(SeamError, match="scheduler 22 did not report"):
        start.schedulers_ready([{"scheduler_pids": [21, 22]}], None, [process(20)])


def test_a_detokenizer_without_the_plugin_stops_the_start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_DETOKENIZER_TIMEOUT_S", 0.1)
    detokenizers = [process(31), process(32), process(33)]
    start.detokenizers_started((detokenizers, ["detokenizer_0", "detokenizer_1", "detokenizer_router"]))
    published(run_dir, 31, forward="ok")
    info = [{"trace_serve": {"hints": {"layers_total": 1}}}]
    with pytest.raises(SeamError, match="detokenizer 32 did not report its seams"):
        start.verified_start(lambda *args: None, None, None, None, None, info)
    monkeypatch.setattr(start, "_detokenizers", [])
    with pytest.raises(SeamError, match="seam detokenizers: no detokenizer was seen starting"):
        start.verified_start(lambda *args: None, None, None, None, None, info)
    with pytest.raises(SeamError, match="seam init-info: the scheduler did not report what it loaded"):
        start.verified_start(lambda *args: None, None, None, None, None, [{}])


@pytest.mark.engine
def test_every_process_of_an_engine_reports_and_all_its_seams_are_ok(fp4_engine: EngineProcess) -> None:
    assert fp4_engine._run_dir is not None
    reports = sorted(Path(fp4_engine._run_dir.name).glob("seams-*.json"))
    assert len(reports) == 2, "one scheduler and one detokenizer"
    for report in reports:
        seams = json.loads(report.read_text())
        assert set(seams.values()) == {"ok"}
        assert set(PATCHES) < set(seams)


@pytest.mark.engine
def test_extra_http_workers_are_refused_by_the_launcher_with_the_flag(fp4_policy: Policy, tmp_path: Path) -> None:
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        log_path=tmp_path / "log",
        extra_args=("--tokenizer-worker-num=2",),
    )
    engine = EngineProcess(config)
    engine.start()
    with pytest.raises(ConfigError, match=r"--tokenizer-worker-num: got 2: .*no API key"):
        engine.wait_ready(240)
