"""Every renderer says what the verdict says, and lets nothing from a model into the page as markup."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser

from rich.console import Console

from eval_gate.report.html import render_html
from eval_gate.report.markdown import render_markdown
from eval_gate.report.terminal import print_verdict
from eval_gate.verdict import Verdict

HOSTILE = "</pre><script src=//evil.example>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m [bold]|`"
VOID = {"meta", "line", "rect", "circle"}


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
    assert not parser.seen & {"script", "img", "link", "iframe", "object"}
    assert not parser.attributes & {"src", "href", "onerror", "onload"}
    assert "http:" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert "<mark>" in page


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
