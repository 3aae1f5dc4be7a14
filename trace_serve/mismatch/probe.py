"""Which hints a model needs, from what it loses without some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trace_serve.mismatch.variants import Variant
from trace_serve.plan.schemes import scheme
from trace_serve.policy.dims import ModelDims

if TYPE_CHECKING:
    from trace_serve.mismatch.run import Row

ENOUGH = 0.95
"""Share of the gain in KL, nearest rounding to hints everywhere, that a smaller choice has to keep."""


def hint_bytes(dims: ModelDims, variant: Variant) -> float:
    """Bytes a token of the default scheme for the layers and sites that a variant follows, `experts_mid` left out.

    Raises:
        KeyError: a scheme of that name is no longer known.
    """
    chosen = variant.layers(dims.layers)
    attention = sum(layer in chosen for layer in dims.attention_layers)
    sites = {"experts_in", "k", "v"} if variant.sites is None else set(variant.sites)
    values = (len(chosen) * dims.hidden if "experts_in" in sites else 0) + len(sites & {"k", "v"}) * (
        attention * dims.kv_values // 2
    )
    return values * scheme("default").bits / 8


def advice(dims: ModelDims, nearest: Row, everything: Row, probed: Sequence[Row]) -> str:
    """The cheapest choice of layers and sites that loses little against hints in all of them, with its cost."""
    full = hint_bytes(dims, everything.variant)
    most = everything.distance.kl
    limit = most + (1 - ENOUGH) * max(nearest.distance.kl - most, 0.0)
    cheaper = [row for row in probed if hint_bytes(dims, row.variant) < full]
    good = [row for row in cheaper if row.distance.kl <= limit]
    if not good:
        return (
            f"every layer and site needs hints ({full:,.0f} B a token): each smaller choice that was tried loses more "
            f"than {1 - ENOUGH:.0%} of the gain in KL"
        )
    best = min(good, key=lambda row: hint_bytes(dims, row.variant))
    return (
        f"{best.variant.label} is enough: KL {best.distance.kl:.4f} against {most:.4f} with all hints and "
        f"{nearest.distance.kl:.4f} with none, for {hint_bytes(dims, best.variant):,.0f} of {full:,.0f} B a token"
    )
