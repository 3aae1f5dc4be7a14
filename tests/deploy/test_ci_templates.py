"""The pipelines are linted offline, their commands exist, and the plain shell release is run."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_client import START_TIMEOUT_S
from typer.main import get_command

from eval_gate.commands.app import app as gate_app
from trace_serve.policy.cli import app as policy_app
from trace_serve.policy.manifest import load_policy
from trace_serve.server.authorization import authorize_policy

ROOT = Path(__file__).parents[2]
CI = ROOT / "deploy/ci"
WORKFLOW, ACTION = CI / "github/release.yml", CI / "github/action.yml"
GITLAB = CI / "gitlab/release.gitlab-ci.yml"
TOOLS = Path(sys.executable).parent


def lint(tool: str, *arguments: str | Path) -> str:
    """What a linter complains of, empty when it is content."""
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "path"), [("github-workflows", WORKFLOW), ("github-actions", ACTION), ("gitlab-ci", GITLAB)]
)
def test_every_template_follows_its_schema(schema: str, path: Path) -> None:
    assert lint("check-jsonschema", "--builtin-schema", f"vendor.{schema}", path) == ""


def test_the_workflow_has_no_faults() -> None:
    config, shellcheck = CI / "github/actionlint.yaml", TOOLS / "shellcheck"
    assert lint("actionlint", "-config-file", config, "-shellcheck", shellcheck, WORKFLOW) == ""


@pytest.mark.parametrize("path", [WORKFLOW, ACTION])
def test_workflow_and_action_give_nothing_away(path: Path) -> None:
    assert lint("zizmor", "--offline", "--no-progress", path) == ""


@pytest.mark.parametrize("script", [CI / "release.sh", ROOT / "deploy/argo/report_outcome.sh"])
def test_shell_scripts_have_no_faults(script: Path) -> None:
    assert lint("shellcheck", script) == ""
    assert os.access(script, os.X_OK)


def scripts() -> Iterator[str]:
    """Every piece of shell in the templates."""
    yield (CI / "release.sh").read_text("utf-8")
    for job in yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"].values():
        yield from (step["run"] for step in job["steps"] if "run" in step)
    yield from (step["run"] for step in yaml.safe_load(ACTION.read_text("utf-8"))["runs"]["steps"])
    for job in yaml.safe_load(GITLAB.read_text("utf-8")).values():
        if isinstance(job, dict):
            yield "\n".join([*job.get("script", ()), *job.get("after_script", ())])


def commands() -> list[list[str]]:
    """Every call of our programs in the templates."""
    lines = "\n".join(scripts()).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"((?:eval-gate|trace-serve policy) [a-z].*)", text)]


def test_every_command_and_option_of_the_templates_exists() -> None:
    known: dict[str, Any] = {"eval-gate": get_command(gate_app), "trace-serve": get_command(policy_app)}
    found = commands()
    assert {words[0] for words in found} == set(known)
    for program, *words in found:
        name = words[1] if program == "trace-serve" else words[0]
        options = {option for parameter in known[program].commands[name].params for option in parameter.opts}
        assert {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z].*", word)} <= options, words


def test_the_signing_key_stays_where_it_is_needed() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    with_key = [name for name, job in jobs.items() if "GATE_PRIVATE_KEY" in json.dumps(job)]
    assert with_key == ["gate"]
    assert jobs["gate"]["environment"] == "release"
    given = [name for name, job in yaml.safe_load(GITLAB.read_text("utf-8")).items() if "GATE_PRIVATE_KEY" in str(job)]
    assert given == ["gate-policy"]


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers `ticket N` with yes where N is below `passed`, else with no."""

    passed = 0

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "tiny"}]}) if self.path == "/v1/models" else self._reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = int(body["messages"][-1]["content"].split()[-1])
        message = {"role": "assistant", "content": "yes" if number < self.passed else "no"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        self._reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing goes to standard error."""


@contextmanager
def endpoint(passed: int) -> Iterator[str]:
    handler = type("Passing", (Endpoint,), {"passed": passed})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Release:
    """A place to release the tiny model from, with keys, queries that any answer passes, and a deploy command."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model
        self.policies, self.deployed = directory / "policies", directory / "deployed"
        self.keygen("gate")
        rows = (
            {
                "id": f"q{i}",
                "messages": [{"role": "user", "content": f"ticket {i}"}],
                "max_tokens": 2,
                "checker": {"type": "regex", "pattern": "(?s).*"},
            }
            for i in range(8)
        )
        (directory / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        deploy = directory / "deploy"
        deploy.write_text(f'#!/bin/sh\necho "$1" >> {self.deployed}\n')
        deploy.chmod(0o755)

    def keygen(self, name: str) -> None:
        command = [TOOLS / "eval-gate", "keygen", self.directory / f"{name}.pem", self.directory / f"{name}.pub"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def run(self, **changes: str) -> subprocess.CompletedProcess[str]:
        given = {
            "MODEL": str(self.model),
            "NAME": "tiny",
            "VERSION": "7",
            "KEY": str(self.directory / "gate.pem"),
            "PUBLIC_KEY": str(self.directory / "gate.pub"),
            "PUBLISH": str(self.policies),
            "WORK": str(self.directory / "work"),
            "QUERIES": str(self.directory / "queries.jsonl"),
            "MARGIN": "0.4",
            "DEPLOY": str(self.directory / "deploy"),
            **changes,
        }
        return subprocess.run(
            ["bash", str(CI / "release.sh")],
            env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}", **given},
            capture_output=True,
            text=True,
            timeout=2 * START_TIMEOUT_S + 120,
        )


@pytest.fixture
def release(tmp_path: Path, engine_model: Path) -> Release:
    return Release(tmp_path, engine_model)


def hundred_queries(directory: Path) -> str:
    path = directory / "hundred.jsonl"
    checker = {"type": "exact", "expected": "yes"}
    rows = (
        {"id": f"q{i}", "messages": [{"role": "user", "content": f"ticket {i}"}], "checker": checker}
        for i in range(100)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("passed", "code", "word"), [(40, 1, "blocked"), (84, 2, "inconclusive")])
def test_a_policy_that_does_not_pass_is_neither_published_nor_deployed(
    release: Release, passed: int, code: int, word: str
) -> None:
    queries = hundred_queries(release.directory)
    with endpoint(90) as training, endpoint(passed) as serving:
        done = release.run(
            QUERIES=queries, TRAINING=training, SERVING=serving, MARGIN="0.1", GATE_OPTIONS="--allow-unproven"
        )
    assert done.returncode == code, done.stdout + done.stderr
    assert word in done.stderr
    assert (release.directory / "work/gate/report.html").exists()
    assert not release.policies.exists()
    assert not release.deployed.exists()


@pytest.mark.parametrize(("pinned", "reason"), [("gate", "cannot be what was judged"), ("other", "signature")])
def test_a_pass_about_something_else_or_by_another_key_releases_nothing(
    release: Release, pinned: str, reason: str
) -> None:
    release.keygen("other")
    queries = hundred_queries(release.directory)
    with endpoint(90) as training, endpoint(90) as serving:
        done = release.run(
            QUERIES=queries,
            TRAINING=training,
            SERVING=serving,
            GATE_OPTIONS="--allow-unproven",
            PUBLIC_KEY=str(release.directory / f"{pinned}.pub"),
        )
    assert done.returncode == 3, done.stdout + done.stderr
    assert reason in done.stderr
    assert [path.name for path in release.policies.iterdir()] == ["tiny-7.new"]
    assert not release.deployed.exists()


def test_a_release_without_its_settings_says_which_is_missing(release: Release) -> None:
    done = release.run(PUBLISH="")
    assert done.returncode != 0
    assert "PUBLISH" in done.stderr


# Two starts of an engine, one after the other on a busy machine.
@pytest.mark.timeout(1200)
@pytest.mark.engine
def test_a_policy_is_built_gated_signed_published_and_deployed(release: Release) -> None:
    done = release.run()
    assert done.returncode == 0, done.stdout + done.stderr
    published = release.policies / "tiny-7"
    assert release.deployed.read_text().split() == [str(published)]
    assert load_policy(published).version == "7"
    allowed = authorize_policy(published, mode="production", public_key=release.directory / "gate.pub")
    assert allowed.verdict_id is not None
