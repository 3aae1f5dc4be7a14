"""One measurement of a tiny policy: rollouts on the real engine, every variant, and the three reports."""

from __future__ import annotations

import json

import engine_model
import pytest

from trace_serve.mismatch import report
from trace_serve.mismatch.run import Measurement, Options, measure
from trace_serve.policy import Policy

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def measured(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    prompts = [engine_model.token_ids(seed, 16) for seed in range(3)]
    options = Options(prompts=3, tokens=24, sites=("experts_in", "k", "v", "experts_mid"), gradients=1, probe=True)
    return measure(fp4_policy, prompts, options, log_path=tmp_path_factory.mktemp("mismatch") / "engine.log")


def test_hints_in_every_layer_bring_the_trainer_to_the_rollout(measured: Measurement) -> None:
    found = {row.variant.key: row.distance for row in measured.rows}
    assert {distance.tokens for distance in found.values()} == {72}
    assert found["trace"].abs_delta < 0.2 * found["qat"].abs_delta
    assert found["trace"].k3 < 0.1 * found["qat"].k3
    assert found["trace"].abs_delta < found["trace_deeper_half"].abs_delta
    assert found["trace"].abs_delta < found["bf16"].abs_delta
    assert found["trace"].router_agreement > 0.95
    # With upstream layers aligned few codes differ; without hints errors grow from layer to layer.
    for site in ("experts_in", "k", "v"):
        assert found["trace"].bits_differ[site] < found["qat"].bits_differ[site]
    assert found["bf16"].bits_differ == {}
    assert found["trace"].gradient_cosine == pytest.approx(1, abs=1e-5)
    assert found["qat"].gradient_cosine < found["trace"].gradient_cosine


def test_the_probe_recommends_layers_with_their_cost(measured: Measurement) -> None:
    assert len(measured.probes) == 6
    assert measured.advice is not None
    assert "B a token" in measured.advice


def test_reports_show_every_variant(measured: Measurement) -> None:
    content = json.loads(json.dumps(report.to_dict(measured), allow_nan=False))
    assert [row["key"] for row in content["rows"]][:2] == ["bf16", "qat"]
    page = report.page(measured)
    assert page.count("<tr>") == 1 + len(measured.rows) + len(measured.probes)
    assert "http" not in page.replace("http://www.w3.org", "")
    assert report.render(measured).row_count == len(measured.rows) + len(measured.probes)
