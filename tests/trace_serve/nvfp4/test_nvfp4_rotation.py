import pytest
import torch

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import hadamard, rotate


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_the_matrix_is_orthonormal_and_symmetric_with_equal_magnitudes(width):
    h = hadamard(width, dtype=torch.float64)
    assert torch.equal(h, h.T)
    assert torch.allclose(h @ h, torch.eye(width, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(h.abs(), torch.full((width, width), width**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("width", [16, 64])
def test_a_power_of_two_root_makes_the_entries_exact(width):
    assert torch.equal(hadamard(width).abs(), torch.full((width, width), width**-0.5))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_the_rotation_is_the_matrix_product_by_group(width):
    x = torch.randn(3, 2, 128)
    expected = (x.reshape(3, 2, -1, width) @ hadamard(width)).reshape(x.shape)
    assert torch.allclose(rotate(x, width), expected, atol=1e-5)


def test_dot_products_are_unchanged_and_twice_is_the_identity():
    a, b = torch.randn(5, 64), torch.randn(5, 64)
    assert torch.allclose((rotate(a, 64) * rotate(b, 64)).sum(-1), (a * b).sum(-1), atol=1e-4)
    assert torch.allclose(rotate(rotate(a, 64), 64), a, atol=1e-5)


def test_width_zero_is_off_and_no_rows_stay_no_rows():
    x = torch.randn(2, 48, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, 0), x.float())
    assert rotate(torch.zeros(0, 64), 16).shape == (0, 64)


@pytest.mark.parametrize("width", [24, 32, -16])
def test_a_width_that_does_not_fit_is_refused(width):
    with pytest.raises(ShapeError, match="power of two that divides the last dimension 48"):
        rotate(torch.zeros(1, 48), width)
