"""Rounds a model's operands as the rollouts of its sequences did, from their hint files.

`HintedRounding` is a `Rounding` (`guided.hf.rounding`): what a fake-quantized transformers model asks for each operand.
Row t of a hint file is the token at position `first_token + t`; positions without one are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from trace_serve.errors import ConfigError, HintFormatError
from trace_serve.guided.outcomes import Outcomes, ScaleKind
from trace_serve.guided.quantize import Mode, guided_fake_quantize
from trace_serve.guided.rule import TAU_ALIGNED
from trace_serve.guided.syndrome import PackedBits
from trace_serve.hints.rows import HintFile, Site
from trace_serve.nvfp4 import fake_quantize, fake_quantize_tokens
from trace_serve.nvfp4.block_scale import Operand
from trace_serve.nvfp4.packing import unpack
from trace_serve.recipe import BLOCK, Recipe


@dataclass(frozen=True)
class _Layer:
    """One site and layer of one sequence: rows [T], blocks [B], groups [G]."""

    bits: Tensor
    scales: Tensor | None
    present: Tensor
    global_scale: Tensor | None
    codes: Tensor | None


class HintedRounding:
    """Guided rounding of a batch of sequences, one hint file each.

    Args:
        recipe: that of the rollouts; their files must name it.
        hints: a file a sequence of the batch, in its order; None rounds that sequence to nearest.
        tau: guard, see `rule`.
        layers: layers that are guided; None is every layer that the files have.
        sites: sites that are guided, of `experts_in`, `experts_mid`, `k` and `v`; None is every one that they have.
        device: of the model.
        mode: `guided`, or `replay` where the files have whole codes and scale bytes; see `quantize`.

    Raises:
        HintFormatError: a file was made under another recipe.
        ConfigError: a site is unknown.
    """

    def __init__(
        self,
        recipe: Recipe,
        hints: Sequence[HintFile | None],
        *,
        tau: float = TAU_ALIGNED,
        layers: Sequence[int] | None = None,
        sites: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
        mode: Mode = "guided",
    ) -> None:
        unknown = set(sites or ()) - {"experts_in", "experts_mid", "k", "v"}
        if unknown:
            raise ConfigError(
                f"sites: got {', '.join(sorted(unknown))}, expected experts_in, experts_mid, k or v", field="sites"
            )
        for each in hints:
            if each is not None and each.recipe_id != recipe.recipe_id:
                raise HintFormatError(
                    f"hint file recipe_id: got {each.recipe_id}, expected {recipe.recipe_id}; use hints of a rollout "
                    "under the same recipe",
                    field="recipe_id",
                )
        self._recipe, self._hints, self._tau, self._device = recipe, list(hints), tau, torch.device(device)
        self._mode: Mode = mode
        self._layers = None if layers is None else frozenset(layers)
        self._sites = None if sites is None else frozenset(sites)
        self._cache: dict[tuple[str, int], list[_Layer | None]] = {}
        self._packed = PackedBits(self._hints, recipe)
        self._first = self._count = 0

    def begin(self, first: int, count: int) -> None:
        """A pass over positions `first` to `first + count - 1` of every sequence starts."""
        self._first, self._count = first, count

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        """x [T, H], the rows of the pass, to the values the rollout kept."""
        static = self._recipe.experts_in_scale(layer)
        outcomes = self.outcomes("experts_in", layer, x)
        if outcomes is None:
            return fake_quantize_tokens(x, self._recipe, static_scale=static)
        return self._guided(x, outcomes, "activations", static)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """x [N, I], inputs of the second product of one expert; `places` among the routed experts of each row."""
        static = self._recipe.experts_mid_scale(layer)
        outcomes = self.outcomes("experts_mid", layer, x, rows, places)
        if outcomes is None:
            return fake_quantize_tokens(x, self._recipe, static_scale=static)
        return self._guided(x, outcomes, "activations", static)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        """K after position embedding [B, heads, T, D] of positions `first` on."""
        return self._cached("k", layer, x, first, self._recipe.kv_scales(layer)[0])

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        """V likewise."""
        return self._cached("v", layer, x, first, self._recipe.kv_scales(layer)[1])

    def outcomes(
        self, site: str, layer: int, x: Tensor, rows: Tensor | None = None, places: Tensor | None = None
    ) -> Outcomes | None:
        """What the rollouts decided about rows of the pass [N, K]; None where no file has the site and layer.

        Args:
            site: `experts_in` or `experts_mid`.
            layer: of the model.
            x: the operand.
            rows: int64 [N], the pass's rows; None is all, in order.
            places: int64 [N] among the routed experts of each row, for `experts_mid`.
        """
        rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
        return self._gather(site, layer, rows, x, places)

    def cached_outcomes(self, site: str, layer: int, x: Tensor, first: int) -> Outcomes | None:
        """The same for K or V [B, heads, T, D] of positions `first` on, as rows [B * T, heads * D]."""
        count = x.shape[2]
        flat = _by_token(x)
        rows = torch.arange(flat.shape[0], device=x.device)
        return self._gather(site, layer, rows, flat, first=first, count=count)

    def _guided(self, x: Tensor, outcomes: Outcomes, operand: Operand, scale: float | None) -> Tensor:
        return guided_fake_quantize(
            x, outcomes, self._recipe, operand=operand, global_scale=scale, mode=self._mode, tau=self._tau
        )

    def _cached(self, site: str, layer: int, x: Tensor, first: int, scale: float) -> Tensor:
        batch, heads, count, width = x.shape
        flat = _by_token(x)
        outcomes = self.cached_outcomes(site, layer, x, first)
        if outcomes is None:
            kept = fake_quantize(flat, scale, self._recipe, operand="kv")
        else:
            kept = self._guided(flat, outcomes, "kv", scale)
        return kept.reshape(batch, count, heads, width).transpose(1, 2)

    def _gather(
        self,
        site: str,
        layer: int,
        rows: Tensor,
        x: Tensor,
        places: Tensor | None = None,
        *,
        first: int | None = None,
        count: int | None = None,
    ) -> Outcomes | None:
        """Outcomes of rows of a pass, row r being position `first + r % count` of sequence `r // count`."""
        kept = self._site(site, layer)
        if not any(each is not None for each in kept):
            return None
        first, count = self._first if first is None else first, self._count if count is None else count
        sequence, position = rows // count, first + rows % count
        total, blocks = rows.shape[0], x.shape[-1] // BLOCK
        bits = torch.zeros(total, blocks, dtype=torch.int32, device=rows.device)
        scales = torch.zeros(total, blocks, dtype=torch.uint8, device=rows.device)
        present = torch.zeros(total, dtype=torch.bool, device=rows.device)
        global_scale = torch.ones(total, dtype=torch.float32, device=rows.device)
        replayed = self._mode == "replay"
        codes = torch.zeros(total, 8 * blocks, dtype=torch.uint8, device=rows.device) if replayed else None
        kind, own_scale = self._kind(site), True
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for index, each in enumerate(kept):
            if each is None:
                continue
            hints = self._hints[index]
            assert hints is not None
            at = position - hints.first_token
            mine = (sequence == index) & (at >= 0) & (at < each.present.shape[0])
            mine = mine.nonzero().squeeze(-1)
            at = at[mine]
            found[index] = mine, at
            self._check_width(site, each, blocks, places)
            block = self._blocks_of(blocks, None if places is None else places[mine])
            bits[mine] = _pick(each.bits[at], block)
            if codes is not None:
                codes[mine] = _codes(site, each, at, block)
            if each.scales is not None:
                scales[mine] = _pick(each.scales[at], block)
            present[mine] = each.present[at]
            if each.global_scale is not None:
                own_scale = False
                group = 0 if places is None else places[mine]
                global_scale[mine] = each.global_scale[at, group]
        outcomes = Outcomes(
            bits=bits,
            scales=None if kind == "none" else scales,
            scale_kind=kind,
            global_scale=None if own_scale else global_scale,
            present=present,
            codes=None if codes is None else unpack(codes),
        )
        self._packed.fill(site, layer, x, outcomes, found)
        return outcomes

    def _site(self, name: str, layer: int) -> list[_Layer | None]:
        if (self._sites is not None and name not in self._sites) or (
            self._layers is not None and layer not in self._layers
        ):
            return []
        if (name, layer) not in self._cache:
            self._cache[name, layer] = [self._read(each, name, layer) for each in self._hints]
        return self._cache[name, layer]

    def _read(self, hints: HintFile | None, name: str, layer: int) -> _Layer | None:
        site = next((each for each in hints.sites if each.name == name), None) if hints is not None else None
        if site is None or layer not in site.layers:
            return None
        index = site.layers.index(layer)
        device = self._device
        return _Layer(
            bits=torch.from_numpy(site.bits[:, index].astype(np.int32)).to(device),
            scales=None if site.scales is None else torch.from_numpy(site.scales[:, index].copy()).to(device),
            present=torch.from_numpy(site.present.copy()).to(device),
            global_scale=_global_scale(site, index, device),
            codes=None if site.codes is None else torch.from_numpy(site.codes[:, index].copy()).to(device),
        )

    def _kind(self, name: str) -> ScaleKind:
        files = [each for each in self._hints if each is not None]
        kinds = {site.scale_kind for each in files for site in each.sites if site.name == name}
        if len(kinds) != 1:
            found = ", ".join(sorted(kinds))
            raise ConfigError(f"{name}.scale_kind: got {found}, expected the same in every file", field="scale")
        return cast("ScaleKind", kinds.pop())

    def _check_width(self, site: str, each: _Layer, blocks: int, places: Tensor | None) -> None:
        have = each.bits.shape[1]
        if (places is None and have != blocks) or have % blocks:
            raise HintFormatError(
                f"{site}: the hints have {have * BLOCK} values a row, the model {blocks * BLOCK}; use the model's own",
                field=site,
            )

    @staticmethod
    def _blocks_of(blocks: int, places: Tensor | None) -> Tensor | None:
        """Column indices [N, B] of the blocks of each row's expert; None takes every column."""
        if places is None:
            return None
        return places.unsqueeze(-1) * blocks + torch.arange(blocks, device=places.device)


def _by_token(x: Tensor) -> Tensor:
    """K or V [B, heads, T, D] to [B * T, heads * D]; the engine keeps the heads of a token one after the other."""
    return x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])


def _pick(rows: Tensor, columns: Tensor | None) -> Tensor:
    return rows if columns is None else rows.gather(1, columns)


def _codes(site: str, layer: _Layer, at: Tensor, columns: Tensor | None) -> Tensor:
    """Packed codes [N, 8 B] of the blocks that `columns` names."""
    if layer.codes is None:
        raise ConfigError(f"{site}.codes: mode replay needs whole codes; export hints with codes full", field="codes")
    kept = layer.codes[at]
    if columns is None:
        return kept
    blocks = kept.reshape(kept.shape[0], -1, BLOCK // 2)
    return blocks.gather(1, columns.unsqueeze(-1).expand(-1, -1, BLOCK // 2)).flatten(1)


def _global_scale(site: Site, index: int, device: torch.device) -> Tensor | None:
    if site.global_log2 is not None:
        exponents = torch.from_numpy(site.global_log2[:, index].astype(np.int32)).to(device)
        return torch.exp2(exponents.float())
    if site.global_scale is not None:
        return torch.from_numpy(site.global_scale[:, index].copy()).to(device)
    return None
