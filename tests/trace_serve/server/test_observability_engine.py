"""What the real engine tells about itself, on the front-end's page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from exposition import families, page, sample_names, value
from test_monitoring import read_by_both

if TYPE_CHECKING:
    from conftest import FrontEnd

CHAT = "/v1/chat/completions"
POLICY = "tiny@1"

pytestmark = pytest.mark.engine


@pytest.fixture
def client(front_end: FrontEnd) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {front_end.api_key}"}
    with httpx.Client(base_url=front_end.url, headers=headers, timeout=120) as client:
        yield client


def settled(url: str, name: str, at_least: float, **labels: str) -> float:
    """The value once it is that large; the engine's own counters follow a request by a moment."""
    deadline = time.monotonic() + 60
    while True:
        found = value(page(url), name, **labels)
        if found is not None and found >= at_least:
            return found
        assert time.monotonic() < deadline, f"{name} {labels}: {found}, expected {at_least} or more"
        time.sleep(0.2)


def ask(client: httpx.Client, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True, **fields}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_every_engine_metric_that_dashboard_and_alerts_read_is_there(front_end: FrontEnd, client: httpx.Client) -> None:
    for _ in range(2):
        ask(client, stream=True, messages=[{"role": "user", "content": "the same words, found in the cache again"}])
    settled(front_end.url, "sglang:cached_tokens_total", 1, policy=POLICY)
    wanted = {name for name in read_by_both() if name.startswith("sglang:")}
    assert len(wanted) >= 8
    assert wanted - sample_names(page(front_end.url)) == set()


def test_the_engines_metrics_are_passed_on_with_its_policy(front_end: FrontEnd, client: httpx.Client) -> None:
    ask(client)
    settled(front_end.url, "sglang:generation_tokens_total", 4, policy=POLICY)
    text = page(front_end.url)
    theirs = [family for name, family in families(text).items() if name.startswith("sglang:")]
    assert len(theirs) > 50
    assert all(family.documentation.strip() for family in theirs)
    assert {sample.labels["policy"] for family in theirs for sample in family.samples} == {POLICY}
    assert value(text, "trace_serve_engine_metrics_up", policy=POLICY) == 1.0


def test_hints_are_counted_with_their_bytes(front_end: FrontEnd, client: httpx.Client) -> None:
    served = value(page(front_end.url), "trace_serve_hint_served_bytes_total") or 0.0
    rollout = ask(client, trace_hints=True).headers["x-trace-rollout"]
    hints = client.get(f"/v1/rollouts/{rollout}/hints")
    assert hints.status_code == 200
    settled(front_end.url, "trace_serve_hint_files_total", 1, policy=POLICY, result="written")
    settled(front_end.url, "trace_serve_hint_written_bytes_total", len(hints.content), policy=POLICY)
    settled(front_end.url, "trace_serve_hint_served_bytes_total", served + len(hints.content))


def test_the_engines_shared_counters_are_in_its_own_directory(front_end: FrontEnd, client: httpx.Client) -> None:
    ask(client)
    environment = Path(f"/proc/{front_end.engine_pid()}/environ").read_bytes().decode().split("\0")
    (shared,) = [each.split("=", 1)[1] for each in environment if each.startswith("PROMETHEUS_MULTIPROC_DIR=")]
    assert Path(shared).parent.name.startswith("trace-serve-engine-")
    assert list(Path(shared).glob("*.db"))
