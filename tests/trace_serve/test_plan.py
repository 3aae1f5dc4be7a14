import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from trace_serve.errors import ConfigError, PolicyError
from trace_serve.hints import wire
from trace_serve.plan import (
    Workload,
    filled_batch,
    kv_capacity_tokens,
    plan,
    plan_command,
    scheme_rows,
    weight_bytes,
)
from trace_serve.policy.dims import QWEN35_35B_A3B, dims_from_config, load_dims

PAPER = load_dims("qwen3.5-35b-a3b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("values_per_token", 92_160),
        ("full_bytes_per_token", 51_840),
        ("full_bytes_per_step", 51_840 * 4096 * 262_144),
        ("paper_hint_bytes_per_token", 8_640),
        ("paper_hint_reduction", 6),
        ("hint_bytes_per_token", 12_240),
        ("kv_bytes_bf16", 20_480),
        ("kv_bytes_nvfp4", 5_760),
        ("kv_reduction", 32 / 9),
        ("equal_batch_ceiling", 32 / 9),
    ],
)
def test_exact_figures_of_the_paper_s_model(key, value):
    assert plan(PAPER)[key] == value


@pytest.mark.parametrize(
    ("key", "value", "tolerance"),
    [
        ("full_bytes_per_step", 55.7e12, 0.05e12),
        ("full_bytes_per_step", 50.6 * 2**40, 0.05 * 2**40),
        ("hint_bytes_per_step", 13.1e12, 0.05e12),
        ("link_minutes", 3, 0.15),
        ("disk_hours", 3, 0.15),
        ("filled_speedup", 5.3, 0.05),
        ("filled_speedup_state", 3.7, 0.05),
    ],
)
def test_rounded_figures_of_the_paper_s_model(key, value, tolerance):
    assert plan(PAPER)[key] == pytest.approx(value, abs=tolerance)


def test_the_model_has_35_billion_parameters():
    assert (PAPER.expert_parameters + PAPER.other_parameters) / 1e9 == pytest.approx(34.66, abs=0.05)


def test_bf16_does_not_fit_at_the_stated_batch_and_nvfp4_does():
    table, usable = plan(PAPER), 186e9 * 0.88
    assert table["memory_nvfp4"] < usable < table["memory_bf16"]


def test_a_filled_memory_is_full():
    load = Workload()
    for bits in (16.0, 4.5):
        batch = filled_batch(PAPER, load, bits, state=False)
        kv = batch * load.context * 10 * PAPER.kv_values * bits / 8
        assert weight_bytes(PAPER, bits) + kv == pytest.approx(load.memory_gb * 1e9 * load.usable)


def test_a_device_too_small_for_the_weights_gains_without_bound():
    table = plan(PAPER, Workload(memory_gb=40))
    assert table["filled_speedup"] == float("inf")
    assert json.loads(json.dumps(table.to_dict(), allow_nan=False))["figures"]["filled_speedup"]["value"] is None


def test_hint_sizes_agree_with_the_wire_format():
    experts = wire.site_bytes_per_token(PAPER.hidden, PAPER.layers, scale="lsb", global_bytes=0)
    kv = wire.site_bytes_per_token(PAPER.kv_values, len(PAPER.attention_layers), scale="lsb", global_bytes=0)
    assert plan(PAPER)["hint_bytes_per_token"] == experts + kv


def test_layers_can_be_listed_instead_of_an_interval():
    config = {k: v for k, v in QWEN35_35B_A3B.items() if k != "full_attention_interval"}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(40)]
    nested = {"text_config": {**config, "layer_types": kinds}}
    assert dims_from_config(nested, PAPER.name) == PAPER


def test_a_plain_mixtral_config_is_planned(tmp_path):
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_local_experts": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    dims = load_dims(str(tmp_path))
    assert dims == load_dims(str(tmp_path / "config.json"))
    table = plan(dims)
    assert table["kv_bytes_nvfp4"] == 6_480
    assert "filled_speedup_state" not in table.to_dict()["figures"]
    expected = 30 * (4 * 3 * 576 * 1536 + 4 * 576 + 2 * 576 * 576 + 2 * 576 * 192) + 2 * 49152 * 576
    assert dims.expert_parameters + dims.other_parameters == expected


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="neither a built-in name"):
        load_dims("unknown-model")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": true}')
    with pytest.raises(PolicyError) as caught:
        load_dims(str(tmp_path))
    assert caught.value.field == "hidden_size"
    for field, value in [("batch", 0), ("memory_gb", float("nan")), ("usable", 1.5)]:
        with pytest.raises(ConfigError) as refused:
            Workload(**{field: value})
        assert refused.value.field == field


def make_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(plan_command)
    return app


def test_the_command_prints_a_table_or_json():
    text = CliRunner().invoke(make_app(), []).output
    for figure in ("92,160", "51,840 B", "55.7 TB = 50.6 TiB", "8,640 B", "20,480 B", "5,760 B", "5.30x", "3.71x"):
        assert figure in text
    parsed = json.loads(CliRunner().invoke(make_app(), ["--json", "--batch", "8"]).output)
    assert parsed["figures"]["values_per_token"] == {"value": 92160, "unit": "values"}
    assert parsed["workload"]["batch"] == 8


def test_planning_does_not_import_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, trace_serve.plan; assert 'torch' not in sys.modules"], check=True
    )


def test_hint_schemes_cost_what_their_bits_say():
    rows = {row["key"]: row for row in scheme_rows(PAPER, Workload())}
    expected = {"full": 51_840, "paper": 8_640, "byte": 17_280, "default": 12_240}
    assert {key: rows[key]["bytes_per_token"] for key in expected} == expected
    assert rows["syndrome"]["bytes_per_token"] == pytest.approx(3_203, abs=5)
    assert rows["bound"]["bytes_per_token"] == pytest.approx(1_207, abs=5)
    steps = {key: rows[key]["bytes_per_step"] / 1e12 for key in rows}
    assert steps == pytest.approx(
        {"full": 55.7, "paper": 9.28, "byte": 18.6, "default": 13.1, "syndrome": 3.44, "bound": 1.3}, abs=0.06
    )
    # A full memory at its roofline writes far less than a network link takes.
    assert 0 < rows["default"]["share_of_link"] < rows["full"]["share_of_link"] < 0.01


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth"), [("gb200", 186, 8000), ("B200", 180, 8000), ("h200", 141, 4800)]
)
def test_hardware_has_the_memory_and_bandwidth_of_its_data_sheet(name, memory, bandwidth):
    result = CliRunner().invoke(app_of(plan_command), ["--hardware", name, "--json"])
    load = json.loads(result.output)["workload"]
    assert (load["memory_gb"], load["bandwidth_gb_s"]) == (memory, bandwidth)


def test_unknown_hardware_is_refused_by_name():
    result = CliRunner().invoke(app_of(plan_command), ["--hardware", "tpu"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "hardware"


def test_kv_capacity_fills_the_memory():
    load = Workload()
    for experts, kv in ((16.0, 16.0), (4.5, 4.5)):
        tokens = kv_capacity_tokens(PAPER, load, experts, kv)
        used = weight_bytes(PAPER, experts) + tokens * 10 * PAPER.kv_values * kv / 8
        assert used == pytest.approx(load.usable_bytes)
    assert kv_capacity_tokens(PAPER, Workload(memory_gb=10), 16.0, 16.0) == 0


def app_of(command):
    app = typer.Typer()
    app.command()(command)
    return app
