"""Tokens of a prompt over the front-end, as clients and the gate ask for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
from harness import Running

from eval_gate.arms.http import Endpoint, HttpArm
from trace_serve.server.tokenize import MAX_WAITING

HI: dict[str, Any] = {"role": "user", "content": "hi"}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "2"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def test_tokens_of_a_prompt_are_told_as_the_engine_sees_them(shared: Running, client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"model": "scripted", "messages": [HI]}).json()
    assert bytes(answer["tokens"]).decode() == "<user>hi\n<assistant>"
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    client.post("/v1/tokenize", json={"messages": [HI], "tools": [TOOL]})
    assert shared.seen()["seen"][-1]["tools"] == [TOOL]
    for bad, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": [HI]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 20_000}, "prompt"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"messages": [HI, RESULT]}, "messages"),
        ({"messages": [HI], "add_special_tokens": True}, "add_special_tokens"),
    ):
        refused = client.post("/tokenize", json=bad)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.post("/tokenize", json={"prompt": "x", "model": "gpt"}).status_code == 404


async def test_the_gate_asks_both_arms_for_their_tokens_in_this_way(shared: Running) -> None:
    async with HttpArm(Endpoint(shared.url + "/v1", api_key=shared.api_key)) as arm:
        assert arm.model == "scripted"
        asked = {"messages": [HI], "max_tokens": 5, "temperature": 0}
        assert await arm.tokenize(asked) == list(b"<user>hi\n<assistant>")
        assert await arm.tokenize({"prompt": "hi"}) == list(b"hi")


def test_a_flood_of_prompts_is_turned_away_and_the_rest_is_answered(shared: Running, client: httpx.Client) -> None:
    def ask(_: int) -> httpx.Response:
        return client.post("/tokenize", json={"prompt": "hi"}, timeout=60)

    count = MAX_WAITING + 20
    shared.set_health(tokenizer_held=True)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(ask, index) for index in range(count)]
        try:
            refused = next(as_completed(futures, timeout=60)).result()
        finally:
            shared.set_health(tokenizer_held=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert "retry-after" in refused.headers
    statuses = [future.result().status_code for future in futures]
    assert statuses.count(200) >= MAX_WAITING
    assert set(statuses) == {200, 503}
