"""Every renderer says what the verdict says, and lets nothing from a model into the page as markup."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from junitparser import JUnitXml
from rich.console import Console

from eval_gate.report.html import render_html
from eval_gate.report.html_flips import first_token
from eval_gate.report.junit import render_junit
from eval_gate.report.markdown import render_markdown
from eval_gate.report.terminal import print_verdict
from eval_gate.verdict import Verdict

HOSTILE = "</pre><script src=//evil.example>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m [bold]|`"
VOID = {"meta", "line", "rect", "circle", "input"}


class Balance(HTMLParser):
    """Collects tags, and fails on one that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def printed(verdict: Verdict) -> str:
    buffer = io.StringIO()
    print_verdict(verdict, Console(file=buffer, width=160, color_system=None, force_terminal=False))
    return buffer.getvalue()


def test_all_renderers_give_outcome_gap_and_interval(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=20)
    assert verdict.overall.lower is not None
    assert verdict.overall.upper is not None
    interval = f"[{100 * verdict.overall.lower:+.1f}, {100 * verdict.overall.upper:+.1f}]"
    for text in (printed(verdict), render_html(verdict), render_markdown(verdict).replace("\\", "")):
        assert "BLOCK" in text
        assert "+16.7" in text
        assert interval in text
        assert verdict.reasons[0][:40] in text


def test_the_page_is_well_formed_self_contained_and_escaped(make_verdict: Callable[..., Verdict]) -> None:
    page = render_html(make_verdict(match=100, lost=20, answer=HOSTILE))
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not parser.seen & {"img", "link", "iframe", "object"}
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not parser.attributes & {"src", "href", "onerror", "onload"}
    assert "http:" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert '<mark class="first">' in page


def test_hostile_answers_reach_the_terminal_as_text_not_as_control(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=20, answer=HOSTILE)
    assert "\x1b" not in printed(verdict)
    assert "[bold]" in printed(verdict)


def test_the_plot_has_a_row_a_kind_and_stays_inside(make_verdict: Callable[..., Verdict]) -> None:
    page = render_html(make_verdict(match=3, lost=60))
    plot = page[page.index("<svg") : page.index("</svg>")]
    assert plot.count("<circle") == 2
    places = [float(x) for x in re.findall(r'(?:x|x1|x2|cx)="(-?[0-9.]+)"', plot)]
    assert min(places) >= 0
    assert max(places) <= 720


def test_labels_and_missing_numbers_are_shown(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(rule="point")
    for text in (printed(verdict), render_html(verdict), render_markdown(verdict)):
        assert "plain rule" in text
    empty = make_verdict(match=0, lost=1)
    unscored = empty.model_copy(update={"overall": empty.overall.model_copy(update={"gap": None, "upper": None})})
    for text in (printed(unscored), render_html(unscored), render_markdown(unscored)):
        assert "not scored" in text


def test_looks_and_suites_are_in_every_report(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=200, lost=9, looks=4)
    assert len(verdict.looks) == 4
    for text in (printed(verdict), render_html(verdict), render_markdown(verdict)):
        assert "4 of 4" in text
        for look in verdict.looks:
            found = look.suites[0].comparison
            assert f"{100 * (found.gap or 0):+.1f}" in text
            assert f"{look.suites[0].level:.4f}" in text


def test_a_relative_margin_is_shown_in_points_and_as_a_share(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=200, lost=2, margin_kind="relative", margin=0.1)
    for text in (printed(verdict), render_markdown(verdict)):
        assert "10 (10% of the training pass rate)" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "place", "parts"),
    [
        ("one two three", 5, ("one ", "two", " three")),
        ("one two", 0, ("", "one", " two")),
        ("one", 3, ("", "one", "")),
        ("one ", 4, ("one ", "", "")),
        ("", 0, ("", "", "")),
    ],
)
def test_the_first_differing_token_is_cut_at_white_space(text: str, place: int, parts: tuple[str, str, str]) -> None:
    assert first_token(text, place) == parts


@pytest.mark.parametrize(
    ("build", "failures", "errors"),
    [({"match": 200, "lost": 0}, 0, 0), ({"match": 100, "lost": 60}, 2, 0), ({"match": 20, "lost": 0}, 0, 2)],
)
def test_junit_counts_block_as_failure_and_inconclusive_as_error(
    make_verdict: Callable[..., Verdict], build: dict[str, Any], failures: int, errors: int
) -> None:
    root = ET.fromstring(render_junit(make_verdict(**build)))
    (group,) = root
    assert [case.get("name") for case in group] == ["gate", "suite default"]
    for element in (root, group):
        assert [element.get(name) for name in ("tests", "failures", "errors")] == ["2", str(failures), str(errors)]
    assert len(group.findall("testcase/failure")) == failures
    assert len(group.findall("testcase/error")) == errors


def test_junit_is_what_the_jenkins_schema_allows(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=60)
    hostile = verdict.model_copy(update={"policy_name": "a\x00\x1b<&\ud800", "reasons": (HOSTILE + "\x00",)})
    root = ET.fromstring(render_junit(hostile))
    allowed = {
        "testsuites": ({"name", "tests", "failures", "errors", "time"}, {"testsuite"}),
        "testsuite": ({"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}, {"testcase"}),
        "testcase": ({"name", "classname", "time"}, {"failure", "error", "system-out"}),
        "failure": ({"message", "type"}, set()),
        "error": ({"message", "type"}, set()),
        "system-out": (set(), set()),
    }
    for element in root.iter():
        attributes, children = allowed[element.tag]
        assert set(element.keys()) <= attributes
        assert {child.tag for child in element} <= children
    assert root[0].get("name") == "a\ufffd\ufffd<&\ufffd"


def test_junit_is_read_by_another_program(make_verdict: Callable[..., Verdict]) -> None:
    (suite,) = JUnitXml.fromstring(render_junit(make_verdict(match=100, lost=60)).encode())
    assert (suite.tests, suite.failures, suite.errors) == (2, 2, 0)
    gate, default = suite
    assert "the loss is larger than the margin" in gate.result[0].message
    assert default.result[0].type == "BLOCK"
