"""The terminal and HTML forms of a finding: what they must say, and that no text of a model becomes markup."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless import browser, needs_chromium
from rich.console import Console

from eval_gate.attribute.cost import CostModel
from eval_gate.attribute.drift import token_drift
from eval_gate.attribute.html import render_html
from eval_gate.attribute.result import Attribution, Remedy, Step
from eval_gate.attribute.run import StepProgress
from eval_gate.attribute.terminal import live_steps, print_attribution
from eval_gate.attribute.variants import Layout, describe, layer_text
from eval_gate.flips import flipped_queries
from eval_gate.policy import GatePolicy
from eval_gate.verdict import TokenDifference
from trace_serve.policy.dims import ModelDims
from trace_serve.recipe import Recipe

LAYERS = tuple(range(16))
LAYOUT = Layout(LAYERS, LAYERS, 64)
COST = CostModel(ModelDims("known", 16, 64, 128, 4, LAYERS, 2, 64, 10_000, 0), LAYOUT, 1000)
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def finding(known: Callable[..., Any]) -> Attribution:
    """A search whose remedy is W4A16, in a model directory with a hostile name."""
    model = known((lambda r: r.experts == "w4a4", 60))
    found = model.search(Recipe(), 14)
    steps = []
    for trial in model.trials:
        reading = model.readings[trial.recipe.recipe_id]
        steps.append(
            Step(
                stage=trial.stage,
                label=trial.label,
                described=describe(trial.recipe, LAYOUT),
                recipe_id=trial.recipe.recipe_id,
                recipe=trial.recipe.to_dict(),
                outcome=reading.outcome,
                reason=reading.reason,
                comparison=reading.comparison,
                cost=COST(trial.recipe),
                serving=reading.serving,
                refusals=2,
                drift=token_drift(reading.pairs, routing=(16, 2)),
                recorded=False,
                seconds=1.0,
            )
        )
    candidate, reading = found.remedy
    remedy = Remedy(
        label=candidate.label,
        described=describe(candidate.recipe, LAYOUT),
        recipe_id=candidate.recipe.recipe_id,
        recipe=candidate.recipe.to_dict(),
        comparison=reading.comparison,
        cost=candidate.cost,
        extra_weights_bytes=0,
        extra_kv_bytes_per_token=0,
    )
    flipped = flipped_queries(found.whole.pairs)
    return Attribution(
        model=HOSTILE,
        model_digest="sha256:" + "a" * 64,
        described=describe(Recipe(), LAYOUT),
        recipe=Recipe().to_dict(),
        recipe_id=Recipe().recipe_id,
        policy=GatePolicy(),
        query_source=HOSTILE,
        query_digest="sha256:" + "c" * 64,
        queries=400,
        budget=15,
        bf16=found.whole.training,
        bf16_refusals=0,
        bf16_cost=COST(Recipe(experts="bf16", kv="bf16")),
        conclusions=(f"said {HOSTILE}",),
        steps=tuple(steps),
        parts=(),
        activations=None,
        layers=(),
        remedy=remedy,
        left_out=(HOSTILE,),
        stopped=None,
        flipped=tuple(flip.model_copy(update={"serving_answer": HOSTILE}) for flip in flipped),
        created=datetime.now(UTC),
        tools={},
    )


def test_the_page_holds_every_recipe_and_no_markup_of_a_model(finding: Attribution) -> None:
    page = render_html(finding)
    HTMLParser().feed(page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("http") == page.count("http-equiv")
    for step in finding.steps:
        assert step.described in page
    assert "A recipe that passes here" in page
    assert "not recorded" in page
    assert f"Flipped under the recipe as it is ({len(finding.flipped)})" in page
    assert "NaN" not in page


@needs_chromium
async def test_the_page_renders_in_a_browser_without_complaint(finding: Attribution, tmp_path: Path) -> None:
    token = TokenDifference(index=3, training=" 4", serving=HOSTILE)
    flipped = tuple(flip.model_copy(update={"first_different_token": token}) for flip in finding.flipped)
    report = tmp_path / "report.html"
    report.write_text(render_html(finding.model_copy(update={"flipped": flipped})), encoding="utf-8")
    async with browser(tmp_path / "profile") as page:
        await page.open(report)
        assert HOSTILE in await page.evaluate("document.title + document.body.innerText")
        assert await page.evaluate("document.querySelectorAll('script').length") == 0
        points = await page.evaluate("document.querySelectorAll('svg circle.point').length")
        assert points == len(finding.steps)
        assert await page.evaluate("document.querySelector('svg').getBoundingClientRect().height > 50")
        shown = "document.querySelectorAll('details').length"
        assert await page.evaluate(shown) == min(200, len(finding.flipped))
        await page.evaluate("document.querySelector('details summary').click()")
        assert await page.evaluate("document.querySelector('details').open")
        assert f"serving “{HOSTILE}”" in await page.evaluate("document.querySelector('details .place').innerText")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.complaints == []


def test_the_terminal_shows_gap_and_outcome_of_each_recipe(finding: Attribution) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_attribution(finding, console)
    text = console.file.getvalue()
    for number, step in enumerate(finding.steps, start=1):
        row = next(line for line in text.splitlines() if f" {number}  {step.described}  " in line)
        assert step.outcome in row
        assert f"{100 * step.comparison.gap:+.1f}" in row
    assert "not tried: " + HOSTILE in text
    assert "not recorded" in text


def test_json_gives_the_same_finding_back(finding: Attribution) -> None:
    assert Attribution.model_validate_json(finding.model_dump_json()) == finding


def test_progress_off_a_terminal_is_a_line_when_an_engine_begins_and_one_when_its_gap_is_known(known: Any) -> None:
    model = known()
    model.search(Recipe(), 1)
    reading = next(iter(model.readings.values()))
    console = Console(file=io.StringIO())
    with live_steps(console) as on_progress:
        for done in range(3):
            on_progress(StepProgress(2, 9, "W4A4 experts", done, 400))
        on_progress(StepProgress(2, 9, "W4A4 experts", 400, 400, reading))
    assert console.file.getvalue().splitlines() == ["2/9 W4A4 experts", "2/9 W4A4 experts: gap +0.0 [-1.2, +1.2] PASS"]


def test_a_recipe_is_described_by_what_is_in_fp4() -> None:
    assert describe(Recipe(), LAYOUT) == "W4A4 experts, NVFP4 KV"
    assert describe(Recipe(kv="bf16", expert_rotation=16, expert_layers=(0, 1, 2, 7)), LAYOUT) == (
        "W4A4 experts rotated 16 layers 0-2, 7"
    )
    assert describe(Recipe(experts="bf16", k_rotation=64), LAYOUT) == "NVFP4 KV K rotated 64"
    assert layer_text(()) == ""
