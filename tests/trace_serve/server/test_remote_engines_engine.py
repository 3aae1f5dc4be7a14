"""The real engine, run by the test and named by its URL."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from remote_engines import wait_until

from trace_serve.engine.launch import EngineProcess
from trace_serve.policy.build import build_policy
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import PRESETS
from trace_serve.server.process import ServerProcess

pytestmark = pytest.mark.engine

BODY = {"messages": [{"role": "user", "content": "Where is Paris?"}], "max_tokens": 8, "temperature": 0}


def front_end(policy: Path, engine: EngineProcess, directory: Path) -> ServerProcess:
    key_file = directory / "engine.key"
    key_file.write_text(engine.api_key)
    environment = {"TRACE_SERVE_ENGINE_URLS": engine.url, "TRACE_SERVE_ENGINE_KEY_FILE": str(key_file)}
    return ServerProcess(policy, mode="rollout", environment=environment, log_path=directory / "server.log")


def test_an_engine_by_url_proves_itself_answers_as_directly_and_outlives_the_front_end(
    fp4_policy: Policy, fp4_engine: EngineProcess, tmp_path: Path
) -> None:
    headers = {"authorization": f"Bearer {fp4_engine.api_key}"}
    direct = httpx.post(fp4_engine.url + "/v1/chat/completions", json=BODY, headers=headers, timeout=120).json()
    with front_end(fp4_policy.path, fp4_engine, tmp_path) as server:
        server.wait_ready(60)
        answer = httpx.post(server.url + "/v1/chat/completions", json=BODY, timeout=120)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"] == direct["choices"][0]["message"]
        assert answer.headers["x-trace-policy-digest"].startswith("sha256:")
        report = httpx.get(server.url + "/trace/report", timeout=60).json()
        assert report["policy"]["digest"] == report["policy_digest"] == answer.headers["x-trace-policy-digest"]
    assert fp4_engine.poll() is None


def test_an_engine_that_loaded_another_policy_is_never_served(
    engine_model: Path, fp4_engine: EngineProcess, tmp_path: Path
) -> None:
    other = build_policy(engine_model, tmp_path / "other", name="other", version="1", recipe=PRESETS["bf16"])
    with front_end(other.path, fp4_engine, tmp_path) as server:
        wait_until(lambda: "recipe_id" in told(server), "the reason is told", 60)
        assert httpx.post(server.url + "/v1/chat/completions", json=BODY, timeout=60).status_code == 503


def told(server: ServerProcess) -> str:
    try:
        return httpx.get(server.url + "/health/ready", timeout=5).text
    except httpx.TransportError:
        return ""
