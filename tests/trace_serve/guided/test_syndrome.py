"""Synthetic trainers: a rollout's values are the trainer's plus noise, both in units of the grid."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.syndrome import SyndromeDecoder, own_bits
from trace_serve.hints import wire
from trace_serve.hints.rows import HintFile, Site
from trace_serve.hints.syndrome import packed
from trace_serve.hints.syndrome.more import beside
from trace_serve.nvfp4 import e2m1, hint_bits, quantize_tokens
from trace_serve.recipe import Recipe

RECIPE = Recipe()
LAYER = 3


def values(rows, width, seed):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 1.8


def noise(rows, width, size, seed):
    return size * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def hints_of(site):
    rows = site.bits.shape[0]
    return HintFile(np.arange(rows, dtype=np.int32), (site,), RECIPE.recipe_id, "", ((0, rows, ""),))


def site_of(v, present=None):
    rows, width = v.shape
    bits = np.packbits((e2m1.encode(v) & 1).numpy(), axis=1, bitorder="little").view("<u2")
    present = np.ones(rows, dtype=bool) if present is None else present
    return Site("k", (LAYER,), bits.reshape(rows, 1, width // 16), None, present, scale_kind="none")


def packed_of(hints, directory, words=6, second=True, scale="none"):
    path = directory / "h.safetensors"
    first, more = packed.pack(hints, scale=scale, words=words)
    path.write_bytes(first)
    beside(path).unlink(missing_ok=True)
    if second:
        beside(path).write_bytes(more)
    return wire.read(path)


def decode(hints, u, rows=None):
    rows = np.arange(u.shape[0]) if rows is None else rows
    own, reliability = own_bits(u[rows])
    return SyndromeDecoder(hints).decode("k", LAYER, rows, own.numpy(), reliability.numpy())


def test_reliability_is_the_distance_to_the_nearest_boundary():
    u = torch.tensor([0.0, 0.25, -0.3, 1.0, 5.0, -6.5, 2.4, 3.4])
    own, reliability = own_bits(u)
    assert own.tolist() == (e2m1.encode(u) & 1).tolist()
    expected = torch.tensor([0.25, 0.0, 0.05, 0.25, 0.0, 0.25, 0.1, 0.1])
    assert torch.allclose(reliability, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "words", "least", "most"), [(0.02, 6, 0.99, 1.0), (0.03, 8, 0.99, 1.0), (0.03, 6, 0.01, 0.99)]
)
def test_ten_thousand_blocks_have_no_undetected_failure(tmp_path, size, words, least, most):
    """Distances to the boundary are uniform and the noise is normal, which is close to what was measured."""
    rows, width = 3400, 2048
    random = np.random.default_rng(words)
    reliability = random.random((rows, width), dtype=np.float32) / 4
    crossed = size * random.standard_normal((rows, width), dtype=np.float32) > reliability
    own = random.integers(0, 2, (rows, width), dtype=np.uint8)
    theirs, mine = (np.packbits(bits, axis=1, bitorder="little").view("<u2") for bits in (own ^ crossed, own))
    site = Site("k", (LAYER,), theirs.reshape(rows, 1, -1), None, np.ones(rows, dtype=bool), scale_kind="none")
    hints = packed_of(hints_of(site), tmp_path, words, second=False)
    bits, known = SyndromeDecoder(hints).decode("k", LAYER, np.arange(rows), own, reliability)
    assert np.array_equal(bits[known], theirs[known])
    assert np.array_equal(bits[~known], mine[~known])
    assert hints.decoding.blocks == rows
    assert hints.decoding.failed == (~known).sum()
    assert least <= known.mean() <= most


def test_a_decoded_block_with_another_check_is_not_believed(tmp_path):
    u = values(20, 2048, 3)
    hints = packed_of(hints_of(site_of(u + noise(20, 2048, 0.01, 4))), tmp_path, second=False)
    check = hints.coded["k"].check.copy()
    check[0, 7] ^= 1
    hints = replace(hints, coded={"k": replace(hints.coded["k"], check=check)})
    _, known = decode(hints, u)
    assert np.flatnonzero(~known).tolist() == [7]
    assert (hints.decoding.false, hints.decoding.failed) == (1, 1)


@pytest.mark.parametrize("width", [192, 576, 2048, 3072])
def test_with_the_second_file_every_bit_is_the_rollouts(tmp_path, width):
    rows = 50
    u = values(rows, width, width)
    # Some rows are much farther from the rollout than the rest.
    apart = noise(rows, width, 0.02, 5)
    apart[10:14] *= 40
    site = site_of(u + apart, np.arange(rows) != 20)
    hints = packed_of(hints_of(site), tmp_path)
    bits, known = decode(hints, u)
    assert known.all()
    assert np.array_equal(bits[site.present], site.bits[site.present, 0])
    counted = hints.decoding
    assert counted.raw > 0
    assert counted.failed == 0
    # Each fetched block was first tried with all further words.
    assert counted.fetched_bytes >= counted.raw * (256 + 80)


def test_more_words_cost_less_than_the_block(tmp_path):
    u = values(200, 2048, 6)
    hints = packed_of(hints_of(site_of(u + noise(200, 2048, 0.025, 7))), tmp_path, words=5)
    _, known = decode(hints, u)
    assert known.all()
    assert hints.decoding.more > 20
    assert hints.decoding.raw == 0
    assert hints.decoding.fetched_bytes < 200 * 40


def test_a_part_of_a_sequence_decodes_where_its_blocks_are_whole(tmp_path):
    u = values(64, 512, 8)
    site = site_of(u + noise(64, 512, 0.01, 9))
    hints = packed_of(hints_of(site), tmp_path, second=False)
    rows = np.arange(4, 33)
    bits, known = decode(hints, u, rows)
    assert known[:-1].all()
    assert np.array_equal(bits[known], site.bits[rows[known], 0])


def test_guided_rounding_by_packed_hints_is_that_by_plain_ones(tmp_path):
    x = (values(40, 576, 10)).bfloat16()
    rollout = (x.float() + noise(40, 576, 0.01, 11)).bfloat16()
    kept = quantize_tokens(rollout, RECIPE, static_scale=RECIPE.experts_in_scale(LAYER))
    bits = hint_bits(kept.codes).numpy().reshape(40, 1, 36)
    scales = kept.scales.numpy().reshape(40, 1, 36) & 1
    log2 = np.log2(kept.global_scale.expand(40).numpy()).astype(np.int8).reshape(40, 1, 1)
    present = np.arange(40) % 7 != 3
    site = Site("experts_in", (LAYER,), bits, scales, present, log2, scale_kind="lsb")
    plain = hints_of(site)
    own = quantize_tokens(x, RECIPE, static_scale=RECIPE.experts_in_scale(LAYER))
    assert (hint_bits(own.codes) != torch.from_numpy(bits[:, 0])).any()
    rounded = {}
    coded = packed_of(plain, tmp_path, scale="lsb")
    for name, hints in (("plain", plain), ("packed", coded), ("again", coded)):
        rounding = HintedRounding(RECIPE, [None, hints])
        rounding.begin(0, 40)
        both = torch.cat([x, x])
        rounded[name] = rounding.experts_in(LAYER, both)
        blocks = coded.decoding.blocks
        # A recomputation takes what was decoded.
        assert torch.equal(rounding.experts_in(LAYER, both), rounded[name])
        assert coded.decoding.blocks == blocks
    assert torch.equal(rounded["plain"], rounded["packed"])
    assert torch.equal(rounded["plain"], rounded["again"])
    assert not torch.equal(rounded["plain"][:40], rounded["plain"][40:])
