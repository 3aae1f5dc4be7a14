"""The search for the highest rate, on servers whose limit is known."""

from __future__ import annotations

import pytest
from test_load_totals import exchange, report, totals

from trace_serve.errors import ConfigError
from trace_serve.load.exchange import Outcome
from trace_serve.load.render_many import search_html, step_line
from trace_serve.load.report import LoadReport
from trace_serve.load.search import RESOLUTION, SearchResult, parse_range, search

MET = report(totals([exchange(20)]))
MISSED = report(totals([exchange(20), exchange(21, outcome=Outcome.FAILED, reason="x")]))
INVALID = report(totals([exchange(20, sent_s=9.0)]))


def searched(limit: float, *, low: float = 1.0, high: float = 64.0, broken_above: float = 1e9) -> SearchResult:
    def run(rate: float) -> LoadReport:
        return INVALID if rate > broken_above else MET if rate <= limit else MISSED

    return search(low, high, run, lambda step: None)


@pytest.mark.parametrize("limit", [1.0, 2.9, 17.3, 63.0])
def test_the_border_is_found_to_within_its_resolution(limit: float) -> None:
    result = searched(limit)
    assert result.highest is not None
    assert result.highest <= limit < result.highest * RESOLUTION
    assert result.bounded
    assert result.exit_code == 0
    assert len(result.steps) < 16


def test_a_range_that_the_server_sustains_is_not_called_its_limit() -> None:
    result = searched(1000.0)
    assert result.highest == 64.0
    assert not result.bounded
    assert "the server may sustain more" in search_html(result)


def test_a_server_that_misses_the_lowest_rate_is_asked_once() -> None:
    result = searched(0.5)
    assert result.highest is None
    assert result.exit_code == 1
    assert len(result.steps) == 1
    assert step_line(result.steps[0]) == "1 requests/s offered: SLO missed (error share)"


def test_an_invalid_step_ends_the_search() -> None:
    result = searched(1000.0, broken_above=10.0)
    assert result.highest == 8.0
    assert result.exit_code == 2
    assert not result.bounded


@pytest.mark.parametrize("given", ["5", "5:1", "0:4", "a:b", "1:inf", "1:2:3"])
def test_a_bad_range_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--search"):
        parse_range(given)
