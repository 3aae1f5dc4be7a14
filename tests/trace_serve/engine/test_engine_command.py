"""`trace-serve engine` and the dry runs: SGLang resolves the arguments, and a refusal names what to change."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_client import START_TIMEOUT_S

from trace_serve.cli import main
from trace_serve.engine.architectures import Architecture
from trace_serve.engine.settings import engine_config
from trace_serve.errors import ConfigError
from trace_serve.policy.build import build_policy
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import PRESETS
from trace_serve.settings import Settings

ROOT = Path(__file__).parents[3]

RESOLVE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
for line in json.load(sys.stdin):
    arguments = prepare_server_args(line)
    arguments.resolve_once()
    arguments.check_server_args()
    told = arguments.resolved_dict()
    print("RESOLVED", json.dumps({name: told[name] for name in ("tp_size", "ep_size", "nnodes", "node_rank")}))
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["engine", *arguments]) == ConfigError.exit_code
    return capsys.readouterr().err


@pytest.fixture
def bf16_policy(engine_model: Path, tmp_path: Path) -> Policy:
    return build_policy(engine_model, tmp_path / "bf16", name="bf16", version="1", recipe=PRESETS["bf16"])


def test_a_dry_run_tells_what_sglang_makes_of_cards_that_are_not_here(
    bf16_policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cuda", "--tensor-parallel", "2", "--engine-args", "--stream-interval 4"]
    assert main(["engine", str(bf16_policy.path), "--dry-run", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    arguments = told["arguments"]
    assert (arguments["tp_size"], arguments["device"], arguments["stream_interval"]) == (2, "cuda", 4)
    assert "max_total_tokens" not in arguments, "a card's memory says how many"
    assert told["seams"] > 50
    assert not [word for word in told["command"] if "api-key" in word]


def test_an_fp4_recipe_on_a_card_is_refused_before_anything_starts(
    fp4_policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "device: got cuda" in refused(capsys, str(fp4_policy.path), "--dry-run", "--device", "cuda")


def test_a_dry_run_of_the_server_refuses_what_sglang_and_hints_would(
    fp4_policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", str(fp4_policy.path), "--mode", "rollout", "--dry-run", "--engine-args=--ep-size=2"])
    assert code == ConfigError.exit_code
    assert "--ep-size: got 2" in capsys.readouterr().err


def test_a_key_that_is_missing_or_too_short_is_refused(
    fp4_policy: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--engine-key-file: missing" in refused(capsys, str(fp4_policy.path))
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("short")
    assert "--engine-key-file: got 5 characters" in refused(capsys, str(fp4_policy.path), "--engine-key-file", str(key))


@pytest.mark.parametrize("word", ["--port=1", "--api-key x", "--quantization fp8", "--tp 2"])
def test_an_argument_that_follows_from_another_option_is_refused(
    fp4_policy: Policy, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    told = refused(capsys, str(fp4_policy.path), "--dry-run", f"--engine-args={word}")
    assert f"engine_args: got {word.replace('=', ' ').split()[0]}," in told


def test_engine_args_that_are_no_command_line_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_args: got .*No closing quotation"):
        engine_config(Settings.load(engine_args="--json 'x"), ROOT, PRESETS["default"])


@pytest.mark.parametrize(("ranks", "served"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_cards_that_the_heads_do_not_divide_among_are_refused_before_a_start(ranks: int, served: bool) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
    architecture = Architecture({**config, "num_local_experts": 4, "num_hidden_layers": 1})
    if served:
        architecture.check(PRESETS["bf16"], device="cuda", ranks=ranks)
        return
    with pytest.raises(ConfigError, match=rf"tensor_parallel: got {ranks}, .*4 heads"):
        architecture.check(PRESETS["bf16"], device="cuda", ranks=ranks)


def launch_lines() -> list[list[str]]:
    """The arguments of every line in the deployment page that runs SGLang's own server."""
    text = (ROOT / "docs/deployment.md").read_text("utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"python -m sglang\.launch_server ([^\n]+)", text)]


def test_sglang_resolves_every_launch_line_of_the_deployment_page(engine_model: Path) -> None:
    lines = launch_lines()
    assert lines
    with_model = [[str(engine_model) if word.startswith("/policies") else word for word in line] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(with_model),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "0"},
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line.removeprefix("RESOLVED ")) for line in done.stdout.splitlines() if "RESOLVED" in line]
    assert [each["node_rank"] for each in told] == [0, 1]
    assert {(each["tp_size"], each["ep_size"], each["nnodes"]) for each in told} == {(8, 8, 2)}


@pytest.mark.engine
def test_an_engine_alone_answers_to_its_key_and_ends_with_a_signal(fp4_policy: Policy, tmp_path: Path) -> None:
    key = tmp_path / "engine.key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef" * 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "trace_serve", "engine", str(fp4_policy.path), "--engine-key-file", str(key)]
    command += ["--port", port, "--engine-log", str(tmp_path / "engine.log"), "--max-total-tokens", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready: dict[str, Any] = json.loads(process.stdout.readline())
            assert ready["policy_digest"] == fp4_policy.digest
            url = f"http://127.0.0.1:{port}/v1/models"
            assert httpx.get(url, timeout=60).status_code == 401
            assert httpx.get(url, headers={"authorization": f"Bearer {key.read_text()}"}, timeout=60).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))):
                return
        time.sleep(0.1)
    raise AssertionError("the engine's port is still open")
