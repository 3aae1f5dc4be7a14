"""The images' files, without Docker: linted, and what runs inside them is run."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import dockerfile
import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

from trace_serve.patching.target import DISTRIBUTION
from trace_serve.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
PARSED = dockerfile.parse(DOCKER / "Dockerfile")
IMAGES = ("cpu", "gpu")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}")
TOOLS = Path(sys.executable).parent


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([TOOLS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_follow_the_specification(name: str) -> None:
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_python_comes_by_digest() -> None:
    assert DIGEST.search(PARSED.defaults["PYTHON_IMAGE"])
    assert {stage.base for stage in PARSED.stages.values()} == {"${PYTHON_IMAGE}", "${SGLANG_IMAGE}"}


@pytest.mark.parametrize(
    ("reference", "accepted"),
    [
        ("lmsysorg/sglang:v0.5.23-cu130@sha256:" + "0" * 64, True),
        ("registry.example/sglang@sha256:" + "0" * 64, True),
        (PARSED.defaults["SGLANG_IMAGE"], False),
        ("lmsysorg/sglang:latest", False),
    ],
)
def test_the_gpu_stage_refuses_a_base_without_a_digest(reference: str, accepted: bool) -> None:
    guard = next(step.arguments for step in PARSED.stages["gpu"].of("RUN"))
    done = subprocess.run(
        ["bash", "-c", guard], env={**os.environ, "SGLANG_IMAGE": reference}, capture_output=True, text=True, timeout=10
    )
    assert (done.returncode == 0) is accepted
    assert accepted or reference in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_numbered_user_that_is_not_root(image: str) -> None:
    users = [step.arguments for step in PARSED.stages[image].of("USER")]
    assert users == ["10001:10001"]
    steps = [step.keyword for step in PARSED.stages[image].instructions]
    assert "RUN" not in steps[steps.index("USER") :]


@pytest.mark.parametrize("image", IMAGES)
def test_patches_are_applied_and_verified_at_build(image: str) -> None:
    steps = "\n".join(step.arguments for step in PARSED.stages[image].of("RUN"))
    positions = [steps.index(f"trace-serve {words}") for words in ("patch apply", "patch status --json", "doctor")]
    assert positions == sorted(positions)


@pytest.mark.parametrize("image", IMAGES)
def test_health_is_readiness_and_has_time_for_a_start(image: str) -> None:
    (check,) = PARSED.stages[image].of("HEALTHCHECK")
    assert check.arguments == 'CMD ["trace-serve-ready"]'
    start_s = next(
        int(flag.removeprefix("--start-period=").rstrip("m")) * 60 for flag in check.flags if "start" in flag
    )
    assert start_s >= Settings.model_fields["engine_start_timeout_s"].default


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_sets_only_settings_that_exist(image: str) -> None:
    names = [name for name in PARSED.stages[image].environment() if name.startswith("TRACE_SERVE_")]
    assert names
    for name in names:
        assert name.removeprefix("TRACE_SERVE_").lower() in Settings.model_fields


def test_no_secret_is_written_into_an_image() -> None:
    text = (DOCKER / "Dockerfile").read_text("utf-8").upper()
    assert not re.search(r"^(ENV|ARG) .*(KEY|TOKEN|SECRET|PASSWORD)", text, re.MULTILINE)


def test_what_the_build_copies_is_let_through_and_nothing_else() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    let_through = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {
        source
        for stage in PARSED.stages.values()
        for step in stage.of("COPY")
        for source in step.arguments.split()[:-1]
    }
    assert let_through == copied
    assert all((ROOT / source).exists() for source in copied)


def test_the_wheel_is_made_of_everything_that_belongs_in_it() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {source for step in PARSED.stages["wheel"].of("COPY") for source in step.arguments.split()[:-1]}
    assert {*build["packages"], *build["force-include"], "pyproject.toml", "README.md", "LICENSE"} <= copied


def extras(image: str) -> list[str]:
    """The extras of trace-serve that an image installs."""
    steps = "\n".join(step.arguments for step in PARSED.stages[image].of("RUN"))
    (names,) = re.findall(r'"trace-serve\[([\w,-]+)\] @', steps)
    return names.split(",")


def test_both_images_have_the_extras_that_are_locked() -> None:
    (locked,) = re.findall(r"^IMAGE_EXTRAS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert extras("cpu") == extras("gpu") == locked.split()


def test_the_locked_packages_satisfy_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras("cpu"):
        wanted += project["optional-dependencies"][extra]
    environment = {**default_environment(), "python_full_version": "3.11.16", "python_version": "3.11"}
    locked = {}
    for line in (DOCKER / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(environment):
                locked[pin.name] = next(iter(pin.specifier)).version
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found = locked.get(requirement.name)
            assert found is not None, f"{requirement}: not locked; run `make lock-image`"
            assert requirement.specifier.contains(found), f"{requirement}: locked at {found}; run `make lock-image`"
    assert locked[DISTRIBUTION] == "0.5.23"


@pytest.fixture
def fake_command(tmp_path: Path) -> dict[str, str]:
    """An environment in which `trace-serve` prints what it was given."""
    command = tmp_path / "bin/trace-serve"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "$@"\nenv | grep ^TRACE_SERVE_ | sort\n')
    command.chmod(0o755)
    return {"PATH": f"{command.parent}:{os.environ['PATH']}"}


def enter(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DOCKER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10)


@pytest.mark.parametrize("name", ["TRACE_SERVE_API_KEY", "TRACE_SERVE_ADMIN_KEY"])
def test_the_entrypoint_reads_a_key_from_its_file(fake_command: dict[str, str], tmp_path: Path, name: str) -> None:
    (tmp_path / "key").write_text("a secret = $HOME\n")
    done = enter({**fake_command, f"{name}_FILE": str(tmp_path / "key")}, "serve", "/policies/active dir")
    assert done.stdout.splitlines() == ["serve /policies/active dir", f"{name}=a secret = $HOME"]


def test_the_entrypoint_refuses_a_key_file_that_is_not_there(fake_command: dict[str, str], tmp_path: Path) -> None:
    done = enter({**fake_command, "TRACE_SERVE_API_KEY_FILE": str(tmp_path / "absent")}, "serve", "/policies/active")
    assert (done.returncode, done.stdout) == (3, "")
    assert str(tmp_path / "absent") in done.stderr


def test_the_entrypoint_refuses_a_key_given_twice(fake_command: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one")
    given = {"TRACE_SERVE_API_KEY_FILE": str(tmp_path / "key"), "TRACE_SERVE_API_KEY": "two"}
    done = enter({**fake_command, **given}, "serve", "/policies/active")
    assert done.returncode == 3
    assert "both set" in done.stderr


class Front(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health/ready" else 404)
        self.end_headers()
        self.wfile.write(b'{"status": "said"}')

    def log_message(self, *_: object) -> None:
        """Nothing goes to standard error."""


@pytest.fixture(params=[200, 503])
def front(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    handler = type("Handler", (Front,), {"status": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param, server.server_port
        server.shutdown()
        thread.join()


def ready(port: int) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "TRACE_SERVE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, str(DOCKER / "ready.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def test_the_health_check_is_what_the_server_says(front: tuple[int, int]) -> None:
    status, port = front
    done = ready(port)
    assert (done.returncode == 0) is (status == 200)
    assert "said" in done.stdout


def test_the_health_check_fails_without_a_server() -> None:
    assert ready(9).returncode == 1


def test_the_compose_file_hands_the_key_over_as_a_file_and_drops_every_privilege() -> None:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))["services"]["trace-serve"]
    assert service["environment"]["TRACE_SERVE_API_KEY_FILE"].startswith("/run/secrets/")
    assert not [name for name in service["environment"] if name.endswith("_KEY") and name != "TRACE_SERVE_PUBLIC_KEY"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert all(volume["read_only"] for volume in service["volumes"])
    drain_s = float(service["environment"]["TRACE_SERVE_DRAIN_S"])
    assert float(service["stop_grace_period"].rstrip("s")) > drain_s + 10


def test_shell_scripts_have_no_faults() -> None:
    done = subprocess.run(
        [shutil.which("shellcheck", path=str(TOOLS)) or "shellcheck", DOCKER / "entrypoint.sh"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
