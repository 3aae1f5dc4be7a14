"""Schemathesis asks the front-end everything that its OpenAPI document allows, and much that it does not."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Running

KEY = "a-client-key"
LONG = 300
"""Limits on lengths above this are left out of the document that is fuzzed: reaching them takes megabytes a request."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("fuzz"), api_key=KEY, tool_call_parser="qwen") as running:
        yield running


def without_long_limits(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_long_limits(child)
            for key, child in value.items()
            if not (key in ("maxItems", "maxLength") and isinstance(child, int) and child > LONG)
        }
    return [without_long_limits(child) for child in value] if isinstance(value, list) else value


def test_no_request_makes_the_server_fail_or_answer_against_its_document(server: Running, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(without_long_limits(httpx.get(server.url + "/openapi.json").json())))
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    # That a valid body is accepted is not promised: fields exclude each other in ways that no schema says.
    words = "--phases examples,coverage,fuzzing --max-examples 8 --exclude-checks positive_data_acceptance --no-color"
    repeatable = "--generation-deterministic --no-shrink --request-timeout 30"
    command = [str(program), "run", str(document), "--url", server.url, "--header", f"Authorization: Bearer {KEY}"]
    done = subprocess.run(
        [*command, *words.split(), *repeatable.split()], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert httpx.get(server.url + "/health/ready").status_code == 200
    # Readiness is a 503 while the engine starts; nothing else may fail.
    failed = [line for line in server.log() if line.get("status", 0) >= 500 and line.get("route") != "/health/ready"]
    assert failed == []
