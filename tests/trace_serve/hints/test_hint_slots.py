"""Rows are kept by KV slot and by the weights that wrote them."""

from __future__ import annotations

import torch

from trace_serve import nvfp4
from trace_serve.hints.slots import ExpertInputSlots, SlotVersions
from trace_serve.kernels import kernels_for
from trace_serve.recipe import Recipe


def quantized(rows: int, seed: int) -> nvfp4.Quantized:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * 10
    return kernels_for(Recipe()).quantize_activations(x, hints=True)


def filled() -> tuple[ExpertInputSlots, nvfp4.Quantized]:
    slots, q = ExpertInputSlots(10, (2, 5), 64), quantized(3, 0)
    for layer in (2, 5):
        slots.store(layer, torch.tensor([7, 1, 4]), q, version=0)
    return slots, q


def test_rows_come_back_in_the_order_asked_for() -> None:
    slots, q = filled()
    rows = slots.read(torch.tensor([1, 4, 7]), version=0)
    order = torch.tensor([1, 2, 0])
    assert rows.present.all()
    for layer in (0, 1):
        assert torch.equal(rows.bits[:, layer].view(torch.int16), nvfp4.hint_bits(q.codes)[order].view(torch.int16))
        assert torch.equal(rows.scales[:, layer], q.scales[order])
        assert torch.equal(2.0 ** rows.global_log2[:, layer].float(), q.global_scale[order])


def test_a_slot_that_one_layer_did_not_write_is_missing() -> None:
    slots, _ = filled()
    slots.store(2, torch.tensor([9]), quantized(1, 1), version=0)
    assert slots.read(torch.tensor([9, 7]), version=0).present.tolist() == [False, True]


def test_rows_of_other_weights_are_missing() -> None:
    slots, _ = filled()
    assert not slots.read(torch.tensor([1, 4, 7]), version=1).present.any()
    for layer in (2, 5):
        slots.store(layer, torch.tensor([4]), quantized(1, 2), version=1)
    assert slots.read(torch.tensor([1, 4, 7]), version=1).present.tolist() == [False, True, False]


def test_an_empty_forward_pass_stores_nothing() -> None:
    slots, _ = filled()
    slots.store(2, torch.zeros(0, dtype=torch.int64), quantized(0, 3), version=0)
    assert slots.read(torch.tensor([1]), version=0).present.all()


def test_slot_versions_follow_the_last_writer() -> None:
    versions = SlotVersions(4)
    versions.mark(torch.tensor([0, 2]), 0)
    versions.mark(torch.tensor([2]), 1)
    every = torch.arange(4)
    assert versions.present(every, 0).tolist() == [True, False, False, False]
    assert versions.present(every, 1).tolist() == [False, False, True, False]
