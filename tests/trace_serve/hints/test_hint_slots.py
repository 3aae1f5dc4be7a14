"""Rows are kept by KV slot and by the forward pass that wrote them."""

from __future__ import annotations

import torch

from trace_serve import nvfp4
from trace_serve.hints.slots import NEVER_WRITTEN, ExpertSlots, SlotPasses
from trace_serve.kernels import kernels_for
from trace_serve.recipe import Recipe

WRITTEN = torch.tensor([7, 1, 4])


def quantized(rows: int, seed: int, values: int = 64) -> nvfp4.Quantized:
    x = torch.randn(rows, values, generator=torch.Generator().manual_seed(seed)) * 10
    return kernels_for(Recipe()).quantize_activations(x, hints=True)


def filled() -> tuple[ExpertSlots, nvfp4.Quantized]:
    slots, q = ExpertSlots(10, (2, 5), 64), quantized(3, 0)
    for layer in (2, 5):
        slots.store(layer, WRITTEN, q, number=0)
    return slots, q


def passes(count: int, number: int = 0) -> torch.Tensor:
    return torch.full((count,), number)


def test_rows_come_back_in_the_order_asked_for() -> None:
    slots, q = filled()
    rows = slots.read(torch.tensor([1, 4, 7]), passes(3))
    order = torch.tensor([1, 2, 0])
    assert rows.present.all()
    for layer in (0, 1):
        assert torch.equal(rows.bits[:, layer].view(torch.int16), nvfp4.hint_bits(q.codes)[order].view(torch.int16))
        assert torch.equal(rows.scales[:, layer], q.scales[order])
        assert torch.equal(2.0 ** rows.global_log2[:, layer, 0].float(), q.global_scale[order])


def test_some_layers_come_back_alone() -> None:
    slots, _ = filled()
    slots.store(5, WRITTEN, quantized(3, 4), number=0)
    every = slots.read(WRITTEN, passes(3))
    some = slots.read(WRITTEN, passes(3), (5,))
    assert torch.equal(some.bits[:, 0].view(torch.int16), every.bits[:, 1].view(torch.int16))
    assert some.bits.shape[1] == 1


def test_a_slot_that_one_layer_did_not_write_is_missing() -> None:
    slots, _ = filled()
    slots.store(2, torch.tensor([9]), quantized(1, 1), number=0)
    assert slots.read(torch.tensor([9, 7]), passes(2)).present.tolist() == [False, True]
    assert slots.read(torch.tensor([9, 7]), passes(2), (2,)).present.all()


def test_a_row_that_another_pass_wrote_is_missing() -> None:
    slots, _ = filled()
    assert not slots.read(WRITTEN, passes(3, 1)).present.any()
    for layer in (2, 5):
        slots.store(layer, torch.tensor([4]), quantized(1, 2), number=1)
    assert slots.read(WRITTEN, torch.tensor([0, 0, 1])).present.all()
    assert slots.read(WRITTEN, passes(3)).present.tolist() == [True, True, False]


def test_a_slot_that_nothing_wrote_is_missing() -> None:
    slots, _ = filled()
    assert not slots.read(torch.tensor([3]), passes(1, NEVER_WRITTEN)).present.any()


def test_several_groups_of_a_token_stay_together() -> None:
    slots, q = ExpertSlots(6, (0,), 32, groups=2), quantized(4, 5, values=32)
    slots.store(0, torch.tensor([3, 0]), q, number=8)
    rows = slots.read(torch.tensor([0]), passes(1, 8))
    assert rows.present.all()
    assert torch.equal(rows.scales[0, 0], q.scales[2:].flatten())
    assert torch.equal(2.0 ** rows.global_log2[0, 0].float(), q.global_scale[2:])


def test_whole_codes_are_kept_in_place_of_their_lowest_bits() -> None:
    q = quantized(3, 6)
    bits, codes = ExpertSlots(10, (4,), 64), ExpertSlots(10, (4,), 64, codes=True)
    for slots in (bits, codes):
        slots.store(4, WRITTEN, q, number=0)
    assert codes.nbytes - bits.nbytes == 10 * 4 * 6
    rows, whole = (slots.read(WRITTEN.flip(0), passes(3)) for slots in (bits, codes))
    assert rows.codes is None
    assert whole.codes is not None
    assert torch.equal(whole.codes[:, 0], q.codes.flip(0))
    assert torch.equal(rows.bits.view(torch.int16), whole.bits.view(torch.int16))


def test_an_empty_forward_pass_stores_nothing() -> None:
    slots, _ = filled()
    slots.store(2, torch.zeros(0, dtype=torch.int64), quantized(0, 3), number=1)
    assert slots.read(torch.tensor([1]), passes(1)).present.all()


def test_a_slot_follows_its_last_writer() -> None:
    written = SlotPasses(4)
    written.mark(torch.tensor([0, 2]), 11, 0)
    written.mark(torch.tensor([2]), 12, 1)
    every = torch.arange(4)
    assert written.numbers(every).tolist() == [11, NEVER_WRITTEN, 12, NEVER_WRITTEN]
    assert written.versions(every).tolist() == [0, NEVER_WRITTEN, 1, NEVER_WRITTEN]
