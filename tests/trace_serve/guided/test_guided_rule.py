import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_serve.errors import ShapeError
from trace_serve.guided import (
    TAU_ALIGNED,
    TAU_UNALIGNED,
    follow_codes,
    follow_parity,
    follow_scale_parity,
)
from trace_serve.nvfp4 import e2m1, e4m3, quantize, unpack
from trace_serve.recipe import Recipe

GRID = np.array(e2m1.MAGNITUDES)
TAUS = (0.5, 0.25, 0.1, 0.01)
VALUES = st.floats(-9, 9, width=32)


def guided(u: float, rollout: int, tau: float) -> float:
    bits = torch.tensor([rollout & 1], dtype=torch.uint8)
    return e2m1.decode(follow_parity(torch.tensor([u]), bits, tau=tau)).item()


def code_of(value: float) -> int:
    return int(e2m1.encode(torch.tensor([value])))


def rule_in_words(u: float, bit: int, tau: float) -> float:
    """The rule as it is written down, for one value."""
    a = abs(np.float32(u))
    n = code_of(float(a))
    o = n + 1 if a > GRID[n] else n - 1 if a < GRID[n] else None
    saturated = n == 7 and a >= 6
    if saturated:
        o = 6
    if (n & 1) != bit and o is not None:
        middle = (GRID[n] + GRID[o]) / 2
        if saturated or abs(a - middle) <= tau * abs(GRID[o] - GRID[n]):
            n = o
    return float(np.copysign(GRID[n], u))


@given(u=VALUES, bit=st.integers(0, 1), tau=st.sampled_from(TAUS))
def test_the_rule_is_the_one_that_is_written_down(u, bit, tau):
    got = follow_parity(torch.tensor([u], dtype=torch.float32), torch.tensor([bit], dtype=torch.uint8), tau=tau)
    assert e2m1.decode(got).item() == rule_in_words(u, bit, tau)
    assert bool(got >> 3) is bool(np.signbit(np.float32(u)))


