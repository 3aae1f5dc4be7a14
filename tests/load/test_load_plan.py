"""The options of a load test and of an SLO file are checked before anything is sent; a fault names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_serve.errors import ConfigError
from trace_serve.load.exchange import Exchange, Outcome
from trace_serve.load.plan import make_plan
from trace_serve.load.slo import load_slo


@pytest.mark.parametrize(("given", "seconds"), [("30s", 30), ("1500ms", 1.5), ("2m", 120), ("1h", 3600), ("7", 7)])
def test_durations_have_units(given: str, seconds: float) -> None:
    assert make_plan({"duration": given}).duration == seconds


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"duration": "soon"}, "duration"),
        ({"duration": "0s"}, "duration"),
        ({"arrivals": "poisson"}, "rate"),
        ({"arrivals": "constant", "rate": "-1"}, "rate"),
        ({"arrivals": "constant", "rate": "nan"}, "rate"),
        ({"arrivals": "trace"}, "arrivals"),
        ({"arrivals": "sometimes"}, "arrivals"),
        ({"workload": "mooncake"}, "trace"),
        ({"max_in_flight": "0"}, "max_in_flight"),
        ({"disconnect_share": "0.7", "slow_share": "0.7"}, "disconnect_share"),
        ({"swap_url": "http://127.0.0.1:1"}, "swap_url"),
        ({"hints": "maybe"}, "hints"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_option_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(given)
    assert caught.value.field == field
    assert f"--{field.replace('_', '-')}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plans_of_equal_options_have_equal_digests() -> None:
    assert make_plan({"seed": 1}).digest == make_plan({"seed": "1"}).digest != make_plan({"seed": 2}).digest


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_slo_file_may_be_toml_or_json(tmp_path: Path) -> None:
    toml = write(tmp_path / "slo.toml", "[request]\nttft_ms = 500\n[run]\nmin_goodput = 0.9\nttft_ms = {p99 = 800}\n")
    given = {"request": {"ttft_ms": 500}, "run": {"min_goodput": 0.9, "ttft_ms": {"p99": 800}}}
    slo = load_slo(toml)
    assert slo == load_slo(write(tmp_path / "slo.json", json.dumps(given)))
    assert slo.percentile_limits() == [("ttft", "p99", 800.0)]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[run]\nttft_ms = {p100 = 5}", "run.ttft_ms"),
        ("[run]\nttft_ms = {p99 = -5}", "run.ttft_ms.p99"),
        ("[run]\nmin_goodput = 99", "run.min_goodput"),
        ("[request]\nttft = 5", "request.ttft"),
        ('[request]\nttft_ms = "5"', "request.ttft_ms"),
        ('measured_from = "later"', "measured_from"),
    ],
)
def test_a_bad_field_of_an_slo_file_is_named(tmp_path: Path, text: str, field: str) -> None:
    path = write(tmp_path / "slo.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_slo(path)
    assert str(caught.value).startswith(f"{path}: {field}")


@pytest.mark.parametrize("text", ["[run", "\x00"])
def test_an_unreadable_slo_file_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        load_slo(write(tmp_path / "slo.toml", text))
    with pytest.raises(ConfigError, match="--slo"):
        load_slo(tmp_path / "absent.toml")


def exchange(**fields: Any) -> Exchange:
    given = {"sent_s": 1.2, "first_s": 1.5, "end_s": 2.5, "completion_tokens": 11, **fields}
    return Exchange(index=0, scheduled_s=1.0, outcome=fields.pop("outcome", Outcome.OK), **given)


def test_latencies_follow_their_definitions() -> None:
    one = exchange()
    assert one.latency("ttft_scheduled") == pytest.approx(0.5)
    assert one.latency("ttft_sent") == pytest.approx(0.3)
    assert one.latency("e2e_scheduled") == pytest.approx(1.5)
    assert one.latency("e2e_sent") == pytest.approx(1.3)
    assert one.latency("lag") == pytest.approx(0.2)
    assert one.tpot_s == pytest.approx((2.5 - 1.5) / 10)
    assert exchange(completion_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft_ms = 501", True),
        ("ttft_ms = 499", False),
        ("tpot_ms = 101\ne2e_ms = 1501", True),
        ("tpot_ms = 99", False),
        ("e2e_ms = 1499", False),
    ],
)
def test_a_good_request_is_within_every_limit_from_its_scheduled_send(tmp_path: Path, limits: str, good: bool) -> None:
    slo = load_slo(write(tmp_path / "slo.toml", f"[request]\n{limits}"))
    assert slo.is_good(exchange()) is good


def test_latencies_may_be_judged_from_the_actual_send(tmp_path: Path) -> None:
    slo = load_slo(write(tmp_path / "slo.toml", 'measured_from = "sent"\n[request]\nttft_ms = 301'))
    assert slo.is_good(exchange())
    assert not slo.is_good(Exchange(index=0, scheduled_s=1.0, outcome=Outcome.FAILED))
