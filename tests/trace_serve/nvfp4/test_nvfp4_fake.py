import pytest
import torch

from trace_serve.nvfp4 import (
    dequantize,
    fake_quantize,
    fake_quantize_tokens,
    fake_quantize_weight,
    new_counters,
    quantize,
    quantize_tokens,
    quantize_weight,
)
from trace_serve.recipe import PRESETS, Recipe

RECIPES = pytest.mark.parametrize("name", ["portable", "gb200", "paper"])


@RECIPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_forward_values_are_those_that_the_codes_stand_for(name, dtype):
    recipe = PRESETS[name]
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(fake_quantize_tokens(x, recipe), dequantize(quantize_tokens(x, recipe), dtype))
    assert torch.equal(fake_quantize_weight(w, recipe), dequantize(quantize_weight(w, recipe), dtype))
    assert torch.equal(
        fake_quantize(x, 0.25, recipe, operand="kv"), dequantize(quantize(x, 0.25, recipe, operand="kv"), dtype)
    )


@RECIPES
def test_the_gradient_goes_straight_through_saturated_and_vanished_values_too(name):
    recipe = PRESETS[name]
    x = torch.tensor([[0.0, 1e-9, 1.0, 5e8] * 8], requires_grad=True)
    grad = torch.randn(1, 32)
    for kept in (fake_quantize_tokens(x, recipe), fake_quantize(x, 1.0, recipe), fake_quantize_weight(x, recipe)):
        x.grad = None
        kept.backward(grad)
        assert torch.equal(x.grad, grad)


def test_a_product_of_fake_quantized_operands_has_the_gradient_of_the_kept_values():
    x = torch.randn(4, 32, requires_grad=True)
    w = torch.randn(16, 32, requires_grad=True)
    out = fake_quantize_tokens(x, Recipe()) @ fake_quantize_weight(w, Recipe()).T
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.allclose(x.grad, grad @ dequantize(quantize_weight(w, Recipe()), torch.float32), atol=1e-5)
    assert torch.allclose(w.grad, grad.T @ dequantize(quantize_tokens(x, Recipe()), torch.float32), atol=1e-5)


def test_without_gradients_nothing_is_recorded_and_incidents_are_counted_once():
    counters = new_counters()
    x = torch.randn(2, 16)
    x[0, 0] = float("nan")
    assert not fake_quantize_tokens(x, Recipe(), counters=counters).requires_grad
    assert counters.tolist() == [1, 0, 0]
