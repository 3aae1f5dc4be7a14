"""What docs/hints.md says is what the product writes, reads and refuses: a reader written from it alone agrees."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import second_reader
from hint_factory import RECIPE_ID, make_file
from hint_mutations import hint_files, hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from second_reader import Refused

from trace_serve.errors import HintFormatError
from trace_serve.hints import wire

DATA = wire.to_bytes(make_file(9), scale="byte")
SCALES = st.sampled_from(["lsb", "byte", "none"])
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(hint_files(), SCALES)
def test_it_finds_in_every_kind_of_file_what_was_written(hints: wire.HintFile, scale: str) -> None:
    data = wire.to_bytes(hints, scale=scale)
    found, own = second_reader.read(data, RECIPE_ID, hints.token_ids.tolist()), wire.from_bytes(data)
    for key in ("rows", "first_token", "next_token_id", "model_digest", "recipe_id"):
        assert found[key] == getattr(own, key) == getattr(hints, key)
    assert tuple(found["weight_versions"]) == own.weight_versions == hints.weight_versions
    assert list(found["sites"]) == sorted(site.name for site in hints.sites)
    for site in hints.sites:
        got, here = found["sites"][site.name], own.site(site.name)
        assert (tuple(got["layers"]), got["groups"]) == (site.layers, site.groups) == (here.layers, here.groups)
        assert np.array_equal(got["present"], site.present)
        rows = site.present
        bits = (site.bits[..., None] >> np.arange(16) & 1).reshape(*site.bits.shape[:2], site.values)
        assert np.array_equal(got["bits"][rows], bits[rows])
        assert np.array_equal(here.bits[rows], site.bits[rows])
        assert ("codes" in got) == (site.codes is not None) == (here.codes is not None)
        if site.codes is not None and here.codes is not None:
            nibbles = np.stack((site.codes & 15, site.codes >> 4), axis=-1).reshape(got["codes"].shape)
            assert np.array_equal(got["codes"][rows], nibbles[rows])
            assert np.array_equal(here.codes[rows], site.codes[rows])
        assert ("scales" in got) == (scale != "none")
        if scale != "none" and site.scales is not None:
            assert np.array_equal(got["scales"][rows], site.scales[rows] & (1 if scale == "lsb" else 0xFF))
        if site.global_log2 is not None:
            assert np.array_equal(np.log2(got["global_scale"][rows]), site.global_log2[rows])
        if site.global_scale is not None:
            assert np.array_equal(got["global_scale"][rows], site.global_scale[rows])
    for name, mine in (("logprobs", hints.logprobs), ("routed_experts", hints.routed_experts)):
        assert (found[name] is None) == (mine is None)
    if hints.logprobs is not None:
        assert np.array_equal(found["logprobs"], hints.logprobs, equal_nan=True)
    if hints.routed_experts is not None:
        known = found["routed_present"]
        assert np.array_equal(
            known, np.ones(hints.rows, bool) if hints.routed_present is None else hints.routed_present
        )
        assert np.array_equal(found["routed_experts"][known], hints.routed_experts[known])


def agree(data: bytes) -> None:
    """Both read it, or both refuse it."""

    def verdict(read: Callable[[bytes], object], refusal: type[Exception]) -> str:
        try:
            read(data)
        except refusal as exc:
            return f"refuses it: {exc}"
        return "reads it"

    document, product = verdict(second_reader.read, Refused), verdict(wire.from_bytes, HintFormatError)
    assert document.split()[0] == product.split()[0], f"by the document a reader {document}; the product {product}"


@settings(max_examples=int(os.environ.get("HINT_FUZZ_EXAMPLES", "400")), deadline=None, suppress_health_check=SLOW)
@given(hostile(DATA))
def test_it_refuses_what_the_product_refuses(data: bytes) -> None:
    agree(data)


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_it_refuses_it_in_files_of_every_kind(data: st.DataObject) -> None:
    agree(data.draw(hostile(wire.to_bytes(data.draw(hint_files()), scale=data.draw(SCALES)))))


def test_it_refuses_another_recipe_and_other_tokens() -> None:
    with pytest.raises(Refused, match="recipe"):
        second_reader.read(DATA, "sha256:" + "0" * 64)
    with pytest.raises(Refused, match="other tokens"):
        second_reader.read(DATA, None, [1] * 9)
