"""Hint files find the columns of their tokens: padded left or right, packed, cut, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plug_rollouts import rollout, tokens_of

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.guided.plugs.alignment import Segment, aligned, segments


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 9 and 6 tokens in 9 columns."""
    ids, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    short = slice(0, 6) if side == "right" else slice(3, 9)
    ids[0], mask[0] = tokens_of(1, 9), 1
    ids[1, short], mask[1, short] = tokens_of(2, 6)[0], 1
    return ids, mask


@pytest.mark.parametrize(("side", "start"), [("right", 0), ("left", 3)])
def test_a_padded_sequence_starts_where_its_mask_does(side: str, start: int) -> None:
    ids, mask = padded(side)
    hints = [rollout(1, 9), rollout(2, 6, first=2)]
    long, short = aligned(hints, ids, mask)
    assert long is not None
    assert short is not None
    assert (long.first_token, short.first_token) == (0, 2 + start)
    assert short.site("v").bits is hints[1].site("v").bits


def test_packed_sequences_become_one_file_with_gaps_marked_missing() -> None:
    hints = [rollout(1, 9), None, rollout(3, 7, first=2)]
    ids = torch.cat([tokens_of(seed, length) for seed, length in ((1, 9), (2, 6), (3, 7))], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(6), torch.arange(7)]).unsqueeze(0)
    (row,) = aligned(hints, ids, None, positions)
    assert row is not None
    assert row.rows == 22
    for name in ("experts_in", "k", "v"):
        whole = row.site(name)
        expected = np.zeros(22, dtype=np.bool_)
        for each, start in ((hints[0], 0), (hints[2], 17)):
            assert each is not None
            part = each.site(name)
            at = slice(start, start + each.rows)
            expected[at] = part.present
            assert np.array_equal(whole.bits[at], part.bits)
            assert whole.scales is not None
            assert part.scales is not None
            assert np.array_equal(whole.scales[at], part.scales)
        assert np.array_equal(whole.present, expected)
    assert row.routed_present is not None
    assert row.routed_present.nonzero()[0].tolist() == [*range(8), *range(17, 21)]


def test_a_sequence_that_the_trainer_cut_keeps_the_rows_of_its_tokens() -> None:
    hints = [rollout(1, 9), rollout(2, 6)]
    ids = torch.cat([tokens_of(1, 9)[:, :5], tokens_of(2, 6)], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(6)]).unsqueeze(0)
    (row,) = aligned(hints, ids, None, positions)
    assert row is not None
    assert np.array_equal(row.site("k").bits[:5], hints[0].site("k").bits[:5])
    assert np.array_equal(row.site("k").bits[5:10], hints[1].site("k").bits)


def test_rows_of_other_tokens_are_refused_by_position() -> None:
    ids, mask = padded("left")
    ids[1, 5] += 1
    with pytest.raises(HintFormatError, match=r"rollout_hints\[1\]: token \d+ at position 2"):
        aligned([rollout(1, 9), rollout(2, 6)], ids, mask)
    with pytest.raises(HintFormatError, match=r"rollout_hints\[0\]"):
        aligned([rollout(2, 6), rollout(1, 9)], ids, mask)


def test_batches_that_cannot_be_aligned_are_refused() -> None:
    ids, mask = padded("right")
    with pytest.raises(ConfigError, match="got 1 files, expected one for each of 2"):
        aligned([rollout(1, 9)], ids, mask)
    mask[0, 4] = 0
    with pytest.raises(ConfigError, match="hole"):
        aligned([None, None], ids, mask)
    with pytest.raises(ConfigError, match="attention_mask: got shape"):
        segments(ids, torch.ones(2, 1, 9, 9))


def test_rows_without_tokens_and_positions_of_several_axes_are_segments_too() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert segments(ids, torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]])) == [Segment(0, 0, 0), Segment(1, 1, 4)]
    assert segments(ids[:1], None, torch.tensor([[[0, 1, 0, 1]]] * 3)) == [Segment(0, 0, 2), Segment(0, 2, 4)]
