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
from markdown_it import MarkdownIt
from rich.console import Console

from eval_gate.report.html import render_html
from eval_gate.report.junit import render_junit
from eval_gate.report.markdown import render_markdown
from eval_gate.report.terminal import print_verdict
from eval_gate.report.text import first_token
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


def test_a_narrow_terminal_keeps_the_names_of_the_kinds(make_verdict: Callable[..., Verdict]) -> None:
    buffer = io.StringIO()
    print_verdict(make_verdict(match=100, lost=20), Console(file=buffer, width=60))
    row = next(line.split() for line in buffer.getvalue().splitlines() if line.startswith(" sums"))
    assert row[:3] == ["sums", "120", "+16.7"]
    assert max(map(len, buffer.getvalue().splitlines())) <= 60


def test_hostile_answers_reach_the_terminal_as_text_not_as_control(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=20, answer=HOSTILE)
    assert "\x1b" not in printed(verdict)
    assert "[bold]" in printed(verdict)


def test_hostile_answers_make_no_markup_links_or_mentions_in_markdown(make_verdict: Callable[..., Verdict]) -> None:
    answer = (
        HOSTILE
        + " **b** [l](http://evil.example) http://evil.example www.evil.example @all &lt; $x$ :smile:\n\n# h\n- l"
    )
    verdict = make_verdict(match=100, lost=20, answer=answer)
    text = render_markdown(verdict)
    assert "\x1b" not in text
    # GitHub makes links and mentions of these where they stand unescaped.
    assert not re.search(r"http:|https:|www\.|(?<!\\)@", text)
    parsed = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(text)
    tokens = [token for block in parsed for token in (block, *(block.children or ()))]
    tags = {token.content for token in tokens if token.type == "html_inline"}
    assert tags == {"<b>", "</b>"}
    blocks = [token.content for token in tokens if token.type == "html_block"]
    assert [block.split(">")[0] for block in blocks] == ["<details", "</details"]
    assert not {token.type for token in tokens} & {"link_open", "image", "code_block", "fence", "hr"}
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h2"]
    cells = [token for token in tokens if token.type == "td_open"]
    assert len(cells) == 8 * 2 + 6 * 2 + 4 * 20 + 2 * 5


def test_the_token_drift_is_in_every_report(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=90, lost=30, answer="no way", tokens=True)
    assert verdict.divergence is not None
    said = "tokens part in 30 of 120 pairs of answers (25.0%)"
    markdown = render_markdown(verdict).replace("\\", "")
    for text in (printed(verdict), render_html(verdict), markdown, render_junit(verdict)):
        assert said in text
        assert "tokens an answer: training 1.0, serving 1.2" in text
    assert "first different token: 0, training “yes”, serving “no”" in render_html(verdict)
    assert "0: “yes” / “no”" in markdown
    assert "from token 0" in printed(verdict)


def test_without_recorded_tokens_the_page_says_so_and_the_rest_is_silent(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=90, lost=30)
    assert "not recorded" in render_html(verdict)
    for text in (printed(verdict), render_markdown(verdict), render_junit(verdict)):
        assert "tokens part" not in text


def test_a_sampled_run_says_that_answers_part_by_chance_too(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(lost=3, tokens=True, temperature=0.7)
    for text in (printed(verdict), render_html(verdict), render_markdown(verdict)):
        assert "temperature 0.7: answers part by chance too" in text


def test_long_answers_are_shown_around_their_first_difference(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=20)
    flip = verdict.flipped[0]
    head = "the same words again and again " * 40
    changes = {"training_answer": head + "YES then", "serving_answer": head + "NO then", "first_difference": len(head)}
    long = verdict.model_copy(update={"flipped": (flip.model_copy(update=changes),)})
    for text in (printed(long), render_markdown(long)):
        assert "YES" in text
        assert "NO" in text
        assert text.count("again and again") <= 4


def test_thousands_of_flips_stay_readable_and_are_counted(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=10, lost=2200, prompt="long " * 2000, answer="no " * 1500)
    assert verdict.flipped_left_out > 0
    assert len(verdict.flipped) + verdict.flipped_left_out == 2200
    assert len(verdict.model_dump_json()) < 20 << 20
    page = render_html(verdict)
    assert "Flipped queries (2200)" in page
    assert page.count("<details") + verdict.flipped_left_out + max(0, len(verdict.flipped) - 2000) == 2200
    assert f"and {verdict.flipped_left_out} more in results.jsonl alone" in page
    assert "first 20 of 2200" in render_markdown(verdict)
    assert "and 2195 more in the report" in printed(verdict)
    assert len(render_markdown(verdict)) < 100_000


def test_a_long_expected_answer_is_short_in_its_summary_and_whole_below(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=20)
    flip = verdict.flipped[0].model_copy(update={"expected": "e" * 1000 + "<b>"})
    page = render_html(verdict.model_copy(update={"flipped": (flip,)}))
    summary = page[page.index("<summary>") : page.index("</summary>")]
    assert "e" * 199 + "…" in summary
    assert "e" * 201 not in summary
    assert f"<pre>{'e' * 1000}&lt;b&gt;</pre>" in page


def test_of_many_kinds_short_reports_show_the_worst_and_the_page_all(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict()
    kinds = {f"kind {i:03}": verdict.overall.model_copy(update={"gap": i / 1000}) for i in range(200)}
    many = verdict.model_copy(update={"kinds": kinds})
    for text in (printed(many), render_markdown(many)):
        assert "kind 199" in text
        assert "kind 169" not in text
        assert "170 more in" in " ".join(text.split())
    page = render_html(many)
    assert all(name in page for name in kinds)
    assert page[page.index("<svg") : page.index("</svg>")].count("<circle") == 31


def test_answers_of_other_lengths_are_said_in_every_report(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict()
    lengths = {
        role: getattr(verdict, role).model_copy(update={"mean_completion_tokens": tokens})
        for role, tokens in (("training", 10.0), ("serving", 30.0))
    }
    for text in (printed(long := verdict.model_copy(update=lengths)), render_html(long), render_junit(long)):
        assert "answers of other lengths: 10.0 tokens from the training arm, 30.0 from" in " ".join(text.split())
    close = lengths["training"].model_copy(update={"mean_completion_tokens": 14.0})
    assert verdict.model_copy(update={**lengths, "serving": close}).labels == ()


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
    assert [case.get("name") for case in group.findall("testcase")] == ["gate", "suite default"]
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
        "testsuite": (
            {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
            {"properties", "testcase"},
        ),
        "properties": (set(), {"property"}),
        "property": ({"name", "value"}, set()),
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


def test_junit_names_what_was_judged_and_what_flipped(make_verdict: Callable[..., Verdict]) -> None:
    verdict = make_verdict(match=100, lost=60)
    (suite,) = JUnitXml.fromstring(render_junit(verdict).encode())
    facts = {one.name: one.value for one in suite.properties()}
    assert facts["digest.results"] == verdict.subjects.results
    assert facts["recipe_id"] == verdict.recipe_id
    _, default = suite
    assert "lost: q100, q101, " in default.result[0].text
    assert default.result[0].text.endswith(", q149 and 10 more")


def test_junit_is_read_by_another_program(make_verdict: Callable[..., Verdict]) -> None:
    (suite,) = JUnitXml.fromstring(render_junit(make_verdict(match=100, lost=60)).encode())
    assert (suite.tests, suite.failures, suite.errors) == (2, 2, 0)
    gate, default = suite
    assert "the loss is larger than the margin" in gate.result[0].message
    assert default.result[0].type == "BLOCK"