def pairs(count: int = 1_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    u = torch.empty(count).uniform_(-7, 7, generator=generator)
    spread = 10 ** torch.empty(count).uniform_(-3, 0.5, generator=generator)
    return u, u + spread * torch.randn(count, generator=generator)


@pytest.mark.parametrize("tau", TAUS)
def test_inside_its_condition_it_is_never_worse_than_nearest_and_close_by_it_is_the_rollouts(tau):
    u, v = pairs()
    rollout = e2m1.encode(v)
    q_rollout, q_nearest = e2m1.decode(rollout), e2m1.decode(e2m1.encode(u))
    q_guided = e2m1.decode(follow_parity(u, rollout & 1, tau=tau))
    grid = torch.tensor(e2m1.MAGNITUDES)
    a, n = u.abs(), (e2m1.encode(u) & 7).long()
    up = a > grid[n]
    lower, upper = grid[(n - 1).clamp(min=0)], grid[(n + 1).clamp(max=7)]
    far_below = torch.where(n == 0, a + 0.25, a - (grid[n] + lower) / 2)
    far_above = torch.where(n == 7, torch.inf, (grid[n] + upper) / 2 - a)
    saturated = a >= 6
    d_far = torch.where(saturated, torch.inf, torch.where(up, far_below, far_above))
    step = torch.where(up, upper - grid[n], grid[n] - lower)
    inside = (u - v).abs() < d_far
    worse = (q_guided - q_rollout).abs() > (q_nearest - q_rollout).abs()
    assert inside.sum() > 500_000
    assert not (worse & inside).any()
    close = inside & ((u - v).abs() < tau * step) & ~saturated & (a != grid[n])
    assert close.sum() > 50_000
    assert torch.equal(q_guided[close].abs(), q_rollout[close].abs())


COUNTEREXAMPLES = [(0.99, 1.26), (0.02, -0.26), (3.9, 5.01), (2.05, 1.74)]


@pytest.mark.parametrize(("u", "v"), COUNTEREXAMPLES)
def test_parity_alone_misleads_where_the_guard_does_not(u, v):
    rollout = code_of(v)
    q = e2m1.decode(torch.tensor([rollout], dtype=torch.uint8)).item()
    nearest = e2m1.decode(torch.tensor([code_of(u)], dtype=torch.uint8)).item()
    assert abs(guided(u, rollout, TAU_ALIGNED) - q) > abs(nearest - q)
    assert guided(u, rollout, TAU_UNALIGNED) == nearest


def test_no_guard_that_ever_follows_a_bit_is_safe_from_a_rollout_far_away():
    assert guided(0.24, code_of(-0.26), TAU_UNALIGNED) == 0.5


def test_parity_worse_needs_a_guard_below_a_tenth():
    # The rollout at 4 is at least 0.9 away from 2.6, and the boundary at 2.5 only 0.1: a bit cannot tell 2 from 4.
    assert guided(2.6, code_of(4.0), 0.09) == 3.0
    assert guided(2.6, code_of(4.0), TAU_UNALIGNED) == 2.0
    assert e2m1.decode(follow_codes(torch.tensor([2.6]), torch.tensor([code_of(4.0)], dtype=torch.uint8))).item() == 3.0


def test_sign_flip_is_not_pulled_to_the_other_side_under_the_guard():
    assert guided(0.1, code_of(-0.5), TAU_UNALIGNED) == 0.0
    full = follow_codes(torch.tensor([0.1]), torch.tensor([code_of(-0.5)], dtype=torch.uint8))
    assert e2m1.decode(full).item() == 0.0


@given(u=VALUES, rollout=st.integers(0, 15))
def test_full_guidance_is_never_farther_from_the_rollout_than_nearest(u, rollout):
    value, code = torch.tensor([u], dtype=torch.float32), torch.tensor([rollout], dtype=torch.uint8)
    target = e2m1.decode(code)
    got, nearest = e2m1.decode(follow_codes(value, code)), e2m1.decode(e2m1.encode(value))
    assert (got - target).abs() <= (nearest - target).abs()
    a = abs(float(value))
    around = {4.0, 6.0} if a >= 6 else {max(g for g in GRID if g <= a), min(g for g in GRID if g >= a)}
    assert got.abs().item() in around


def test_own_codes_as_hints_change_nothing():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    q = quantize(x, 2.0**-6, Recipe())
    scales = e4m3.decode(q.scales).repeat_interleave(16, dim=-1) * 2.0**-6
    u = torch.where(scales > 0, x * scales.reciprocal(), 0.0)
    codes = unpack(q.codes)
    for tau in TAUS:
        assert torch.equal(follow_parity(u, codes & 1, tau=tau), codes)
    assert torch.equal(follow_codes(u, codes), codes)


def test_a_scale_one_byte_away_is_recovered_from_its_lowest_bit():
    generator = torch.Generator().manual_seed(3)
    own = 448 * torch.rand(50_000, generator=generator) ** 3
    rollout = e4m3.encode(own * (1 + 0.004 * torch.randn(50_000, generator=generator)))
    differs = e4m3.encode(own) != rollout
    assert 0.01 < differs.float().mean() < 0.2
    assert torch.equal(follow_scale_parity(own, rollout & 1), rollout)


def test_a_scale_at_either_end_stays_in_range():
    own = torch.tensor([0.0, 0.0, 448.0, 1e6, 1e6])
    bits = torch.tensor([0, 1, 0, 0, 1], dtype=torch.uint8)
    assert follow_scale_parity(own, bits).tolist() == [0, 0, 0x7E, 0x7E, 0x7D]


def test_wrong_arguments_are_refused_by_name():
    u, bits = torch.zeros(4), torch.zeros(4, dtype=torch.uint8)
    for call, field in [
        (lambda: follow_parity(u.double(), bits, tau=0.5), "u"),
        (lambda: follow_parity(u, bits[:3], tau=0.5), "bits"),
        (lambda: follow_parity(u, u, tau=0.5), "bits"),
        (lambda: follow_parity(u, bits, tau=0.0), "tau"),
        (lambda: follow_parity(u, bits, tau=0.6), "tau"),
        (lambda: follow_scale_parity(u, bits[:1]), "bits"),
        (lambda: follow_codes(u, bits.int()), "codes"),
    ]:
        with pytest.raises(ShapeError) as caught:
            call()
        assert caught.value.field == field
