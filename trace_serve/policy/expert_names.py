"""How checkpoints name the three matrices of a routed expert."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
_OWN_NAMES = ({"gate": "w1", "up": "w3", "down": "w2"}, {kind: f"{kind}_proj" for kind in ("gate", "up", "down")})
_SIBLINGS = {"gate": "up", "up": "gate"}
_FUSED = re.compile(r"((?:.*\.)?layers\.(\d+)\.(?:\w+\.)*experts)\.(gate_up|down)_proj")
_EXPERT = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:\w+\.)*experts\.(\d+)\.(w[123]|(?:gate|up|down)_proj)")


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of one routed expert.

    Attributes:
        module: its module's name in the checkpoint, without `.weight`.
        layer: index of the decoder layer.
        expert: index of the expert in its layer.
        projection: `gate`, `up` (both [intermediate, hidden]) or `down` ([hidden, intermediate]).
        own_name: last part of the module's name: `w1`, `w2`, `w3` (Mixtral) or `gate_proj`, `up_proj`, `down_proj`.
    """

    module: str
    layer: int
    expert: int
    projection: str
    own_name: str

    @property
    def sibling(self) -> str | None:
        """The module that shares a global scale with this one: up for gate, gate for up, none for down."""
        other = _SIBLINGS.get(self.projection)
        return None if other is None else self.named(self.layer, self.expert, other)

    def named(self, layer: int, expert: int, projection: str) -> str:
        """The module of another matrix, under the naming of this one."""
        names = next(names for names in _OWN_NAMES if self.own_name in names.values())
        stem = self.module.removesuffix(f".{self.expert}.{self.own_name}")
        head, _, tail = stem.partition(f"layers.{self.layer}.")
        return f"{head}layers.{layer}.{tail}.{expert}.{names[projection]}"


def parse(module: str) -> ExpertMatrix | None:
    """The routed expert's matrix that a module holds; None for any other module (shared experts included)."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return None
    layer, expert, own_name = match.groups()
    return ExpertMatrix(module, int(layer), int(expert), _PROJECTIONS[own_name], own_name)


@dataclass(frozen=True)
class FusedExperts:
    """One tensor that holds the same projections of all experts of a layer.

    Attributes:
        experts: name of the experts' module.
        layer: index of the decoder layer.
        projections: `("gate", "up")` for [E, 2 * intermediate, hidden], gate rows first, or `("down",)` for
            [E, hidden, intermediate].
    """

    experts: str
    layer: int
    projections: tuple[str, ...]

    def matrix(self, expert: int, projection: str) -> ExpertMatrix:
        """One of its matrices, under the name that packed checkpoints give it."""
        own_name = f"{projection}_proj"
        return ExpertMatrix(f"{self.experts}.{expert}.{own_name}", self.layer, expert, projection, own_name)


def parse_fused(tensor: str) -> FusedExperts | None:
    """The fused experts that a tensor holds, as Hugging Face saves those of Qwen3.5; None for any other tensor."""
    match = _FUSED.fullmatch(tensor)
    if match is None:
        return None
    experts, layer, kind = match.groups()
    return FusedExperts(experts, int(layer), ("gate", "up") if kind == "gate_up" else ("down",))
