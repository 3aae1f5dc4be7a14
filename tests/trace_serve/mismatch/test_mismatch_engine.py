"""One measurement of a tiny policy: rollouts on the real engine, every variant, and the three reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import engine_model
import pytest
import torch
from rich.console import Console

from trace_serve.mismatch import page, report
from trace_serve.mismatch.run import Measurement, Options, Row, measure
from trace_serve.mismatch.subject import open_subject
from trace_serve.policy import Policy

pytestmark = pytest.mark.engine
OPTIONS = Options(prompts=3, tokens=24, top=40, mid=True, gradients=1, probe=True)


@pytest.fixture(scope="module")
def measured(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    prompts = [engine_model.token_ids(seed, 16) for seed in range(3)]
    log = tmp_path_factory.mktemp("mismatch") / "engine.log"
    threads = torch.get_num_threads()
    try:
        return measure(open_subject(fp4_policy.path), prompts, OPTIONS, log_path=log)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found(measured: Measurement) -> dict[str, Row]:
    return {row.variant.key: row for row in (*measured.rows, *measured.probes)}


def test_hints_in_every_layer_bring_the_trainer_to_the_rollout(found: dict[str, Row]) -> None:
    assert {row.distance.tokens for row in found.values()} == {72}
    trace, nearest = found["trace"], found["qat"]
    assert trace.distance.abs_delta < 0.2 * nearest.distance.abs_delta
    assert trace.distance.k3 < 0.1 * nearest.distance.k3
    assert trace.distance.kl < 0.1 * nearest.distance.kl
    assert trace.distance.top1 >= nearest.distance.top1
    assert trace.distance.abs_delta < found["trace_deeper_half"].distance.abs_delta
    assert trace.distance.abs_delta < found["bf16"].distance.abs_delta
    assert min(trace.router) > 0.95
    # With upstream layers aligned few codes differ; without hints errors grow from layer to layer.
    for site in ("experts_in", "k", "v"):
        assert trace.sites[site].total.bits < nearest.sites[site].total.bits
        assert trace.sites[site].total.scales < nearest.sites[site].total.scales
    assert found["bf16"].sites == {}


def test_a_second_pass_brings_the_rollout_to_a_trainer_with_bf16_activations(found: dict[str, Row]) -> None:
    assert found["quads_qarl"].distance.kl < found["bf16"].distance.kl
    assert found["quads"].router
    assert found["quads"].gradient == ()


def test_gradients_are_compared_layer_by_layer(measured: Measurement, found: dict[str, Row]) -> None:
    layers = measured.subject.dims.layers
    assert found["replay"].gradient == pytest.approx([1] * layers, abs=1e-6)
    for key in ("qat", "bf16", "qarl", "trace_deeper_half"):
        assert len(found[key].gradient) == layers
        assert sum(found[key].gradient) < sum(found["trace"].gradient)


def test_replayed_codes_bring_the_trainer_as_near_as_followed_bits(found: dict[str, Row]) -> None:
    replay, trace, nearest = (found[key].distance for key in ("replay", "trace", "qat"))
    assert replay.abs_delta < 0.2 * nearest.abs_delta
    assert replay.kl < 2 * trace.kl + 1e-4
    # Upstream layers agree, so few codes differ and nearly every one that does is a neighbour.
    for site in ("experts_in", "k", "v"):
        aligned, alone = found["replay"].sites[site].total, found["qat"].sites[site].total
        assert aligned.codes < alone.codes
        assert aligned.one_step > 0.99


def test_the_probe_recommends_with_a_cost(measured: Measurement) -> None:
    assert {"skip_first_1", "inputs_only", "scale_bits", "lost_0.1"} <= {row.variant.key for row in measured.probes}
    assert measured.advice is not None
    assert "B a token" in measured.advice


def test_reports_show_every_variant_and_layer(measured: Measurement) -> None:
    content = json.loads(json.dumps(report.to_dict(measured), allow_nan=False))
    rows = {row["key"]: row for row in content["rows"]}
    assert len(rows["qat"]["sites"]["k"]["layers"]) == measured.subject.dims.layers
    assert rows["qat"]["router_agreement"] == pytest.approx(
        sum(rows["qat"]["router_agreement_layers"]) / len(rows["qat"]["router_agreement_layers"])
    )
    everything = len(measured.rows) + len(measured.probes)
    assert len(content["rows"]) + len(content["probes"]) == everything
    table, details = report.render(measured)
    assert table.row_count == everything
    assert details.row_count == sum(len(row.sites) for row in measured.rows)
    Console(quiet=True).print(table, details)


def test_the_page_has_a_chart_a_site_and_loads_nothing(measured: Measurement) -> None:
    html = page.page(measured)
    assert "http" not in html
    for site in ("experts_in", "experts_mid", "k", "v"):
        assert f"{site}: share of values with another lowest bit" in html
    for part in html.split("<figure>")[1:]:
        ElementTree.fromstring("<figure>" + part.split("</figure>")[0] + "</figure>")
