"""No web page may call the server from a browser, unless its origin is listed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from harness import Running

from trace_serve.errors import ConfigError
from trace_serve.server.cors import parse_origins

CHAT = "/v1/chat/completions"
PAGE = "https://console.example.com"
BODY = {"messages": [{"role": "user", "content": "tokens=1"}]}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def open_to_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("cors"), cors_origins=f"{PAGE}, http://localhost:3000") as running:
        yield running


def cors_headers(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/health/live", "/nowhere"])
def test_by_default_a_preflight_is_refused_and_no_answer_allows_an_origin(client: httpx.Client, path: str) -> None:
    preflight = client.options(path, headers={"origin": PAGE, **PREFLIGHT})
    answer = client.post(path, json=BODY, headers={"origin": PAGE})
    assert preflight.status_code in (404, 405)
    assert cors_headers(preflight) == cors_headers(answer) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_listed_origin_may_call_and_read_our_headers(open_to_one: Running, stream: bool) -> None:
    preflight = httpx.options(open_to_one.url + CHAT, headers={"origin": PAGE, **PREFLIGHT})
    answer = httpx.post(open_to_one.url + CHAT, json={**BODY, "stream": stream}, headers={"origin": PAGE})
    assert (preflight.status_code, answer.status_code) == (200, 200)
    assert preflight.headers["access-control-allow-origin"] == answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in preflight.headers
    exposed = answer.headers["access-control-expose-headers"]
    assert {"x-trace-policy", "x-request-id", "retry-after"} <= set(exposed.split(", "))


@pytest.mark.parametrize(
    "origin", ["https://evil.example", PAGE + ".evil.example", "http://console.example.com", "null"]
)
def test_any_other_origin_is_refused(open_to_one: Running, origin: str) -> None:
    preflight = httpx.options(open_to_one.url + CHAT, headers={"origin": origin, **PREFLIGHT})
    answer = httpx.post(open_to_one.url + CHAT, json=BODY, headers={"origin": origin})
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in answer.headers


def test_origins_are_those_that_a_browser_sends() -> None:
    assert parse_origins("") == ()
    assert parse_origins(" https://a.example ,http://[::1]:8080") == ("https://a.example", "http://[::1]:8080")


@pytest.mark.parametrize(
    "bad",
    [
        "*",
        "https://*.example.com",
        "https://a.example/",
        "https://a.example/path",
        "a.example",
        "null",
        "https://user@a.example",
        "https://a.example:port",
        "https://A.example",
        "file://a",
    ],
)
def test_what_would_match_nothing_or_everything_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin") as caught:
        parse_origins(f"https://good.example,{bad}")
    assert caught.value.field == "cors_origins"
