"""Connections that never become requests are closed, and an open server on loopback answers to its own machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from harness import Running

from trace_serve.server.hosts import is_loopback, name_of
from trace_serve.server.protocol import MAX_HEAD_BYTES

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys that gives a client half a second for its headers."""
    with Running(tmp_path_factory.mktemp("impatient"), head_timeout_s=0.5, allowed_hosts="Known.example") as running:
        yield running


def connect(running: Running) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("start", [b"", b"G", b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "])
def test_a_client_that_does_not_finish_its_headers_is_closed(impatient: Running, start: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(start)
        assert read_to_end(connection) == b""


def test_a_second_request_on_a_connection_has_the_same_time(impatient: Running) -> None:
    whole = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with connect(impatient) as connection:
        connection.sendall(whole)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(whole[:20])
        assert b"HTTP/1.1" not in read_to_end(connection)


def test_a_client_that_has_sent_its_headers_may_wait_for_its_answer(impatient: Running) -> None:
    body = {"messages": [{"role": "user", "content": "tokens=4 delay=0.4"}], "stream": True}
    answer = httpx.post(impatient.url + CHAT, json=body, timeout=20)
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("line", [b"x-more: 0123456789\r\n" * 50, b"a" * 1000])
def test_headers_without_an_end_are_refused(shared: Running, line: bytes) -> None:
    with connect(shared) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nx-first: ")
        sent = 0
        try:
            while sent < 4 * MAX_HEAD_BYTES:
                connection.sendall(line)
                sent += len(line)
                time.sleep(0.001)
        except OSError:
            pass
        assert sent < 4 * MAX_HEAD_BYTES, "it was read on and on"
    assert httpx.get(shared.url + "/health/live").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(impatient: Running, host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/")):
        answer = httpx.request(method, impatient.url + path, headers={"host": host}, json={})
        assert answer.status_code == 421, path
        assert answer.json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:99", "127.0.0.1:1", "127.1.2.3", "[::1]:80", "known.example:80"]
)
def test_this_machine_and_listed_names_are_answered(impatient: Running, host: str) -> None:
    assert httpx.get(impatient.url + "/v1/models", headers={"host": host}).status_code == 200


def test_a_server_with_keys_answers_to_any_name(shared: Running) -> None:
    headers = {"host": "api.example", "authorization": f"Bearer {shared.api_key}"}
    assert httpx.get(shared.url + "/v1/models", headers=headers).status_code == 200


def test_hosts_are_read_as_browsers_write_them() -> None:
    assert [name_of(text) for text in ("[::1]:80", "a.example:1", "A", "")] == ["::1", "a.example", "a", ""]
    assert [is_loopback(text) for text in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "a.example")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
