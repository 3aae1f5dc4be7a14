import ml_dtypes
import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import e2m1, e4m3, hint_bits, pack, unpack, unpack_values


def all_bf16_values() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_every_finite_bf16_value_rounds_to_the_nearest_e2m1_code():
    values = all_bf16_values().float()
    values = values[values.isfinite()]
    expected = oracle.nearest_even(values.abs().double().numpy(), oracle.GRID)
    codes = e2m1.encode(values)
    assert np.array_equal((codes & 7).numpy(), expected)
    assert torch.equal(codes >> 3 == 1, values.signbit())


def test_e2m1_agrees_with_the_float4_type_of_ml_dtypes():
    u = torch.linspace(-8, 8, 4001)
    expected = u.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(e2m1.decode(e2m1.encode(u)).numpy(), expected)


@pytest.mark.parametrize(
    ("tie", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-0.75, 10), (-5.0, 14)]
)
def test_an_exact_tie_goes_to_the_even_code(tie, code):
    assert e2m1.encode(torch.tensor([tie])).item() == code


@pytest.mark.parametrize("boundary", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_one_ulp_beside_a_tie_goes_to_the_nearer_code(boundary):
    x = torch.tensor(boundary)
    below = e2m1.encode(torch.nextafter(x, torch.tensor(0.0)))
    above = e2m1.encode(torch.nextafter(x, torch.tensor(9.0)))
    assert int(above) - int(below) == 1


def test_negative_zero_keeps_its_sign_and_has_the_parity_of_zero():
    code = e2m1.encode(torch.tensor([-0.0]))
    assert code.item() == 8
    assert e2m1.decode(code).signbit().item()


def test_neighbouring_magnitudes_differ_in_the_lowest_bit():
    codes = e2m1.encode(torch.tensor(e2m1.MAGNITUDES))
    assert codes.tolist() == list(range(8))


def test_scales_round_to_the_nearest_e4m3_value():
    values = all_bf16_values().float()
    values = values[values.isfinite() & ~values.signbit()]
    values = torch.cat((values, torch.rand(4096) * 500, torch.rand(4096) * 2**-6))
    expected = oracle.nearest_even(values.double().numpy(), oracle.E4M3)
    assert np.array_equal(e4m3.encode(values).numpy(), expected)


def test_every_e4m3_byte_decodes_like_ml_dtypes():
    raw = np.arange(256, dtype=np.uint8)
    expected = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(e4m3.decode(torch.from_numpy(raw.copy())).numpy(), expected, equal_nan=True)


def test_the_even_index_is_in_the_low_nibble():
    assert pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_unpacking_every_byte_gives_back_its_codes_and_values():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = unpack(packed)
    assert torch.equal(pack(codes), packed)
    assert torch.equal(unpack_values(packed), e2m1.decode(codes))


def test_hint_bit_i_is_the_lowest_bit_of_code_i():
    codes = torch.randint(0, 16, (3, 5, 32), dtype=torch.uint8)
    words = hint_bits(pack(codes)).to(torch.int32)
    assert words.shape == (3, 5, 2)
    for i in range(32):
        assert torch.equal((words[..., i // 16] >> (i % 16)) & 1, (codes[..., i] & 1).to(torch.int32))


def test_odd_and_partial_blocks_are_refused_by_name():
    with pytest.raises(ShapeError, match="last dimension is 3") as caught:
        pack(torch.zeros(3, dtype=torch.uint8))
    assert caught.value.field == "codes"
    with pytest.raises(ShapeError, match="multiple of 8"):
        hint_bits(torch.zeros(12, dtype=torch.uint8))
