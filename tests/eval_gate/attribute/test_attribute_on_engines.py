"""The command on real engines: BF16, the recipe, its KV cache alone, and the recipe with hints; four starts in all."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval_gate.attribute.result import Attribution
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.engine

Call = Callable[..., tuple[int, str, str]]


def test_the_command_tries_recipes_until_its_budget_ends_and_goes_on_from_there(
    engine_model: Path, tmp_path: Path, call: Call
) -> None:
    queries, out = tmp_path / "queries.jsonl", tmp_path / "out"
    rows: list[dict[str, Any]] = [
        {"id": f"q{i}", "prompt": f"Say {i}.", "max_tokens": 8, "checker": {"type": "regex", "pattern": "[a-m]"}}
        for i in range(12)
    ]
    queries.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", engine_model, "--recipe", "default", "--queries", queries, "--out", out, "--routed-experts"]
    flags += ["--baseline-floor", "0"]

    code, text, errors = call(*flags, "--budget", "2")
    assert code == 0, errors
    assert "where the gap comes from" in text
    assert "--budget left recipes untried" in " ".join(text.split())
    assert "2/2 W4A4 experts, NVFP4 KV: gap" in errors
    assert len(list(out.glob("answers/*.jsonl"))) == 2

    code, text, errors = call(*flags, "--budget", "3", "--rounding", "4", "--json")
    assert code == 0, errors
    found = Attribution.model_validate_json(text)
    assert found == Attribution.model_validate_json((out / "attribution.json").read_text())
    assert [step.recorded for step in found.steps] == [True, False]
    assert [Recipe.from_dict(step.recipe) for step in found.steps] == [Recipe(), Recipe(experts="bf16")]
    assert found.stopped == "engines"
    assert found.bf16.samples == 12
    for step in found.steps:
        assert step.drift.pairs == step.comparison.scored == 12
        assert step.drift.unit == "token ids"
        assert step.drift.positions > 0
        assert step.drift.mean_abs_logprob is not None
        assert step.drift.mean_abs_logprob > 0
        assert step.drift.kl_k3 is not None
        assert step.drift.kl_k3 >= 0
        for share in (step.drift.top1, step.drift.router):
            assert share is not None
            assert 0 < share <= 1
    assert found.rounding is not None
    assert found.rounding.sentence == found.conclusions[-1]
    assert (found.rounding.answers, found.rounding.tokens > 8) == (4, True)
    assert 0 < found.rounding.hints < 0.5 * min(found.rounding.nearest, found.rounding.bf16)
    # Twelve queries cannot pass a margin of 5 points, and the report says what would be needed.
    assert any("at least 52 are needed" in reason for reason in found.left_out) or found.steps[-1].outcome == "BLOCK"

    # Everything is recorded now, so the same command ends alike without an engine.
    code, _, errors = call(*flags, "--budget", "3")
    assert code == 0, errors
    assert json.loads((out / "attribution.json").read_text())["steps"][1]["recorded"] is True
    page = (out / "attribution.html").read_text()
    HTMLParser().feed(page)
    assert "Recipes tried on the same queries" in page
    assert "NVFP4 KV" in page
