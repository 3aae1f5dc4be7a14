import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hint_factory import RECIPE_ID, make_file, make_site, same
from safetensors import safe_open

from trace_serve.errors import EngineError, HintFormatError
from trace_serve.hints import wire


@pytest.mark.parametrize("scale", ["lsb", "byte", "none"])
@pytest.mark.parametrize("rows", [0, 1, 8, 11])
def test_a_file_reads_back_as_it_was_written(rows, scale):
    hints = make_file(rows)
    back = wire.from_bytes(wire.to_bytes(hints, scale=scale))
    assert same(hints, back)
    assert {site.scale_kind for site in back.sites} == {scale}
    assert wire.to_bytes(back, scale=scale) == wire.to_bytes(hints, scale=scale)


def test_optional_parts_may_be_left_out():
    hints = make_file(
        5, sites=(), logprobs=None, routed_experts=None, routed_present=None, next_token_id=None, first_token=0
    )
    assert same(hints, wire.from_bytes(wire.to_bytes(hints)))


def test_routed_experts_take_the_smallest_type_that_holds_them():
    for top, dtype in [(3, np.uint8), (254, np.uint8), (255, np.uint16), (500, np.uint16)]:
        routed = np.full((4, 2, 2), top, dtype=np.int64)
        hints = make_file(4, routed_experts=routed, routed_present=None)
        back = wire.from_bytes(wire.to_bytes(hints))
        assert back.routed_experts.dtype == dtype
        assert np.array_equal(back.routed_experts, routed)
    with pytest.raises(HintFormatError, match="ids from 70000"):
        wire.to_bytes(make_file(4, routed_experts=np.full((4, 2, 2), 70000), routed_present=None))


