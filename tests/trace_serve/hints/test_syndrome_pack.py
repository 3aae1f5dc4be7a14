import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hint_factory import RECIPE_ID, make_file, make_site
from typer.testing import CliRunner

from trace_serve.errors import HintFormatError
from trace_serve.hints import container, wire
from trace_serve.hints.cli import app
from trace_serve.hints.syndrome import code, packed
from trace_serve.hints.syndrome.more import beside

DOCUMENT = Path(__file__).parents[3] / "docs" / "syndrome-hints.md"
RUNNER = CliRunner()


def as_bits(blocks):
    return np.unpackbits(np.ascontiguousarray(blocks).view(np.uint8), axis=1, bitorder="little")


def documented_entries():
    line = r"^\| (\d+) \| (\d+):(\d+) \| (\d+):(\d+) \| (\d+):(\d+) \|$"
    found = [tuple(map(int, row)) for row in re.findall(line, DOCUMENT.read_text("utf-8"), re.M)]
    return {column: ((a, b), (c, d), (e, f)) for column, a, b, c, d, e, f in found}


def lowest_bits():
    """A file whose coded sites have no whole codes."""
    sites = [make_site(name, 11, (0, 5), 36, seed) for seed, name in enumerate(packed.SITES)]
    return make_file(sites=(*sites, *(site for site in make_file().sites if site.name == "experts_mid")))


@pytest.fixture
def files(tmp_path):
    hints = lowest_bits()
    paths = tmp_path / "x.safetensors", beside(tmp_path / "x.safetensors")
    for path, data in zip(paths, packed.pack(hints), strict=True):
        path.write_bytes(data)
    return hints, *paths


def test_the_documented_matrix_gives_the_syndromes():
    entries = documented_entries()
    assert sorted(entries) == list(range(32))
    blocks = np.random.default_rng(0).integers(0, 1 << 64, (20, 32), dtype=np.uint64)
    bits = as_bits(blocks)
    rows = np.zeros((16, 20, 64), dtype=np.uint8)
    for column, three in entries.items():
        for row, shift in three:
            for z in range(64):
                rows[row, :, z] ^= bits[:, 64 * column + (z + shift) % 64]
    sums = [rows[r] ^ rows[r + 4] ^ rows[r + 8] ^ rows[r + 12] for r in range(4)]
    expected = np.stack([*sums, *(rows[r] ^ rows[r + 8] for r in range(4)), *rows[:8]], axis=1)
    assert np.array_equal(as_bits(code.syndromes(blocks)), expected.reshape(20, -1))


@pytest.mark.parametrize("words", range(code.MIN_WORDS, code.MAX_WORDS + 1))
def test_every_prefix_of_a_syndrome_is_a_code_of_three_checks_a_bit_without_short_cycles(words):
    blocks = np.random.default_rng(words).integers(0, 1 << 64, (5, 32), dtype=np.uint64)
    assert np.array_equal(code.unfolded(code.syndromes(blocks)[:, :words]), code.parities(blocks, words))
    used = code.checks(words)
    matrix = np.zeros((64 * words, code.BITS), dtype=np.float32)
    for row in range(words):
        for edge in range(used.starts[row], used.starts[row + 1]):
            z = np.arange(64)
            matrix[64 * row + z, 64 * used.columns[edge] + (z + used.shifts[edge]) % 64] += 1
    assert set(matrix.sum(axis=0)) == {3}
    shared = matrix @ matrix.T
    np.fill_diagonal(shared, 0)
    assert shared.max() == 1


def test_unpack_gives_back_the_file(files, tmp_path):
    hints, first, _ = files
    found = wire.read(first, expect_recipe_id=RECIPE_ID, expect_token_ids=hints.token_ids)
    assert isinstance(found, packed.PackedHints)
    assert wire.to_bytes(packed.unpack(found)) == wire.to_bytes(hints)
    out = tmp_path / "back.safetensors"
    assert RUNNER.invoke(app, ["unpack", str(first), "--out", str(out)]).exit_code == 0
    assert out.read_bytes() == wire.to_bytes(hints)


def test_bits_that_are_not_decoded_yet_are_missing_rows(files):
    hints, first, _ = files
    found = wire.read(first)
    assert not any(found.site(name).present.any() for name in packed.SITES)
    assert np.array_equal(found.coded["k"].present, hints.site("k").present)
    assert np.array_equal(found.site("experts_mid").present, hints.site("experts_mid").present)


def test_the_command_line_packs_and_shows(files, tmp_path):
    hints, _, _ = files
    plain, out = tmp_path / "plain.safetensors", tmp_path / "p.safetensors"
    wire.write(plain, hints)
    assert RUNNER.invoke(app, ["pack", str(plain), "--out", str(out), "--words", "8"]).exit_code == 0
    assert beside(out).exists()
    sites = json.loads(RUNNER.invoke(app, ["inspect", str(out), "--json"]).output)["sites"]
    assert sites["k"]["codes"] == "syndrome"
    assert sites["k"]["present"] == pytest.approx(hints.site("k").present.mean())
    assert sites["k"]["ones"] is None
    verified = RUNNER.invoke(app, ["verify", str(out)])
    assert f'"k": {int((~hints.site("k").present).sum())}' in verified.output
    refused = RUNNER.invoke(app, ["unpack", str(plain), "--out", str(tmp_path / "n")])
    assert isinstance(refused.exception, HintFormatError)


def test_a_second_file_of_another_rollout_is_refused(files):
    hints, first, second = files
    other = replace(hints.site("k"), bits=hints.site("k").bits ^ 1)
    sites = tuple(other if site.name == "k" else site for site in hints.sites)
    second.write_bytes(packed.pack(replace(hints, sites=sites))[1])
    with pytest.raises(HintFormatError, match="another rollout"):
        packed.unpack(wire.read(first))
    second.unlink()
    with pytest.raises(HintFormatError, match="second file is missing"):
        packed.unpack(wire.read(first))


def test_a_damaged_block_is_refused(files):
    _, first, second = files
    data = bytearray(second.read_bytes())
    data[-1 - 64 * 8] ^= 1
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    second.write_bytes(data)
    with pytest.raises(HintFormatError, match="wrong check"):
        packed.unpack(wire.read(first))


@pytest.mark.parametrize(
    "changes",
    [
        {"syndrome": "{}"},
        {"syndrome": '{"words":3,"sites":["k"],"bits_sha256":""}'},
        {"syndrome": '{"words":8,"sites":["experts_in","k","v"],"bits_sha256":""}'},
        {"syndrome": '{"words":6,"sites":["experts_mid"],"bits_sha256":""}'},
        {"sites": "[]"},
        {"rows": "-1"},
        {"rows": "2147483647"},
        {"schema_version": "2"},
    ],
)
def test_metadata_that_does_not_fit_is_refused(files, changes):
    arrays, metadata = container.decode(files[1].read_bytes())
    with pytest.raises(HintFormatError):
        wire.from_bytes(container.encode(arrays, {**metadata, **changes}))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(HintFormatError, match="words"):
        packed.pack(lowest_bits(), words=3)
    with pytest.raises(HintFormatError, match="sites"):
        packed.pack(replace(make_file(), sites=()))
