"""The Rollout and its analyses: strict schemas, references that resolve, and the parts that run are run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import manifests
import pytest
import yaml
from typer.main import get_command

from eval_gate.commands.app import app as gate_app
from trace_serve import cli as serve_cli
from trace_serve.load.plan import make_plan
from trace_serve.load.slo import load_slo

ARGO = manifests.ROOT / "deploy/argo"
FILES = [path for path in sorted(ARGO.glob("*.yaml")) if path.name != "kustomization.yaml"]
OBJECTS = [document for path in FILES for document in manifests.documents(path.read_text("utf-8"))]
TEMPLATES = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "AnalysisTemplate"}
(ROLLOUT,) = [each for each in OBJECTS if each["kind"] == "Rollout"]
ANALYSIS = ROLLOUT["spec"]["strategy"]["blueGreen"]["prePromotionAnalysis"]
VALUES = {
    "replicas": 0,
    "image": {"repository": "registry.example.com/trace-serve", "tag": "0.1.0-cpu"},
    "policy": {"path": "/policies/mine", "volume": {"persistentVolumeClaim": {"claimName": "policies"}}},
    "publicKey": {"configMap": "gate-key"},
    "apiKey": {"secret": "trace-serve-key"},
}
SCRIPT = ARGO / "report_outcome.sh"


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, spec in TEMPLATES.items():
        for metric in spec["metrics"]:
            if "job" in metric["provider"]:
                yield name, metric["provider"]["job"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", manifests.VERSIONS)
def test_every_object_fits_its_schema_strictly(version: str) -> None:
    for each in OBJECTS:
        assert manifests.faults(each, version) == [], each["metadata"]["name"]


@pytest.mark.parametrize("kind", ["Rollout", "AnalysisTemplate"])
def test_a_field_that_no_schema_knows_is_found(kind: str) -> None:
    for each in OBJECTS:
        if each["kind"] == kind:
            assert manifests.faults({**each, "spec": {**each["spec"], "misspelt": 1}}, manifests.VERSIONS[-1])


def test_the_kustomization_names_every_file() -> None:
    listed = yaml.safe_load((ARGO / "kustomization.yaml").read_text("utf-8"))
    (scripts,) = listed["configMapGenerator"]
    assert sorted(listed["resources"]) == [path.name for path in FILES]
    assert sorted(scripts["files"]) == sorted(path.name for path in ARGO.iterdir() if path.suffix != ".yaml")
    mounted = {node["configMap"]["name"] for each in OBJECTS for node in manifests.walk(each) if "configMap" in node}
    assert mounted == {scripts["name"]}


@pytest.mark.skipif(not manifests.HELM, reason="helm-python-sdk has no wheel for this machine")
def test_the_rollout_takes_over_what_the_chart_makes() -> None:
    chart = {(each["kind"], each["metadata"]["name"]): each for each in manifests.render(VALUES)}
    own = {(each["kind"], each["metadata"]["name"]): each for each in OBJECTS}
    blue_green = ROLLOUT["spec"]["strategy"]["blueGreen"]
    workload = ROLLOUT["spec"]["workloadRef"]
    pods = chart[workload["kind"], workload["name"]]["spec"]
    assert pods["replicas"] == 0
    active = chart["Service", blue_green["activeService"]]["spec"]
    preview = own["Service", blue_green["previewService"]]["spec"]
    assert active["selector"] == preview["selector"] == pods["selector"]["matchLabels"]
    assert active["ports"] == preview["ports"]
    assert ROLLOUT["spec"]["progressDeadlineSeconds"] > pods["progressDeadlineSeconds"]


def test_an_analysis_decides_before_anything_is_promoted() -> None:
    blue_green = ROLLOUT["spec"]["strategy"]["blueGreen"]
    assert blue_green["autoPromotionEnabled"] is True
    assert "autoPromotionSeconds" not in blue_green
    assert {each["templateName"] for each in ANALYSIS["templates"]} == set(TEMPLATES)


def test_every_argument_is_declared_and_given() -> None:
    given = {each["name"] for each in ANALYSIS["args"]}
    wanted = set()
    for name, spec in TEMPLATES.items():
        declared = {each["name"] for each in spec["args"]}
        used = set(re.findall(r"\{\{args\.([\w-]+)\}\}", json.dumps(spec["metrics"])))
        assert used == declared, name
        wanted |= {each["name"] for each in spec["args"] if "value" not in each}
    assert wanted == given


def test_the_two_analyses_can_run_as_one() -> None:
    metrics = [metric["name"] for spec in TEMPLATES.values() for metric in spec["metrics"]]
    assert len(metrics) == len(set(metrics))
    defaults = [(arg["name"], arg["value"]) for spec in TEMPLATES.values() for arg in spec["args"] if "value" in arg]
    assert len(dict(defaults)) == len(set(defaults))


@pytest.mark.parametrize(
    ("template", "words", "known"),
    [
        ("trace-serve-gate", ["eval-gate", "run"], get_command(gate_app).commands["run"]),
        ("trace-serve-load", ["trace-serve", "load"], serve_cli._load("load")),
    ],
)
def test_a_job_uses_options_that_exist(template: str, words: list[str], known: Any) -> None:
    (spec,) = [pod for name, pod in jobs() if name == template]
    arguments = spec["containers"][0]["args"]
    assert arguments[:2] == words
    options = {option for parameter in known.params for option in parameter.opts}
    assert {each.split("=")[0] for each in arguments if each.startswith("--")} <= options


def test_the_load_test_is_planned_and_judged_as_the_files_say() -> None:
    (spec,) = [pod for name, pod in jobs() if name == "trace-serve-load"]
    defaults = {arg["name"]: arg.get("value", "x") for arg in TEMPLATES["trace-serve-load"]["args"]}
    options = [each.removeprefix("--").split("=", 1) for each in spec["containers"][0]["args"] if "=" in each]
    given = {name: re.sub(r"\{\{args\.([\w-]+)\}\}", lambda m: defaults[m[1]], value) for name, value in options}
    slo = Path(given.pop("slo"))
    given.pop("out")
    plan = make_plan({**given, "slo": ARGO / slo.name})
    assert plan.is_open
    assert plan.rate is not None
    # Enough arrivals to be judged, even when some are late.
    assert plan.rate * plan.duration > 2 * load_slo(plan.slo).run.min_requests


def test_jobs_are_confined_and_are_tried_once() -> None:
    for name, spec in TEMPLATES.items():
        for metric in spec["metrics"]:
            if "job" in metric["provider"]:
                assert metric["provider"]["job"]["spec"]["backoffLimit"] == 0, name
    for _, pod in jobs():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_outcome_that_a_job_leaves_is_the_one_that_is_read(name: str) -> None:
    (pod,) = [pod for owner, pod in jobs() if owner == name]
    (web,) = [metric for metric in TEMPLATES[name]["metrics"] if "web" in metric["provider"]]
    left = pod["containers"][0]["command"][-1]
    assert web["provider"]["web"]["url"].endswith(f":8080/{left}")
    assert (web["successCondition"], web["failureCondition"]) == ('result == "PASS"', 'result == "BLOCK"')
    job_s = next(
        node["activeDeadlineSeconds"] for node in manifests.walk(TEMPLATES[name]) if "activeDeadlineSeconds" in node
    )
    assert web["consecutiveErrorLimit"] * 10 > job_s


def report(outcomes: Path, *command: str) -> int:
    environment = {"OUTCOMES": str(outcomes), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", str(SCRIPT), "gate-abc", *command], env=environment, timeout=120).returncode


@pytest.mark.parametrize(("code", "outcome"), [(0, "PASS"), (2, "INCONCLUSIVE")])
def test_an_answer_that_does_not_abort_is_left_for_the_analysis(tmp_path: Path, code: int, outcome: str) -> None:
    assert report(tmp_path, "sh", "-c", f"exit {code}") == 0
    assert json.loads((tmp_path / "gate-abc.json").read_text()) == {"outcome": outcome}
    assert [path.name for path in tmp_path.iterdir()] == ["gate-abc.json"]


@pytest.mark.parametrize("code", [1, 3, 4, 130])
def test_every_other_answer_fails_the_job_and_leaves_nothing(tmp_path: Path, code: int) -> None:
    (tmp_path / "gate-abc.json").write_text('{"outcome": "PASS"}')
    assert report(tmp_path, "sh", "-c", f"exit {code}") == code
    assert list(tmp_path.iterdir()) == []


def recorded(path: Path, passed: list[bool]) -> str:
    lines = (json.dumps({"id": f"q{i}", "passed": good}) for i, good in enumerate(passed))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("serving", "code"),
    [([True] * 90 + [False] * 10, 0), ([True] * 40 + [False] * 60, 1), ([True] * 84 + [False] * 16, 2)],
    ids=["passes", "blocks", "cannot tell"],
)
def test_the_gate_itself_promotes_pauses_and_aborts(tmp_path: Path, serving: list[bool], code: int) -> None:
    outcomes = tmp_path / "outcomes"
    outcomes.mkdir()
    one = recorded(tmp_path / "training.jsonl", [True] * 90 + [False] * 10)
    two = recorded(tmp_path / "serving.jsonl", serving)
    command = [sys.executable, "-m", "eval_gate.cli", "compare", one, two, "--margin=0.1"]
    assert report(outcomes, *command) == (1 if code == 1 else 0)
    left = [json.loads(path.read_text())["outcome"] for path in outcomes.iterdir()]
    assert left == {0: ["PASS"], 1: [], 2: ["INCONCLUSIVE"]}[code]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, str(ARGO / "outcome_server.py"), str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"
        process.terminate()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)["outcome"]
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)["outcome"]


def test_an_outcome_is_offered_once(server: str, tmp_path: Path) -> None:
    assert get(f"{server}/gate-abc") == (404, "none yet")
    (tmp_path / "gate-abc.json").write_text('{"outcome": "PASS"}')
    assert get(f"{server}/gate-abc") == (200, "PASS")
    assert get(f"{server}/gate-abc") == (404, "none yet")


@pytest.mark.parametrize("path", ["/../secret", "/.gate-abc.new", "/", "/gate-abc.json", "/a/b"])
def test_nothing_but_an_outcome_is_served(server: str, tmp_path: Path, path: str) -> None:
    (tmp_path / "gate-abc.json").write_text('{"outcome": "PASS"}')
    (tmp_path / ".gate-abc.new").write_text('{"outcome": "PASS"}')
    assert get(server + path)[0] == 404
    assert (tmp_path / "gate-abc.json").exists()
