"""What is read from recorded answers of each kind of server, and how two answers are compared token by token."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from eval_gate.arms.records import Role, SampleRecord
from eval_gate.attribute.conduct import count_refusals, is_refusal
from eval_gate.attribute.drift import TokenDrift, token_drift
from eval_gate.attribute.tokens import answer_tokens
from eval_gate.pairing import pair_up
from eval_gate.queries import Query

QUERY = Query.model_validate({"id": "q", "prompt": "p", "checker": {"type": "exact", "expected": "x"}})


def chat(
    ids: list[int] | None, logprobs: list[float], tops: list[str] | None = None, routed: Any = None
) -> dict[str, Any]:
    names = [f"t{i}" for i in (ids or range(len(logprobs)))]
    content = [
        {"token": name, "logprob": value, "top_logprobs": [{"token": top, "logprob": value}]}
        for name, value, top in zip(names, logprobs, tops or names, strict=True)
    ]
    choice: dict[str, Any] = {"logprobs": {"content": content}}
    if ids is not None:
        choice["response_token_ids"] = ids
    body: dict[str, Any] = {"choices": [choice]}
    if routed is not None:
        packed = np.asarray(routed, dtype="<i4").tobytes()
        body["sglext"] = {"routed_experts": base64.b64encode(packed).decode()}
    return body


def record(role: Role, response: Any, text: str = "a b c", prompt_tokens: int = 2) -> SampleRecord:
    return SampleRecord(
        key="k",
        query_id="q",
        role=role,
        sample=0,
        request={},
        response=response,
        text=text,
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        passed=True,
    )


def drift(one: Any, two: Any, text_two: str = "a b c") -> TokenDrift:
    records = [record(Role.TRAINING, one), record(Role.SERVING, two, text_two)]
    return token_drift(pair_up([QUERY], records, 1), routing=(2, 2))


def test_log_probabilities_compare_up_to_the_first_different_token_only() -> None:
    found = drift(chat([5, 6, 7, 8], [-0.1, -0.2, -0.3, -9.0]), chat([5, 6, 9, 8], [-0.2, -0.1, -7.0, -0.1]))
    assert (found.pairs, found.identical, found.unit, found.first_difference, found.positions) == (
        1,
        0,
        "token ids",
        2,
        2,
    )
    assert found.mean_abs_logprob == pytest.approx(0.1)
    assert found.kl_k1 == pytest.approx(0.0)
    ratios = (-0.1, 0.1)
    assert found.kl_k3 == pytest.approx(sum(math.exp(r) - 1 - r for r in ratios) / 2)
    # Two tokens agree; the third has the same context and differs; after it nothing can be compared.
    assert found.top1 == pytest.approx(2 / 3)


def test_equal_answers_have_no_first_difference() -> None:
    body = chat([5, 6], [-0.5, -0.5])
    found = drift(body, body)
    assert (found.identical, found.first_difference, found.mean_abs_logprob, found.top1) == (1, None, 0.0, 1.0)


def test_what_was_not_recorded_is_none() -> None:
    found = drift({}, None, "a x c d")
    assert (found.unit, found.first_difference) == ("words", 1)
    assert found.positions == 0
    assert {found.mean_abs_logprob, found.kl_k1, found.kl_k3, found.top1, found.router} == {None}
    empty = token_drift(pair_up([QUERY], [], 1), routing=(2, 2))
    assert (empty.pairs, empty.unit) == (0, None)


def test_arms_that_record_different_things_are_compared_by_what_both_have() -> None:
    found = drift(chat([5, 6], [-0.5, -0.5]), {"choices": [{}]}, "a b x")
    assert (found.unit, found.first_difference, found.positions) == ("words", 2, 0)


def test_each_form_of_answer_is_read() -> None:
    completions = {
        "choices": [
            {
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [-1, -2.0],
                    "top_logprobs": [{"a": -1}, {"c": -0.5, "b": -2.0}],
                }
            }
        ]
    }
    found = answer_tokens(record(Role.TRAINING, completions))
    assert (found.unit, found.tokens, found.top) == ("tokens", ("a", "b"), ("a", "c"))
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-1.0, -2.0]
    assert answer_tokens(record(Role.TRAINING, {"token_ids": [3, 4]})).tokens == (3, 4)
    # A log-probability that is missing for one token leaves none, rather than shifted ones.
    completions["choices"][0]["logprobs"]["token_logprobs"] = [None, -2.0]
    assert answer_tokens(record(Role.TRAINING, completions)).logprobs is None
    for odd in ({"choices": "no"}, {"choices": [3]}, [], {"sglext": {"routed_experts": "***"}}):
        assert answer_tokens(record(Role.TRAINING, odd)).unit == "words"


def test_routers_agree_by_sets_over_tokens_with_the_same_context() -> None:
    # Rows: two prompt tokens, then the generated ones but the last; two layers of two experts.
    one = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[9, 9], [9, 9]]]
    two = [[[1, 0], [2, 3]], [[0, 1], [3, 4]], [[0, 1], [2, 3]], [[7, 7], [7, 7]]]
    found = drift(chat([5, 6, 7], [-1.0] * 3, routed=one), chat([5, 8, 7], [-1.0] * 3, routed=two))
    # The first two tokens of prompt and one generated token are shared: 12 experts, one differs.
    assert found.router == pytest.approx(11 / 12)
    assert drift(chat([5], [-1.0], routed=[1, 2, 3]), chat([5], [-1.0], routed=[1, 2, 3])).router is None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request.", True),
        ("As an AI, I have no opinion.", True),
        ("Unfortunately I am unable to answer.", True),
        ("Paris.", False),
        ("The answer is: I can not be certain, but 4.", False),
        ("Sorry sight: the sky.", False),
    ],
)
def test_refusals_are_counted_by_how_an_answer_opens(text: str, refused: bool) -> None:
    assert is_refusal(text) is refused
    assert count_refusals([record(Role.SERVING, {}, text), None]) == int(refused)
