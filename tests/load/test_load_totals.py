"""What processes measured is merged without loss, and the report says what may be concluded from it."""

from __future__ import annotations

import csv
import io
import json
import random
from typing import Any

import pytest
from rich.console import Console

from trace_serve.load.exchange import Client, Exchange, Labels, Outcome
from trace_serve.load.histograms import Latencies
from trace_serve.load.html import render_html
from trace_serve.load.plan import make_plan
from trace_serve.load.render import render, requests_csv, summary_csv
from trace_serve.load.report import LoadReport, Verdict, conclude
from trace_serve.load.slo import RunLimits, Slo
from trace_serve.load.totals import Totals

OPEN = make_plan({"arrivals": "constant", "rate": 10, "warmup": 1, "duration": 9})


def exchange(index: int, **fields: Any) -> Exchange:
    due = index / 10
    given = {
        "outcome": Outcome.OK,
        "sent_s": due + 0.001,
        "first_s": due + 0.2 + index / 1000,
        "end_s": due + 1.2 + index / 1000,
        "prompt_tokens": 5,
        "completion_tokens": 11,
        "gaps_s": (0.1,) * 10,
        "labels": Labels("p@1", "sha256:aa", "p@1", ""),
        **fields,
    }
    return Exchange(index=index, scheduled_s=due, **given)


def totals(exchanges: list[Exchange], slo: Slo | None = None, keep: int = 1000) -> Totals:
    made = Totals(OPEN.warmup, slo or Slo(), keep)
    for each in exchanges:
        made.add(each)
    return made


def report(of: Totals, slo: Slo | None = None, **fields: Any) -> LoadReport:
    given: dict[str, Any] = {
        "host": "http://server",
        "began": "2026-01-01T00:00:00+00:00",
        "processes": 1,
        "silent_workers": 0,
        "swaps": [],
        "notes": [],
        "faults": [],
        **fields,
    }
    return conclude(OPEN, slo or Slo(), of, **given)


def test_a_histogram_holds_values_to_a_tenth_of_a_percent() -> None:
    latencies = Latencies()
    values = sorted(random.Random(0).uniform(0.01, 20) for _ in range(5000))
    for value in values:
        latencies.add("tpot", value)
    for percent in (50, 90, 99):
        exact = values[int(len(values) * percent / 100) - 1]
        assert latencies.quantile("tpot", percent) == pytest.approx(exact, rel=0.0015)
    assert latencies.mean("tpot") == pytest.approx(sum(values) / len(values), rel=0.0015)


def test_totals_of_several_processes_merge_to_those_of_one() -> None:
    exchanges = [exchange(index) for index in range(100)]
    exchanges[50] = exchange(50, outcome=Outcome.FAILED, reason="status 500: broken")
    whole, merged = totals(exchanges), totals([])
    for part in (exchanges[0::2], exchanges[1::2]):
        merged.merge(json.loads(json.dumps(totals(part).to_wire())))
    one, two = report(whole), report(merged)
    assert one.model_dump(exclude={"histograms"}) == two.model_dump(exclude={"histograms"})
    assert requests_csv(whole.rows) == requests_csv(merged.rows)
    assert one.offered == 90
    assert one.warmup_requests == 10
    assert one.outcomes == {"ok": 89, "failed": 1}
    assert one.reasons == {"status 500: broken": 1}


def test_only_whole_answers_of_plain_clients_have_latencies() -> None:
    some = [
        exchange(20),
        exchange(21, client=Client.SLOW, end_s=500.0),
        exchange(22, client=Client.LEAVES, outcome=Outcome.LEFT),
        exchange(23, outcome=Outcome.FAILED, reason="x"),
    ]
    made = totals(some)
    assert made.latencies.count("e2e_sent") == 1
    assert made.latencies.count("itl") == 10
    assert made.latencies.count("lag") == 4
    assert any("not in the latencies" in note for note in report(made).notes)


