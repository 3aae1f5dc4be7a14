"""Where the tokens of two arms part, from what each server recorded of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from eval_gate.arms.records import Role, SampleRecord
from eval_gate.divergence import first_difference, token_difference, token_divergence
from eval_gate.pairing import Pair
from eval_gate.queries import Query
from eval_gate.verdict import TokenBin, TokenDifference


def answer(response: Any, text: str = "x", role: Role = Role.TRAINING) -> SampleRecord:
    return SampleRecord(key="k", query_id="q", role=role, sample=0, request={}, response=response, text=text)


def ids(*tokens: int) -> dict[str, Any]:
    return {"choices": [{"response_token_ids": list(tokens)}]}


def both(*tokens: tuple[int, str]) -> dict[str, Any]:
    content = [{"token": text, "logprob": -0.5} for _, text in tokens]
    return {"choices": [{"token_ids": [token for token, _ in tokens], "logprobs": {"content": content}}]}


def texts(*tokens: str) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"tokens": list(tokens), "token_logprobs": [-0.5] * len(tokens)}}]}


def pair(training: Any, serving: Any, kind: str = "one") -> Pair:
    query = Query.model_validate(
        {"id": "q", "kind": kind, "prompt": "p", "checker": {"type": "exact", "expected": "x"}}
    )
    return Pair(query, (answer(training),), (answer(serving, role=Role.SERVING),))


def test_the_first_different_token_is_named_by_text_where_there_is_one() -> None:
    one, two = answer(both((1, " a"), (2, " b"))), answer(both((1, " a"), (3, " c"), (4, " d")))
    assert token_difference(one, two) == TokenDifference(index=1, training=" b", serving=" c")
    assert token_difference(answer(ids(1, 2)), answer(ids(1, 3))) == TokenDifference(
        index=1, training="id 2", serving="id 3"
    )


def test_an_answer_that_ends_where_the_other_goes_on_has_no_token_there() -> None:
    assert token_difference(answer(ids(1, 2)), answer(ids(1, 2, 3))) == TokenDifference(
        index=2, training=None, serving="id 3"
    )


def test_an_arm_with_ids_and_one_without_are_compared_by_text() -> None:
    found = token_difference(answer(both((1, " a"), (2, " b"))), answer(texts(" a", " c")))
    assert found == TokenDifference(index=1, training=" b", serving=" c")


@pytest.mark.parametrize(
    ("training", "serving"),
    [
        (ids(1, 2), ids(1, 2)),
        (ids(1, 2), texts("a", "b")),
        (ids(1), {"choices": []}),
        (None, None),
        ({"token_ids": ["1"]}, {"token_ids": [1]}),
        ("error page", ids(1)),
    ],
)
def test_nothing_is_said_of_equal_answers_and_of_tokens_that_were_not_recorded(training: Any, serving: Any) -> None:
    assert token_difference(answer(training), answer(serving)) is None


def test_the_summary_counts_what_was_compared_and_where_it_parts() -> None:
    pairs = [
        *(pair(ids(*range(20)), ids(*range(place), 99), "late") for place in (4, 8, 8, 16)),
        *(pair(ids(5), ids(6)) for _ in range(2)),
        *(pair(ids(1, 2, 3), ids(1, 2, 3)) for _ in range(4)),
        pair(None, None),
    ]
    found = token_divergence(pairs)
    assert found is not None
    assert (found.unit, found.answered, found.pairs, found.diverged) == ("token ids", 11, 10, 6)
    assert found.quantiles == {"0.1": 0, "0.25": 0, "0.5": 4, "0.75": 8, "0.9": 16}
    assert found.bins == tuple(
        TokenBin(first=first, last=last, pairs=count)
        for first, last, count in ((0, 0, 2), (1, 2, 0), (3, 6, 1), (7, 14, 2), (15, 30, 1))
    )
    assert (found.training_tokens, found.serving_tokens) == (9.4, 5.4)
    assert {kind: (one.pairs, one.diverged, one.median) for kind, one in found.kinds.items()} == {
        "late": (4, 4, 8.0),
        "one": (6, 2, 0.0),
    }


def test_answers_that_never_part_have_no_places() -> None:
    found = token_divergence([pair(ids(1), ids(1))])
    assert found is not None
    assert (found.diverged, found.quantiles, found.bins) == (0, {}, ())
    assert token_divergence([pair(None, None)]) is None


@pytest.mark.parametrize(
    ("left", "right", "place"), [("abc", "abd", 2), ("", "a", 0), ("ab", "abc", 2), ("same", "same", 4), ("x", "y", 0)]
)
def test_the_first_difference_of_two_sequences(left: str, right: str, place: int) -> None:
    assert first_difference(left, right) == first_difference(tuple(right), tuple(left)) == place
