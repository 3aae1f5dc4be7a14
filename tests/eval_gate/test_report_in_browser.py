"""The HTML report in a real headless Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from headless import browser, needs_chromium

from eval_gate.report.html import render_html
from eval_gate.verdict import Verdict

PICK = """(name, value) => {
  const control = document.querySelector(`#flips ${name}`);
  control.value = value;
  control.dispatchEvent(new Event("input"));
}"""

pytestmark = needs_chromium


async def test_the_page_renders_filters_and_searches_without_complaint(
    make_verdict: Callable[..., Verdict], tmp_path: Path
) -> None:
    verdict = make_verdict(match=180, lost=20, answer="no </script><script>boom()</script>", looks=4)
    flips = [
        flip.model_copy(
            update={"suite": f"s{i % 2}", "direction": "gained" if i < 5 else "lost", "prompt": f"question {i} of many"}
        )
        for i, flip in enumerate(verdict.flipped)
    ]
    verdict = verdict.model_copy(update={"flipped": tuple(flips)})
    report = tmp_path / "report.html"
    report.write_text(render_html(verdict), encoding="utf-8")
    shown = "[...document.querySelectorAll('#flips details')].filter((item) => item.offsetParent !== null).length"
    async with browser(tmp_path / "profile") as page:
        await page.open(report)
        assert await page.evaluate("document.querySelector('.badge').innerText") == verdict.outcome
        assert await page.evaluate("document.querySelectorAll('#looks svg circle').length") == len(verdict.looks)
        assert await page.evaluate("document.querySelector('svg').getBoundingClientRect().height > 50")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert await page.evaluate(shown) == len(flips)
        await page.evaluate(f"({PICK})('select[name=direction]', 'gained')")
        assert await page.evaluate(shown) == 5
        await page.evaluate(f"({PICK})('select[name=suite]', 's0')")
        assert await page.evaluate(shown) == 3
        await page.evaluate(f"({PICK})('input', 'QUESTION 2 of')")
        assert await page.evaluate(shown) == 1
        assert await page.evaluate("document.querySelector('.count').innerText") == f"1 of {len(flips)} shown"
        for control in ("select[name=direction]", "select[name=suite]", "input"):
            await page.evaluate(f"({PICK})('{control}', '')")
        assert await page.evaluate(shown) == len(flips)
        await page.evaluate("document.querySelector('#flips details').open = true")
        assert "boom()" in await page.evaluate("document.querySelector('#flips details').innerText")
        assert await page.evaluate("document.querySelectorAll('script').length") == 1
        assert page.complaints == []


@pytest.mark.parametrize("width", [1280, 420])
async def test_drift_and_flips_of_hostile_answers_fit_the_page_and_run_nothing(
    make_verdict: Callable[..., Verdict], tmp_path: Path, width: int
) -> None:
    answer = "<img src=http://127.0.0.1:9/x onerror=boom()> \x1b[31m " + "unbroken" * 400
    verdict = make_verdict(match=150, lost=50, answer=answer, prompt="p" * 3000, tokens=True)
    report = tmp_path / "report.html"
    report.write_text(render_html(verdict), encoding="utf-8")
    async with browser(tmp_path / "profile") as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        await page.open(report)
        assert "tokens part in 50 of 200 pairs" in await page.evaluate("document.querySelector('#drift').innerText")
        heights = "[...document.querySelectorAll('#drift rect.count')].map((bar) => bar.getBoundingClientRect().height)"
        assert max(await page.evaluate(heights)) > 20
        await page.evaluate("document.querySelectorAll('#flips details').forEach((item) => { item.open = true; })")
        first = "document.querySelector('#flips details .place').innerText"
        assert await page.evaluate(first) == "first different token: 0, training “yes”, serving “<img”"
        marks = "document.querySelector('#flips details .side > div:nth-child(2) mark.first').innerText"
        assert await page.evaluate(marks) == "<img"
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.complaints == []


async def test_two_thousand_flips_are_searched_at_once(make_verdict: Callable[..., Verdict], tmp_path: Path) -> None:
    verdict = make_verdict(match=10, lost=2500)
    report = tmp_path / "report.html"
    report.write_text(render_html(verdict), encoding="utf-8")
    async with browser(tmp_path / "profile") as page:
        await page.open(report)
        await page.evaluate(f"({PICK})('input', 'q1234')")
        assert await page.evaluate("document.querySelector('.count').innerText") == "1 of 2000 shown"
        assert "and 500 more in verdict.json" in await page.evaluate("document.querySelector('#flips').innerText")
        assert page.complaints == []
