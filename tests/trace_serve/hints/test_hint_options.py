"""What a request or an operator may ask of hints, and what is refused by name."""

from __future__ import annotations

import pytest

from trace_serve.errors import ConfigError
from trace_serve.hints.options import HintOptions, Layers, from_settings, layers_of, parse


def test_a_word_is_the_sink_and_the_rest_is_the_engines_default() -> None:
    defaults = HintOptions(sites=("k",), layers=(1, 2), scale="byte")
    assert parse("file", defaults) == HintOptions(sink="file", sites=("k",), layers=(1, 2), scale="byte")


def test_an_object_changes_what_it_names() -> None:
    named = {"sites": ["v"], "layers": [0, 7], "codes": "full", "first_token": 5, "versions": "all"}
    options = parse(named, HintOptions())
    assert options == HintOptions(sites=("v",), layers=(0, 7), codes="full", first_token=5, versions="all")


@pytest.mark.parametrize(
    ("choice", "count", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        ("deeper-half", 40, tuple(range(20, 40))),
        ("deeper-half", 5, (2, 3, 4)),
        ("deeper-half", 1, (0,)),
        ((0, 2), 3, (0, 2)),
    ],
)
def test_a_layer_choice_means_these_layers(choice: Layers, count: int, expected: tuple[int, ...]) -> None:
    assert layers_of(choice, count) == expected


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers 0 to 2") as refused:
        layers_of((1, 3), 3)
    assert refused.value.field == "trace_hints.layers"


def test_an_operators_text_is_read() -> None:
    assert from_settings("k, v", "3,5", "full", "none") == HintOptions(
        sites=("k", "v"), layers=(3, 5), codes="full", scale="none"
    )
    assert from_settings("experts_mid", "deeper-half", "lsb", "lsb").layers == "deeper-half"


@pytest.mark.parametrize(
    ("sites", "layers", "codes", "scale", "field"),
    [
        ("q", "all", "lsb", "lsb", "hint_sites"),
        ("", "all", "lsb", "lsb", "hint_sites"),
        ("k,k", "all", "lsb", "lsb", "hint_sites"),
        ("k", "half", "lsb", "lsb", "hint_layers"),
        ("k", "2,1", "lsb", "lsb", "hint_layers"),
        ("k", "", "lsb", "lsb", "hint_layers"),
        ("k", "all", "bits", "lsb", "hint_codes"),
        ("k", "all", "lsb", "bits", "hint_scale"),
    ],
)
def test_an_operators_mistake_is_refused_by_setting(
    sites: str, layers: str, codes: str, scale: str, field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        from_settings(sites, layers, codes, scale)
    assert refused.value.field == field