def test_dropped_arrivals_count_against_goodput_and_are_pointed_out() -> None:
    made = totals([exchange(index) for index in range(10, 20)])
    for index in range(20, 30):
        made.add(Exchange(index, index / 10, Outcome.DROPPED, reason="dropped"))
    concluded = report(made, Slo(run=RunLimits(max_dropped_share=1.0, min_goodput=0.6)))
    assert concluded.goodput == 0.5
    assert concluded.verdict is Verdict.MISSED
    assert any("dropped" in note for note in concluded.notes)


def test_a_failed_request_misses_the_default_slo() -> None:
    assert report(totals([exchange(20)])).exit_code == 0
    assert report(totals([exchange(20), exchange(21, outcome=Outcome.REFUSED, reason="full")])).exit_code == 1


def test_a_percentile_limit_is_compared_with_the_histogram() -> None:
    made = totals([exchange(index) for index in range(10, 100)])
    met = Slo(run=RunLimits(ttft_ms={"p99": 310.0}, tpot_ms={"mean": 101.0}))
    missed = Slo(run=RunLimits(ttft_ms={"p50": 240.0}))
    assert report(made, met).exit_code == 0
    concluded = report(made, missed)
    assert concluded.exit_code == 1
    assert [check.name for check in concluded.checks if not check.met] == ["TTFT p50 ms"]


@pytest.mark.parametrize(
    ("exchanges", "fields", "reason"),
    [
        ([exchange(20, outcome=Outcome.FAILED, reason="x")], {}, "0 requests were answered"),
        ([exchange(20, sent_s=2.5)], {}, "load generator was too slow"),
        ([exchange(20)], {"silent_workers": 1}, "1 load processes did not report"),
        ([exchange(20)], {"faults": ["other options"]}, "other options"),
    ],
)
def test_a_run_that_proves_nothing_is_invalid(exchanges: list[Exchange], fields: dict[str, Any], reason: str) -> None:
    concluded = report(totals(exchanges), **fields)
    assert concluded.exit_code == 2
    assert reason in " ".join(concluded.invalid)


def test_a_run_that_saw_several_versions_says_so() -> None:
    second = Labels("p@2", "sha256:bb", "p@2", "sha256:verdict")
    concluded = report(totals([exchange(20), exchange(21), exchange(22, labels=second)]))
    assert [(each.digest, each.requests) for each in concluded.versions] == [("sha256:aa", 2), ("sha256:bb", 1)]
    assert any("more than one policy digest answered: sha256:aa, sha256:bb" in note for note in concluded.notes)
    assert not any("more than one" in note for note in report(totals([exchange(20)])).notes)


def test_requests_above_the_number_kept_are_counted() -> None:
    made = totals([exchange(index) for index in range(10, 20)], keep=4)
    assert len(made.rows) == 4
    assert report(made).requests_not_kept == 6
    assert report(made).offered == 10


def test_csv_files_have_a_line_a_metric_and_a_line_a_request() -> None:
    made = totals([exchange(20), exchange(21, outcome=Outcome.FAILED, reason='status 500: "quoted", broken')])
    rows = list(csv.DictReader(io.StringIO(requests_csv(made.rows))))
    assert [row["outcome"] for row in rows] == ["ok", "failed"]
    assert rows[1]["reason"] == 'status 500: "quoted", broken'
    assert rows[0]["policy_digest"] == "sha256:aa"
    metrics = {row["metric"]: row for row in csv.DictReader(io.StringIO(summary_csv(report(made))))}
    assert float(metrics["ttft_sent"]["p50_ms"]) == pytest.approx(219, rel=0.002)


def test_the_page_loads_nothing_and_escapes_what_a_server_said() -> None:
    bad = exchange(20, outcome=Outcome.FAILED, reason="<script>alert(1)</script>")
    page = render_html(report(totals([bad, exchange(21)])))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "src=" not in page
    assert "href=" not in page
    assert "<svg" in page


def test_the_terminal_shows_figures_checks_and_verdict() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(report(totals([exchange(20)]))))
    text = console.export_text()
    assert "TTFT from schedule" in text
    assert "SLO met" in text
    assert "sha256:aa" in text
