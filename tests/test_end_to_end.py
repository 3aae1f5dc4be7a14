"""From a model directory to an answered request, through the commands that a user types and the real engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from trace_serve.errors import EXIT_CONFIG, EXIT_PASS
from trace_serve.hints import wire
from trace_serve.policy.manifest import Policy, load_policy
from trace_serve.server.process import ServerProcess

pytestmark = pytest.mark.engine


def command(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, timeout=400
    )


def any_answer_queries(path: Path, count: int) -> Path:
    """A random model cannot be right, so here every answer is: the run is about the machinery, not about quality."""
    rows = [
        {
            "id": f"q{i}",
            "suite": "machinery",
            "kind": "any",
            "messages": [{"role": "user", "content": f"ticket {i * 7919 % 1000}"}],
            "max_tokens": 4,
            "checker": {"type": "regex", "pattern": "(?s).*"},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def gated(engine_model: Path, workspace: Path) -> Policy:
    """A policy built and gated by the commands; its signed verdict is PASS."""
    policy = workspace / "tiny"
    built = command("trace_serve", "policy", "build", engine_model, "--out", policy, "--name", "tiny", "--version", "3")
    assert built.returncode == 0, built.stderr
    key, public = workspace / "gate.pem", workspace / "gate.pub"
    assert command("eval_gate.cli", "keygen", key, public).returncode == 0
    queries = any_answer_queries(workspace / "queries.jsonl", 60)
    gate = command(
        *("eval_gate.cli", "run", "--training", engine_model, "--serving", policy, "--queries", queries),
        *("--out", workspace / "gate", "--key", key, "--concurrency", "16"),
    )
    assert gate.returncode == EXIT_PASS, gate.stdout + gate.stderr
    return load_policy(policy)


def test_the_gate_leaves_a_verdict_that_verifies(gated: Policy, workspace: Path) -> None:
    envelope = workspace / "gate" / "verdict.dsse.json"
    checked = command(
        *("eval_gate.cli", "verify", envelope, "--public-key", workspace / "gate.pub", "--policy", gated.path)
    )
    assert checked.returncode == EXIT_PASS, checked.stderr
    verdict = json.loads((workspace / "gate" / "verdict.json").read_text())
    assert verdict["outcome"] == "PASS"
    assert verdict["subjects"]["serving"] == gated.digest
    assert verdict["recipe_id"] == gated.recipe_id
    report = verdict["serving_evidence"]["report"]
    assert (report["mode"], report["experts"]["format"], report["kv"]["format"]) == ("fp4", "nvfp4", "nvfp4")
    assert verdict["training_evidence"]["report"]["mode"] == "bf16"
    records = (workspace / "gate" / "results.jsonl").read_text().splitlines()
    assert len(records) >= 2 * 60
    assert "<html" in (workspace / "gate" / "report.html").read_text()


def test_production_mode_serves_the_gated_policy_and_returns_its_hints(gated: Policy, workspace: Path) -> None:
    server = ServerProcess(
        gated.path,
        mode="production",
        verdict=workspace / "gate" / "verdict.dsse.json",
        public_key=workspace / "gate.pub",
        hint_dir=workspace / "hints",
        api_key="end-to-end-key",
        log_path=workspace / "server.log",
    )
    with server:
        server.wait_ready(300)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "trace_hints": True}
        headers = {"Authorization": "Bearer end-to-end-key", "Content-Type": "application/json"}
        request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            usage = json.load(response)["usage"]
            rollout, digest = response.headers["x-trace-rollout"], response.headers["x-trace-policy-digest"]
        assert digest == gated.digest
        request = urllib.request.Request(f"{server.url}/v1/rollouts/{rollout}/hints", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            hints = wire.from_bytes(response.read(), expect_recipe_id=gated.recipe_id)
    assert hints.rows == usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert all(site.present.all() for site in hints.sites)
    assert server.stop() == 0


def refused(policy: Path, workspace: Path, *, verdict: Path, public_key: Path | None = None) -> str:
    result = command(
        *("trace_serve", "serve", policy, "--mode", "production", "--port", "0", "--verdict", verdict),
        *("--public-key", public_key or workspace / "gate.pub"),
    )
    assert result.returncode == EXIT_CONFIG
    assert "Traceback" not in result.stderr
    return result.stderr


def test_an_unsigned_policy_is_refused(gated: Policy, workspace: Path) -> None:
    assert "verdict" in refused(gated.path, workspace, verdict=workspace / "nowhere.dsse.json")


def test_a_policy_that_changed_after_the_gate_is_refused(gated: Policy, workspace: Path) -> None:
    changed = workspace / "changed"
    shutil.copytree(gated.path, changed)
    (changed / "README.txt").write_text("added after the gate")
    assert "digest" in refused(changed, workspace, verdict=workspace / "gate" / "verdict.dsse.json")


def test_a_verdict_of_another_key_is_refused(gated: Policy, workspace: Path) -> None:
    key, public = workspace / "other.pem", workspace / "other.pub"
    assert command("eval_gate.cli", "keygen", key, public).returncode == 0
    envelope = workspace / "gate" / "verdict.dsse.json"
    assert "signature" in refused(gated.path, workspace, verdict=envelope, public_key=public)
