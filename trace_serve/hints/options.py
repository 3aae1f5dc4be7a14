"""What a request may ask of its hints, and what the engine keeps at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_serve.errors import ConfigError
from trace_serve.hints.rows import CODE_KINDS, SCALE_KINDS, SITES

FIELD = "trace_hints"
DEFAULT_SITES = ("experts_in", "k", "v")
LAYER_WORDS = ("all", "deeper-half")
VERSIONS = ("current", "all")

Layers = str | tuple[int, ...]


@dataclass(frozen=True)
class HintOptions:
    """One request's hints.

    Attributes:
        sink: `inline`, `file`, `shm` or a URL, see `sinks.parse_target`.
        sites: some of `rows.SITES` that the engine keeps.
        layers: `all`, `deeper-half` (layers L // 2 to L - 1 of a model with L), or layer indices.
        codes: `lsb` or `full`: the lowest bit of each code, or all four bits, which a full replay takes.
        scale: `lsb`, `byte` or `none`: how much of each block scale is kept.
        first_token: position of the first row; rows before it are left out, as a later turn of a conversation wants.
        logprobs, routed_experts: whether they are on the rows too.
        versions: `current` marks rows of other weights than those now loaded as missing; `all` keeps them, and their
            versions are in the spans.
    """

    sink: str = "inline"
    sites: tuple[str, ...] = DEFAULT_SITES
    layers: Layers = "all"
    codes: str = "lsb"
    scale: str = "lsb"
    first_token: int = 0
    logprobs: bool = True
    routed_experts: bool = True
    versions: str = "current"

    def __post_init__(self) -> None:
        check_sites(self.sites, f"{FIELD}.sites")
        check_layer_choice(self.layers, f"{FIELD}.layers")
        _check_word(self.codes, CODE_KINDS, f"{FIELD}.codes")
        _check_word(self.scale, SCALE_KINDS, f"{FIELD}.scale")
        if type(self.first_token) is not int or not 0 <= self.first_token < 1 << 31:
            raise _bad("first_token", self.first_token, "a position in the sequence, from 0")
        for name in ("logprobs", "routed_experts"):
            if type(getattr(self, name)) is not bool:
                raise _bad(name, getattr(self, name), "true or false")
        if self.versions not in VERSIONS:
            raise _bad("versions", self.versions, f"one of {', '.join(VERSIONS)}")


def parse(value: Any, defaults: HintOptions) -> HintOptions:
    """Reads `trace_hints` of a request: the sink as a word or URL, or an object with any of the options.

    Raises:
        ConfigError: naming the option.
    """
    if isinstance(value, str):
        value = {"sink": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{FIELD}: got {_shown(value)}, expected a sink (inline, file, ...) or an object", field=FIELD
        )
    known = HintOptions.__dataclass_fields__
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise ConfigError(f"{FIELD}: unknown option {unknown[0]!r}, expected {', '.join(known)}", field=FIELD)
    given = {**{name: getattr(defaults, name) for name in known}, **value}
    for name in ("sites", "layers"):
        if isinstance(given[name], list):
            given[name] = tuple(given[name])
    return HintOptions(**given)


def from_settings(sites: str, layers: str, codes: str, scale: str) -> HintOptions:
    """What an operator gave as text: sites and layer indices separated by commas.

    Raises:
        ConfigError: `field` is `hint_sites`, `hint_layers`, `hint_codes` or `hint_scale`.
    """
    split = tuple(part.strip() for part in sites.split(","))
    check_sites(split, "hint_sites")
    parts = [part.strip() for part in layers.split(",")]
    chosen: Layers = tuple(map(int, parts)) if all(p.isascii() and p.isdecimal() for p in parts) else layers
    check_layer_choice(chosen, "hint_layers")
    _check_word(codes, CODE_KINDS, "hint_codes")
    _check_word(scale, SCALE_KINDS, "hint_scale")
    return HintOptions(sites=split, layers=chosen, codes=codes, scale=scale)


def layers_of(choice: Layers, layers: int) -> tuple[int, ...]:
    """The layer indices that a choice means in a model with that many layers.

    Raises:
        ConfigError: an index is not a layer of the model.
    """
    if choice == "all":
        return tuple(range(layers))
    if choice == "deeper-half":
        return tuple(range(layers // 2, layers))
    beyond = [i for i in choice if isinstance(i, int) and i >= layers]
    if beyond:
        raise ConfigError(
            f"{FIELD}.layers: got {beyond[0]}, expected layers 0 to {layers - 1} of this model", field=f"{FIELD}.layers"
        )
    return tuple(int(i) for i in choice)


def check_sites(sites: Any, field: str) -> None:
    """Raises ConfigError unless `sites` is a non-empty tuple of distinct sites."""
    ok = isinstance(sites, tuple) and sites and all(isinstance(s, str) and s in SITES for s in sites)
    if not ok or len(set(sites)) != len(sites):
        raise ConfigError(f"{field}: got {_shown(sites)}, expected some of {', '.join(SITES)}", field=field)


def check_layer_choice(layers: Any, field: str) -> None:
    """Raises ConfigError unless `layers` is `all`, `deeper-half` or an ascending tuple of layer indices."""
    ascending = (
        isinstance(layers, tuple)
        and layers
        and all(type(i) is int and 0 <= i < 1 << 16 for i in layers)
        and list(layers) == sorted(set(layers))
    )
    if not ascending and not (isinstance(layers, str) and layers in LAYER_WORDS):
        raise ConfigError(
            f"{field}: got {_shown(layers)}, expected {', '.join(LAYER_WORDS)} or ascending layer indices", field=field
        )


def _check_word(word: Any, known: tuple[str, ...], field: str) -> None:
    if not isinstance(word, str) or word not in known:
        raise ConfigError(f"{field}: got {_shown(word)}, expected one of {', '.join(known)}", field=field)


def _bad(option: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{FIELD}.{option}: got {_shown(value)}, expected {expected}", field=f"{FIELD}.{option}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
