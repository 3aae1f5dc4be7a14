"""Where the tokens of two arms part, from what each server recorded of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from eval_gate.arms.records import Role, SampleRecord, read_results
from eval_gate.attribute.tokens import PackedTokens, answer_tokens
from eval_gate.compare_files import compare_files
from eval_gate.divergence import first_difference, token_difference, token_divergence
from eval_gate.pairing import Pair
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query
from eval_gate.run import ArmConfig, GateConfig, run_gate
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


def test_packed_tokens_give_the_same_difference_as_the_response() -> None:
    for one, two in (
        (both((1, " a"), (2, " b")), both((1, " a"), (3, " c"))),
        (ids(1, 2), ids(1, 2, 3)),
        (texts("a", "b"), texts("a")),
        (both((1, " a")), texts(" b")),
    ):
        packed = [answer(PackedTokens.of(response)) for response in (one, two)]
        assert token_difference(*packed) == token_difference(answer(one), answer(two)) is not None
    for nothing in (None, {}, "text", {"choices": []}, ids(), ids(1 << 40), ids(-1)):
        assert PackedTokens.of(nothing) is None


def test_recorded_results_with_tokens_show_where_they_part(tmp_path: Path) -> None:
    for name, last in (("a", 7), ("b", 8)):
        lines = [
            {"id": f"q{i}", "passed": True, "text": "x", "response": ids(1, 2, last if i < 3 else 9)} for i in range(10)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = compare_files(tmp_path / "a.jsonl", tmp_path / "b.jsonl", GatePolicy())
    assert verdict.divergence is not None
    assert (verdict.divergence.pairs, verdict.divergence.diverged) == (10, 3)
    assert verdict.divergence.quantiles["0.5"] == 2


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_asks_for_tokens_only_when_it_is_told_to(
    start_server: Callable[[], Any],
    engine_report: Callable[..., dict[str, Any]],
    tmp_path: Path,
    recorded: bool,
    api: Literal["chat", "completions"],
) -> None:
    servers = [start_server(), start_server()]
    for server, mode, token in zip(servers, ("bf16", "fp4"), (5, 6), strict=True):
        server.report = engine_report(mode)
        told = both((4, "a"), (token, "b"))["choices"][0]
        server.answer = lambda prompt, told=told: {
            "choices": [{**told, "message": {"content": "yes"}, "text": "yes", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 2},
        }
    query = {"id": "q", "prompt": "p", "checker": {"type": "exact", "expected": "yes"}}
    (tmp_path / "q.jsonl").write_text(json.dumps(query) + "\n")
    policy = GatePolicy(record_tokens=recorded, api=api)
    config = GateConfig(
        *(ArmConfig(server.url) for server in servers), str(tmp_path / "q.jsonl"), tmp_path / "out", policy
    )
    verdict = run_gate(config).verdict
    asked = {"logprobs", "return_token_ids"} | ({"top_logprobs"} if api == "chat" else set())
    for server in servers:
        (body,) = server.bodies
        assert asked & set(body) == (asked if recorded else set())
    assert verdict.divergence is not None
    assert (verdict.divergence.pairs, verdict.divergence.diverged) == (1, 1)


@pytest.mark.engine
def test_the_engine_records_the_tokens_of_its_answers(fp4_engine: Any, tmp_path: Path) -> None:
    lines = [
        {"id": f"q{i}", "prompt": f"Say {i}", "max_tokens": 4, "checker": {"type": "contains", "expected": "x"}}
        for i in range(3)
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arm = ArmConfig(fp4_engine.url, api_key=fp4_engine.api_key)
    policy = GatePolicy(record_tokens=True, allow_unproven=True)
    verdict = run_gate(GateConfig(arm, arm, str(tmp_path / "q.jsonl"), tmp_path / "out", policy)).verdict
    assert verdict.divergence is not None
    assert (verdict.divergence.unit, verdict.divergence.answered, verdict.divergence.pairs) == ("token ids", 3, 3)
    assert 1 <= verdict.divergence.training_tokens <= 4
    records = [one for one in read_results(tmp_path / "out" / "results.jsonl") if isinstance(one, SampleRecord)]
    assert all(answer_tokens(record).texts is not None for record in records)
