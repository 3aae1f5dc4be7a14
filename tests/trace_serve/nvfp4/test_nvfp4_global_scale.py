from fractions import Fraction

import pytest
import torch

from trace_serve.nvfp4 import pow2_exponent, pow2_from_exponent, pow2_global_scale


def exact_exponent(amax: float) -> int:
    exponent = -149
    while Fraction(2) ** exponent * 2688 < Fraction(amax):
        exponent += 1
    return min(max(exponent, -100), 116)


def test_the_exponent_is_exact_around_every_power_of_two_times_2688():
    centres = torch.tensor([2688.0 * 2.0**e for e in range(-120, 116, 5)] + [2.0**e for e in range(-126, 127, 7)])
    for amax in (centres, torch.nextafter(centres, torch.tensor(0.0)), torch.nextafter(centres, torch.tensor(3e38))):
        assert pow2_exponent(amax).tolist() == [exact_exponent(a) for a in amax.tolist()]


def test_a_range_of_bf16_maxima_is_exact():
    amax = torch.arange(1, 0x7F80, 37, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert pow2_exponent(amax).tolist() == [exact_exponent(a) for a in amax.tolist()]


@pytest.mark.parametrize(("amax", "scale"), [(0.0, 1.0), (2688.0, 1.0), (2689.0, 2.0), (1344.0, 0.5), (21.0, 2.0**-7)])
def test_examples(amax, scale):
    assert pow2_global_scale(torch.tensor(amax)).item() == scale


def test_exponents_and_scales_are_inverse():
    exponents = torch.arange(-100, 117)
    assert pow2_from_exponent(exponents).tolist() == [2.0**e for e in exponents.tolist()]
