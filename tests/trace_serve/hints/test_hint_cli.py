import json

import numpy as np
import pytest
from hint_factory import RECIPE_ID, make_file, make_site
from typer.testing import CliRunner

from trace_serve.errors import HintFormatError
from trace_serve.hints import wire
from trace_serve.hints.cli import app
from trace_serve.hints.inspect import summarize

RUNNER = CliRunner()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "h.safetensors"
    wire.write(path, make_file())
    return path


def test_inspect_shows_sites_and_sizes(file):
    text = RUNNER.invoke(app, ["inspect", str(file)]).output
    for expected in ("experts_in", RECIPE_ID, "51,840", "rows"):
        assert expected in text
    summary = json.loads(RUNNER.invoke(app, ["inspect", str(file), "--json"]).output)
    assert summary["rows"] == 11
    assert summary["weight_versions"] == {"7": 5, "8": 6}
    assert summary["sites"]["experts_in"]["bytes_per_token"] == 3 * (72 + 5 + 1)
    assert summary["sites"]["experts_in"]["full_bytes_per_token"] == 3 * 576 * 4.5 / 8
    assert summary["bytes_per_token"] == wire.bytes_per_token(wire.read(file))


def test_shares_are_of_present_rows():
    bits = np.zeros((4, 1, 2), dtype=np.uint16)
    bits[0] = 0x00FF
    bits[3] = 0xFFFF
    present = np.array([True, True, False, False])
    site = make_site("k", 4, (0,), 2, 0, bits=bits, present=present)
    shown = summarize(make_file(4, sites=(site,)))["sites"]["k"]
    assert shown["present"] == 0.5
    assert shown["ones"] == 0.25


def test_a_file_without_rows_has_no_shares(tmp_path):
    path = tmp_path / "h.safetensors"
    wire.write(path, make_file(0))
    assert summarize(wire.read(path))["sites"]["k"]["present"] is None
    assert RUNNER.invoke(app, ["inspect", str(path)]).exit_code == 0


def test_verify_says_ok_or_what_is_wrong(file):
    good = RUNNER.invoke(app, ["verify", str(file), "--recipe-id", RECIPE_ID])
    assert good.exit_code == 0
    assert "ok, 11 rows" in good.output
    for arguments, message in [
        (["--recipe-id", "sha256:other"], "recipe_id"),
        (["--require-complete"], "rows are missing"),
    ]:
        bad = RUNNER.invoke(app, ["verify", str(file), *arguments])
        assert isinstance(bad.exception, HintFormatError)
        assert message in str(bad.exception)
    file.write_bytes(file.read_bytes()[:-1])
    assert isinstance(RUNNER.invoke(app, ["verify", str(file)]).exception, HintFormatError)
