import hashlib
import json

import numpy as np
import pytest
from hint_factory import make_file, same
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_serve.errors import HintFormatError
from trace_serve.hints import container, wire

HINTS = make_file(9)
DATA = wire.to_bytes(HINTS)
HEADER_END = 8 + int.from_bytes(DATA[:8], "little")


def assert_refused_or_same(data: bytes) -> None:
    try:
        back = wire.from_bytes(data)
    except HintFormatError:
        return
    assert same(HINTS, back)


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(position, change):
    damaged = bytearray(DATA)
    damaged[position] ^= change
    assert_refused_or_same(bytes(damaged))


def test_every_single_bit_of_the_payload_is_guarded():
    for position in range(HEADER_END, len(DATA)):
        damaged = bytearray(DATA)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(HintFormatError, match="checksum"):
            wire.from_bytes(bytes(damaged))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) - 1))
def test_a_cut_file_is_refused(length):
    with pytest.raises(HintFormatError):
        wire.from_bytes(DATA[:length])


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_trailing_bytes_are_refused(tail):
    with pytest.raises(HintFormatError, match="after the last tensor"):
        wire.from_bytes(DATA + tail)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_other_bytes_are_refused(data):
    with pytest.raises(HintFormatError):
        wire.from_bytes(data)


def reforge(change):
    """The file with its metadata changed and every checksum made right again."""
    arrays, metadata = container.decode(DATA)
    arrays, metadata = dict(arrays), dict(metadata)
    change(arrays, metadata)
    return container.encode(arrays, metadata)


def set_key(key, value):
    return lambda arrays, metadata: metadata.__setitem__(key, value)


def set_site(**changes):
    def change(arrays, metadata):
        sites = json.loads(metadata["sites"])
        sites["k"] |= changes
        metadata["sites"] = json.dumps(sites)

    return change


def set_array(name, array):
    return lambda arrays, metadata: arrays.__setitem__(name, array)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_key("schema_version", "2"), "schema_version"),
        (set_key("format", "other"), "schema_version"),
        (set_key("bit_order", "big"), "bit_order"),
        (set_key("extra", "1"), "metadata"),
        (lambda arrays, metadata: metadata.pop("model_digest"), "metadata"),
        (set_key("rows", "10"), "token_ids"),
        (set_key("rows", "-1"), "rows"),
        (set_key("rows", "99999999999"), "rows"),
        (set_key("first_token", "x"), "first_token"),
        (set_key("next_token_id", '"a"'), "next_token_id"),
        (set_key("token_ids_digest", "sha256:0"), "token_ids"),
        (set_key("weight_versions", '[[0,4,"1"]]'), "weight_versions"),
        (set_key("weight_versions", "{}"), "weight_versions"),
        (set_key("sites", "[]"), "sites"),
        (set_key("sites", "{}"), "tensors"),
        (set_site(values=10**18), "k.scale_lsb"),
        (set_site(values=7), "sites"),
        (set_site(values="64"), "sites"),
        (set_site(codes="full"), "k.codes"),
        (set_site(codes="both"), "sites"),
        (set_site(codes=None), "sites"),
        (set_site(scale=["lsb"]), "sites"),
        (set_site(extra=1), "sites"),
        (set_site(scale="both"), "sites"),
        (set_site(scale="byte"), "k.scale"),
        (set_site(global_scale="log2"), "k.global_log2"),
        (set_site(global_scale="fp32"), "k.global_scale"),
        (set_site(global_scale="fp64"), "sites"),
        (set_site(groups=3), "k.groups"),
        (set_site(groups="2"), "k.groups"),
        (set_site(scale="none"), "tensors"),
        (set_site(layers=[5, 0]), "k.layers"),
        (set_site(layers=[]), "k.layers"),
        (set_site(layers=3), "sites"),
        (set_site(layers=[0, 5, 6]), "k.scale_lsb"),
        (set_array("unknown", np.zeros(3, dtype=np.uint8)), "tensors"),
        (set_array("k.present", np.zeros(1, dtype=np.uint8)), "k.present"),
        (set_array("k.present", np.full(2, 255, dtype=np.uint8)), "k.present"),
        (set_array("routed_experts", np.zeros((9, 6, 2), dtype=np.int32)), "routed_experts"),
        (set_key("next_token_id", str(-(1 << 31) - 1)), "next_token_id"),
        (set_key("next_token_id", str(1 << 31)), "next_token_id"),
        (set_key("weight_versions", r'[[0,9,"\ud800"]]'), "weight_versions"),
        (lambda arrays, metadata: arrays.pop("k.bits"), "k.bits"),
        (lambda arrays, metadata: arrays.pop("logprobs.present"), "logprobs.present"),
        (set_array("logprobs.present", np.zeros(2, dtype=np.uint8)), "logprobs"),
    ],
)
def test_a_consistent_lie_is_refused_by_field(change, field):
    with pytest.raises(HintFormatError) as caught:
        wire.from_bytes(reforge(change))
    assert caught.value.field == field


def rewrite_header(change):
    header = json.loads(DATA[8:HEADER_END])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + DATA[HEADER_END:]


def test_a_header_in_another_order_and_spacing_reads_the_same():
    assert same(HINTS, wire.from_bytes(rewrite_header(lambda header: None)))


def test_shapes_that_lie_about_the_bytes_are_refused():
    def grow(header):
        header["k.bits"]["shape"] = [10**12, 10**12, 10**12]

    def negative(header):
        header["k.bits"]["shape"] = [-9, -2, 4]

    def overlap(header):
        header["k.present"]["data_offsets"] = header["v.present"]["data_offsets"]

    def odd_type(header):
        header["k.bits"]["dtype"] = "F64"

    for change in (grow, negative, overlap, odd_type):
        with pytest.raises(HintFormatError):
            wire.from_bytes(rewrite_header(change))


def test_repeated_keys_are_refused():
    text = DATA[8:HEADER_END].rstrip().decode()
    text = '{"token_ids":{},' + text[1:]
    data = len(text).to_bytes(8, "little") + text.encode() + DATA[HEADER_END:]
    with pytest.raises(HintFormatError, match="repeated key"):
        wire.from_bytes(data)


def test_the_checksum_is_the_documented_one():
    _, metadata = container.decode(DATA)
    header = json.loads(DATA[8:HEADER_END])
    raw = header["__metadata__"]
    begin, end = header["v.codes"]["data_offsets"]
    payload = DATA[HEADER_END + begin : HEADER_END + end]
    assert json.loads(raw["tensors"])["v.codes"]["sha256"] == hashlib.sha256(payload).hexdigest()
    rest = {key: value for key, value in raw.items() if key != "metadata_sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    assert raw["metadata_sha256"] == hashlib.sha256(canonical).hexdigest()
    assert metadata["rows"] == "9"
