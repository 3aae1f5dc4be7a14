import json

from typer.testing import CliRunner

from trace_serve.errors import PolicyError
from trace_serve.policy.cli import app

RUNNER = CliRunner()


def test_build_then_inspect_shows_the_same_policy(model, tmp_path):
    out = tmp_path / "policy"
    built = RUNNER.invoke(app, ["build", str(model), "--out", str(out), "--name", "demo", "--version", "3"])
    assert built.exit_code == 0, built.output
    shown = RUNNER.invoke(app, ["inspect", str(out), "--json"])
    summary = json.loads(shown.output)
    assert summary["name"] == "demo"
    assert summary["version"] == "3"
    assert summary["digest"] in built.output
    assert summary["layers_with_nvfp4_experts"] == summary["layers_with_nvfp4_kv"] == 2
    table = RUNNER.invoke(app, ["inspect", str(out)]).output
    assert summary["digest"] in table
    assert summary["recipe_id"] in table


def test_a_bad_directory_raises_the_typed_error(model):
    result = RUNNER.invoke(app, ["inspect", str(model)])
    assert isinstance(result.exception, PolicyError)
