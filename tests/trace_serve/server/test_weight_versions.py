"""Answers name the weights that made them, and a request that names weights gets no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import Running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, httpx.Client]]:
    """A front-end of its own, whose engine's weights change."""
    with (
        Running(tmp_path_factory.mktemp("trained")) as running,
        httpx.Client(base_url=running.url, timeout=20) as client,
    ):
        yield running, client


def body(script: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_name_their_weights(trained: tuple[Running, httpx.Client], stream: bool) -> None:
    running, client = trained
    running.set_health(weight_version="step-7")
    answer = client.post(CHAT, json=body("tokens=1", stream=stream))
    assert answer.headers["x-trace-weight-version"] == "step-7"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_other_weights_is_refused_before_it_reaches_the_engine(
    trained: tuple[Running, httpx.Client], stream: bool
) -> None:
    running, client = trained
    running.set_health(weight_version="step-7")
    seen = len(running.seen()["seen"])
    refused = client.post(CHAT, json=body("tokens=1", weight_version="step-6", stream=stream))
    assert refused.status_code == 409
    assert refused.json()["error"]["param"] == "weight_version"
    assert len(running.seen()["seen"]) == seen
    taken = client.post(CHAT, json=body("tokens=1", weight_version="step-7", stream=stream))
    assert taken.status_code == 200
    assert running.seen()["seen"][-1]["custom_params"] == {"max_version_diff": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_weights_that_change_while_a_request_waits_refuse_it_too(
    trained: tuple[Running, httpx.Client], stream: bool
) -> None:
    running, client = trained
    running.set_health(weight_version="step-7")
    refused = client.post(CHAT, json=body("tokens=1 moves=step-8", weight_version="step-7", stream=stream))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "weight_version_not_loaded")
    assert refused.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("script", "stream"), [("abort=1", False), ("abort_after=0", True)])
def test_an_answer_that_ends_because_weights_changed_is_refused_like_one_of_other_weights(
    trained: tuple[Running, httpx.Client], script: str, stream: bool
) -> None:
    running, client = trained
    running.set_health(weight_version="step-7")
    refused = client.post(CHAT, json=body(f"tokens=2 moves=step-8 {script}", weight_version="step-7", stream=stream))
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "weight_version")
    unpinned = client.post(CHAT, json=body(f"tokens=2 {script}", stream=stream))
    assert (unpinned.status_code, unpinned.json()["error"]["code"]) == (502, "generation_failed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_label_that_no_header_can_carry_is_left_to_the_answer(
    trained: tuple[Running, httpx.Client], stream: bool
) -> None:
    running, client = trained
    running.set_health(weight_version="Schritt-№7")
    wanted = {"weight_version": "Schritt-№7", "return_rollout": True, "stream": stream}
    answer = client.post(CHAT, json=body("tokens=1", **wanted))
    assert answer.status_code == 200
    assert "x-trace-weight-version" not in answer.headers
    time.sleep(0.5)  # a heartbeat tells the label to every other route
    assert client.get("/v1/models").status_code == 200
    rollout = client.get(f"/v1/rollouts/{answer.headers['x-trace-rollout']}")
    assert rollout.json()["weight_version"] == "Schritt-№7"
