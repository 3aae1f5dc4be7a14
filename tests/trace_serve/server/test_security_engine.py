"""The real engine behind a front-end: on loopback only, behind its own key, which nobody else can read."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from trace_serve.engine import spec

if TYPE_CHECKING:
    from conftest import FrontEnd

pytestmark = pytest.mark.engine

ADMIN_ROUTES = (
    "/abort_request",
    "/continue_generation",
    "/flush_cache",
    "/generate",
    "/get_model_info",
    "/get_server_info",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/pause_generation",
    "/release_memory_occupation",
    "/server_info",
    "/set_internal_state",
    "/start_profile",
    "/trace/heartbeat",
    "/trace/refit/begin",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/v1/loads",
    "/v1/responses",
)


def processes(front_end: FrontEnd) -> list[psutil.Process]:
    """The engine's process and all below it."""
    engine = psutil.Process(front_end.engine_pid())
    return [engine, *engine.children(recursive=True)]


def engine_key(front_end: FrontEnd) -> str:
    return str(psutil.Process(front_end.engine_pid()).environ()[spec.KEY_ENV])


def listening(front_end: FrontEnd) -> Iterator[tuple[str, int]]:
    for process in processes(front_end):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                yield connection.laddr.ip, connection.laddr.port


def engine_urls(front_end: FrontEnd) -> list[str]:
    """The engine's HTTP port, found by what answers there."""
    found = []
    for _, port in listening(front_end):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx.TransportError:
            continue
        found.append(f"http://127.0.0.1:{port}")
    return found


def test_every_port_of_the_engine_is_on_loopback(front_end: FrontEnd) -> None:
    found = list(listening(front_end))
    assert found
    assert [address for address, _ in found if not ipaddress.ip_address(address).is_loopback] == []


def test_the_engine_itself_refuses_whoever_lacks_its_key(front_end: FrontEnd) -> None:
    urls = engine_urls(front_end)
    assert len(urls) == 1
    with httpx.Client(base_url=urls[0], headers={"authorization": f"Bearer {front_end.api_key}"}, timeout=10) as client:
        for path in ADMIN_ROUTES:
            for answer in (client.get(path), client.post(path, json={})):
                assert answer.status_code in (401, 404, 405), f"{path}: {answer.status_code} {answer.text[:200]}"


def test_no_route_of_the_engine_is_relayed(front_end: FrontEnd) -> None:
    with httpx.Client(
        base_url=front_end.url, headers={"authorization": f"Bearer {front_end.api_key}"}, timeout=10
    ) as client:
        for path in ADMIN_ROUTES:
            for answer in (client.get(path), client.post(path, json={"model_path": "/etc", "rid": "x"})):
                assert answer.status_code in (404, 405), f"{path}: {answer.status_code}"


def test_keys_are_in_no_command_line_and_no_log(front_end: FrontEnd) -> None:
    secrets = [engine_key(front_end), str(front_end.api_key)]
    server = psutil.Process(front_end.pid)
    texts = {f"argv of {process.pid}": " ".join(process.cmdline()) for process in [server, *processes(front_end)]}
    headers = {"authorization": f"Bearer {front_end.api_key}"}
    with httpx.Client(base_url=front_end.url, headers=headers, timeout=60) as client:
        body = {"prompt": "x", "max_tokens": 1}
        texts["answer"] = client.post("/v1/completions", json=body).text
        texts["report"] = client.get("/trace/report").text
        texts["metrics"] = client.get("/metrics").text
        texts["refusal"] = client.post("/v1/completions", json={**body, "n": 0}).text
    assert json.loads(texts["report"])["ready"]
    for path in Path(str(front_end.log_path)).parent.rglob("*.log"):
        texts[path.name] = path.read_text("utf-8", "replace")
    assert {"server.log", "engine.log"} <= set(texts)
    assert [(where, secret[:4]) for where, text in texts.items() for secret in secrets if secret in text] == []


def test_the_engine_is_not_told_the_keys_of_clients(front_end: FrontEnd) -> None:
    for process in processes(front_end):
        assert str(front_end.api_key) not in " ".join(process.environ().values())
