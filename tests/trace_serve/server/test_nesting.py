"""Bodies nested too deeply are refused, without recursion and without looking at flat ones."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from trace_serve.server.errors import ApiError
from trace_serve.server.schemas.nesting import MAX_DEPTH, check_depth


def nested(levels: int, kind: type) -> Any:
    value: Any = kind()
    for _ in range(levels - 1):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_the_limit_is_exact(kind: type) -> None:
    # Many shallow siblings, so that counting brackets does not decide.
    for levels, deep in ((MAX_DEPTH - 1, False), (MAX_DEPTH, True)):
        value = {"deep": nested(levels, kind), "flat": [[0]] * 100}
        body = json.dumps(value).encode()
        if deep:
            with pytest.raises(ApiError, match=f"{MAX_DEPTH} levels") as caught:
                check_depth(body, value)
            assert (caught.value.status, caught.value.code) == (400, "nested_too_deep")
        else:
            check_depth(body, value)


def test_brackets_inside_a_text_are_no_nesting() -> None:
    value = "[" * 1000
    check_depth(json.dumps(value).encode(), value)
    check_depth(json.dumps([value, [1] * 10]).encode(), [value, [1] * 10])


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [100, 1000, 100_000])
def test_absurd_nesting_is_a_400_and_the_next_request_works(client: httpx.Client, opening: str, levels: int) -> None:
    closing = "]" if opening == "[" else "}"
    text = '{"messages":' + opening * levels + "1" + closing * levels + "}"
    began = time.monotonic()
    answer = client.post("/v1/chat/completions", content=text.encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("nested_too_deep", "invalid_json")
    assert time.monotonic() - began < 10
    good = {"messages": [{"role": "user", "content": "tokens=1"}]}
    assert client.post("/v1/chat/completions", json=good).status_code == 200
