"""Bad input of the command is one line with exit code 3, before anything is started or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.attribute.rounding import decoded
from eval_gate.attribute.subject import AttributeConfig, Subject, check
from eval_gate.policy import GatePolicy
from trace_serve.errors import EngineError
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--budget", "1"), "--budget 1: expected 2 engines or more"),
        (("--recipe", "bf16"), "--recipe: it quantizes nothing"),
        (("--recipe", "gb200"), "--recipe: its global scales are not powers of two"),
        (("--recipe", "no-such"), "'no-such': not a preset"),
        (("--queries", "no-such"), "no-such: no such file, and no suite of that name"),
        (("--margin", "2"), "--margin"),
        (("--kv-tokens", "0"), "--kv-tokens 0: expected 1 or more"),
        (("--model", "/nonexistent"), "--model /nonexistent: no config.json there"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    engine_model: Path, tmp_path: Path, call: Call, extra: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    code, _, errors = call("--model", engine_model, "--out", out, "--recipe", "default", *extra)
    assert (code, errors.count("\n")) == (3, 1)
    assert message in errors
    assert not out.exists()


def test_a_model_without_a_recipe_needs_one(engine_model: Path, fp4_policy: Policy, tmp_path: Path, call: Call) -> None:
    code, _, errors = call("--model", engine_model, "--out", tmp_path / "out")
    assert code == 3
    assert "--recipe: the model is no policy" in errors
    assert check(AttributeConfig(fp4_policy.path, ("support-dev",), tmp_path)).recipe == fp4_policy.recipe


def test_a_recipe_that_does_not_fit_the_model_is_refused(engine_model: Path, tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "wide.json"
    recipe.write_text(json.dumps(Recipe(expert_rotation=64).to_dict()))
    code, _, errors = call("--model", engine_model, "--out", tmp_path / "out", "--recipe", recipe)
    assert code == 3
    assert "intermediate_size 96 is not a multiple of 64" in errors


def test_hints_are_asked_only_of_a_recipe_that_rounds_while_serving(
    engine_model: Path, tmp_path: Path, call: Call
) -> None:
    recipe = tmp_path / "weights.json"
    recipe.write_text(json.dumps(Recipe(experts="w4a16", kv="bf16").to_dict()))
    flags = ("--model", engine_model, "--out", tmp_path / "out", "--recipe", recipe)
    code, _, errors = call(*flags, "--rounding", "4")
    assert (code, errors.count("\n")) == (3, 1)
    assert "--rounding: the recipe rounds nothing while serving" in errors


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "none came"),
        ({"metadata": {}}, "none came"),
        (
            {"metadata": {"trace_hints": [{"status": "failed", "reason": "larger than an answer"}]}},
            "larger than an answer",
        ),
    ],
)
def test_an_answer_without_hints_ends_the_scoring_with_the_reason(answer: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=f"query 'q1': no hints with the answer: {reason}"):
        decoded("q1", answer)


def test_queries_with_a_judge_and_an_unwritable_place_are_refused(
    engine_model: Path, tmp_path: Path, call: Call
) -> None:
    queries = tmp_path / "q.jsonl"
    checker = {
        "type": "judged",
        "checker": {"type": "contains", "expected": "a"},
        "judge": {"type": "judge", "rubric": "Is it right?"},
    }
    queries.write_text(json.dumps({"id": "q", "prompt": "p", "checker": checker}) + "\n")
    flags = ("--model", engine_model, "--recipe", "default")
    code, _, errors = call(*flags, "--out", tmp_path / "out", "--queries", queries)
    assert code == 3
    assert "has a judge" in errors
    code, _, errors = call(*flags, "--out", queries)
    assert (code, errors.count("\n")) == (3, 1)
    assert f"--out {queries}: cannot be written" in errors


def test_the_model_says_what_can_be_in_fp4_and_what_it_costs(engine_model: Path, tmp_path: Path) -> None:
    def subject(**policy: object) -> Subject:
        return check(AttributeConfig(engine_model, ("support-dev",), tmp_path, Recipe(), GatePolicy(**policy)))

    found = subject(max_queries=40, looks=4)
    assert found.layout.expert_layers == found.layout.kv_layers == (0, 1, 2, 3)
    assert found.config.policy.looks == 1
    assert "with 40 independent queries no recipe can pass a margin of 5 points, at least 52" in found.too_few
    assert subject(max_queries=60).too_few is None
    assert subject(max_queries=40, rule="point").too_few is None
    assert "not a multiple of 64" in found.refuses(Recipe(expert_rotation=64))
    assert found.refuses(Recipe(expert_rotation=16, k_rotation=16)) is None
    cost, plain = found.cost(Recipe()), found.cost(Recipe(experts="bf16", kv="bf16"))
    expert_values = 4 * 4 * 3 * 64 * 96
    assert plain.weights_bytes - cost.weights_bytes == expert_values * (16 - 4.5) / 8
    assert (plain.kv_bytes_per_token, cost.kv_bytes_per_token) == (4 * 2 * 2 * 16 * 2, 4 * 2 * 2 * 16 * 4.5 / 8)
    half = found.cost(Recipe(expert_layers=(0, 1)))
    assert half.weights_bytes == (plain.weights_bytes + cost.weights_bytes) / 2
