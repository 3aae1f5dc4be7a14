"""Keys of a file, their scopes and their limits, over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import Running

from trace_serve.server.keys.file import write_keys
from trace_serve.server.keys.key import KeyLimits, Scope, new_entry

CHAT = "/v1/chat/completions"
ROLLOUT = "/v1/rollouts/trace-" + "0" * 32 + "/hints"
SCOPES: dict[str, list[Scope]] = {
    "sampler": ["generate"],
    "watcher": ["metrics", "report"],
    "trainer": ["generate", "hints", "report"],
}
KEYS = {name: f"{name}-key-0123456789" for name in (*SCOPES, "slow", "small")}


def save(running: Running) -> None:
    never: dict[str, Any] = {"expires": None}
    entries = [
        new_entry(name, KEYS[name], scopes=scopes, limits=KeyLimits(), **never) for name, scopes in SCOPES.items()
    ]
    entries += [
        new_entry("slow", KEYS["slow"], scopes=["generate"], limits=KeyLimits(requests_per_minute=3), **never),
        new_entry("small", KEYS["small"], scopes=["generate"], limits=KeyLimits(tokens_per_minute=100), **never),
    ]
    write_keys(running.directory / "keys.json", entries)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("keyed")
    running = Running(directory, key_file=directory / "keys.json", metrics_need_key=True, max_in_flight=2)
    save(running)
    with running:
        yield running


def ask(
    running: Running, name: str | None, path: str = CHAT, *, script: str = "tokens=2", **fields: Any
) -> httpx.Response:
    headers = {} if name is None else {"authorization": f"Bearer {KEYS.get(name, name)}"}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": script}], **fields}
        return httpx.post(running.url + path, json=body, headers=headers, timeout=30)
    return httpx.get(running.url + path, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("sampler", CHAT, 200),
        ("sampler", ROLLOUT, 403),
        ("sampler", "/trace/report", 403),
        ("sampler", "/metrics", 403),
        ("sampler", "/v1/models", 200),
        ("watcher", CHAT, 403),
        ("watcher", "/metrics", 200),
        ("watcher", "/trace/report", 200),
        ("trainer", ROLLOUT, 404),
        ("trainer", "/metrics", 403),
        (None, CHAT, 401),
        (None, "/metrics", 401),
        (None, "/v1/models", 401),
        (None, "/health/ready", 200),
        ("nobody", CHAT, 401),
    ],
)
def test_a_key_opens_what_its_scopes_say(keyed: Running, name: str | None, path: str, status: int) -> None:
    answer = ask(keyed, name, path)
    assert answer.status_code == status, answer.text
    if status in (401, 403):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert ("www-authenticate" in answer.headers) == (status == 401)


def test_requests_over_a_keys_limit_are_429_with_headers_and_others_go_on(keyed: Running) -> None:
    answers = [ask(keyed, "slow") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 60
    free = ask(keyed, "sampler")
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


def test_tokens_are_charged_as_the_engine_counted_them(keyed: Running) -> None:
    assert ask(keyed, "small", max_tokens=100).json()["error"]["code"] == "request_exceeds_limit"
    first = ask(keyed, "small", max_tokens=60)
    assert first.status_code == 200
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 40
    second = ask(keyed, "small", max_tokens=60)
    assert second.status_code == 200, "the first used 9 tokens of those that it reserved"
    # A stream without a usage chunk is charged what it reserved.
    assert ask(keyed, "small", max_tokens=60, stream=True).status_code == 200
    refused = ask(keyed, "small", max_tokens=60)
    assert refused.status_code == 429
    assert "tokens" in refused.json()["error"]["message"]


def test_a_flood_of_one_key_does_not_starve_another(keyed: Running) -> None:
    done: list[str] = []

    def run(name: str) -> None:
        assert ask(keyed, name, script="tokens=4 delay=0.05").status_code == 200
        done.append(name)

    flood = [threading.Thread(target=run, args=("trainer",)) for _ in range(30)]
    for thread in flood:
        thread.start()
    deadline = time.monotonic() + 20
    while queued(keyed) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run("sampler")
    assert done.count("trainer") < 25, "it had to wait for the flood"
    for thread in flood:
        thread.join(60)
    assert done.count("trainer") == 30


def test_a_revoked_key_is_refused_and_a_new_one_taken_without_a_restart(keyed: Running) -> None:
    assert ask(keyed, "trainer").status_code == 200
    kept = new_entry("fresh", "fresh-key-0123456789", expires=None, scopes=["generate"], limits=KeyLimits())
    write_keys(keyed.directory / "keys.json", [kept])
    try:
        deadline = time.monotonic() + 20
        while ask(keyed, "trainer").status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert ask(keyed, "fresh-key-0123456789").status_code == 200
    finally:
        save(keyed)
    deadline = time.monotonic() + 20
    while ask(keyed, "trainer").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def queued(running: Running) -> float:
    text = ask(running, "watcher", "/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith("trace_serve_queued_requests ")).split()[1])