def test_any_safetensors_reader_opens_it(tmp_path):
    hints = make_file()
    wire.write(tmp_path / "h.safetensors", hints)
    with safe_open(tmp_path / "h.safetensors", framework="numpy") as handle:
        assert handle.metadata()["schema_version"] == "1"
        assert np.array_equal(handle.get_tensor("token_ids"), hints.token_ids)
        bits = handle.get_tensor("k.bits")
        packed = handle.get_tensor("k.present")
    mask = [bool(packed[t // 8] >> (t % 8) & 1) for t in range(hints.rows)]
    site = hints.site("k")
    assert mask == site.present.tolist()
    assert np.array_equal(bits[site.present], site.bits[site.present])


def test_the_scale_bit_of_block_b_is_bit_b_modulo_8_of_byte_b_div_8(tmp_path):
    hints = make_file()
    wire.write(tmp_path / "h.safetensors", hints)
    with safe_open(tmp_path / "h.safetensors", framework="numpy") as handle:
        packed = handle.get_tensor("experts_in.scale_lsb")
    site = hints.site("experts_in")
    row = int(site.present.argmax())
    for block in range(36):
        assert packed[row, 1, block // 8] >> (block % 8) & 1 == site.scales[row, 1, block] & 1


def test_nothing_is_left_under_a_missing_row():
    hints = make_file()
    back = wire.from_bytes(wire.to_bytes(hints, scale="byte"))
    for site in back.sites:
        assert (~site.present).any()
        assert (site.bits[~site.present] == 0xFFFF).all()
        assert (site.scales[~site.present] == 0xFF).all()


def test_only_lowest_bits_cannot_become_bytes_again():
    back = wire.from_bytes(wire.to_bytes(make_file(), scale="lsb"))
    with pytest.raises(HintFormatError, match="as 'lsb', which cannot be written as 'byte'"):
        wire.to_bytes(back, scale="byte")
    bare = wire.from_bytes(wire.to_bytes(back, scale="none"))
    with pytest.raises(HintFormatError, match="as 'none', which cannot be written as 'lsb'"):
        wire.to_bytes(bare, scale="lsb")
    with pytest.raises(HintFormatError, match="expected one of lsb, byte, none"):
        wire.to_bytes(back, scale="half")


def test_another_recipe_is_refused():
    data = wire.to_bytes(make_file())
    assert wire.from_bytes(data, expect_recipe_id=RECIPE_ID).recipe_id == RECIPE_ID
    with pytest.raises(HintFormatError, match="under the same recipe") as caught:
        wire.from_bytes(data, expect_recipe_id="sha256:" + "00" * 32)
    assert caught.value.field == "recipe_id"


def test_other_tokens_are_refused():
    hints = make_file()
    data = wire.to_bytes(hints)
    ids = hints.token_ids.tolist()
    assert wire.from_bytes(data, expect_token_ids=ids).rows == len(ids)
    for wrong in (ids[:-1], [*ids, 1], [ids[0] + 1, *ids[1:]]):
        with pytest.raises(HintFormatError, match="pair each sequence") as caught:
            wire.from_bytes(data, expect_token_ids=wrong)
        assert caught.value.field == "token_ids"


def test_writing_is_atomic(tmp_path):
    path = tmp_path / "h.safetensors"
    wire.write(path, make_file(3))
    wire.write(path, make_file(4))
    assert wire.read(path).rows == 4
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        wire.write(tmp_path / "none" / "h.safetensors", make_file(3))
    with pytest.raises(HintFormatError, match="cannot be read"):
        wire.read(tmp_path / "none")


def test_bytes_a_token_are_what_the_file_grows_by():
    small, large = make_file(16), make_file(24)
    counted = sum(
        array.nbytes
        for site in large.sites
        for array in (site.bits if site.codes is None else site.codes, site.global_log2, site.global_scale)
        if array is not None
    ) + sum(24 * len(site.layers) * ((site.bits.shape[2] + 7) // 8) for site in large.sites)
    assert wire.bytes_per_token(wire.from_bytes(wire.to_bytes(large))) * 24 == counted
    assert wire.bytes_per_token(small) == wire.bytes_per_token(large)


def test_the_figures_of_the_35b_model():
    def total(layers, attention, scale):
        experts = wire.site_bytes_per_token(2048, layers, scale=scale, global_bytes=0)
        return experts + 2 * wire.site_bytes_per_token(512, attention, scale=scale, global_bytes=0)

    assert total(40, 10, "lsb") == 12_240
    assert total(40, 10, "byte") == 17_280
    assert total(20, 5, "byte") == 8_640


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": np.zeros(11, dtype=np.int64)}, "token_ids"),
        ({"sites": (make_site("q", 11, (0,), 4, 1),)}, "sites"),
        ({"sites": (make_site("k", 11, (0,), 4, 1), make_site("k", 11, (1,), 4, 1))}, "sites"),
        ({"sites": (make_site("k", 11, (1, 0), 4, 1),)}, "k.layers"),
        ({"sites": (make_site("k", 11, (), 4, 1),)}, "k.layers"),
        ({"sites": (make_site("k", 10, (0,), 4, 1),)}, "k.bits"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, present=np.ones(10, dtype=bool)),)}, "k.present"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, scale_kind="x"),)}, "k.scale_kind"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, global_log2=np.zeros((11, 1), dtype=np.int8)),)}, "k.global_log2"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, global_scale=np.zeros((11, 1, 2), "f4")),)}, "k.global_scale"),
        (
            {
                "sites": (
                    make_site(
                        "k",
                        11,
                        (0,),
                        4,
                        1,
                        global_log2=np.zeros((11, 1, 1), dtype=np.int8),
                        global_scale=np.ones((11, 1, 1), dtype=np.float32),
                    ),
                )
            },
            "k.global_scale",
        ),
        ({"sites": (make_site("k", 11, (0,), 4, 1, groups=3),)}, "k.groups"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, groups=0),)}, "k.groups"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, scales=None),)}, "k.scales"),
        ({"sites": (make_site("k", 11, (0,), 4, 1, scale_kind="none"),)}, "k.scales"),
        ({"logprobs": np.zeros(10, dtype=np.float32)}, "logprobs"),
        ({"routed_experts": np.zeros((10, 2, 2), dtype=np.int32)}, "routed_experts"),
        ({"routed_experts": None}, "routed_present"),
        ({"weight_versions": ((0, 5, "1"),)}, "weight_versions"),
        ({"weight_versions": ((0, 5, "1"), (6, 11, "2"))}, "weight_versions"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(changes, field):
    with pytest.raises(HintFormatError) as caught:
        make_file(11, **changes)
    assert caught.value.field == field


def test_a_site_is_found_by_name():
    hints = make_file()
    assert hints.site("v") is hints.sites[2]
    with pytest.raises(HintFormatError, match="it has experts_in, k, v, experts_mid"):
        hints.site("q")


def test_empty_capture_is_an_engine_error():
    hints = make_file()
    wire.require_nonzero(hints)
    with pytest.raises(EngineError, match="no site"):
        wire.require_nonzero(make_file(sites=()))
    k = hints.site("k")
    for broken, message in [
        (dataclasses.replace(k, bits=np.zeros_like(k.bits)), "every bit of k is zero"),
        (dataclasses.replace(k, present=np.zeros_like(k.present)), "every row of k is missing"),
    ]:
        with pytest.raises(EngineError, match=message):
            wire.require_nonzero(make_file(sites=(hints.site("v"), broken)))


def test_the_format_needs_no_torch():
    code = "import sys, trace_serve.hints.wire, trace_serve.hints.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
