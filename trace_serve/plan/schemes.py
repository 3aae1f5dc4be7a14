"""Ways to tell a trainer what the rollout rounded to, and what each costs.

Repaired shares and KL were measured once on SmolLM2-135M made into a mixture of four experts, every expert and K/V in
NVFP4; they say which schemes work, not how a larger model fares.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_serve.policy.dims import ModelDims


@dataclass(frozen=True)
class Scheme:
    """One way.

    Attributes:
        key, label: for machines and people.
        bits: a quantized value.
        deeper_half: only layers L // 2 and on.
        repaired: share of differing codes that it repairs, as measured.
        kl: KL divergence to the rollout that was left, as measured; None where it was not.
        offered: whether the engine exports it, or `hints pack` makes it of what the engine exports.
    """

    key: str
    label: str
    bits: float
    deeper_half: bool
    repaired: str
    kl: float | None
    offered: bool

    def bytes_per_token(self, model: ModelDims) -> float:
        """Bytes a token; expert inputs, K and V."""
        return model.hinted_values(model.layers // 2 if self.deeper_half else 0) * self.bits / 8


# "bit" is the lowest of a code, "scale bit" that of a block's E4M3 byte; the deeper half is the paper's choice; the
# bound is that of a trainer whose upstream layers round as the rollout did.
SCHEMES = (
    Scheme("full", "full codes", 4.5, False, "100 %", 0.0003, False),
    Scheme("paper", "bit + scale byte, deeper half", 1.5, True, "28 %", 0.36, True),
    Scheme("byte", "bit + scale byte", 1.5, False, "> 99.9 %", 0.0004, True),
    Scheme("default", "bit + scale bit (default)", 1.0625, False, "99.8 %", 0.0003, True),
    Scheme("syndrome", "syndrome of bits + scale bit (hints pack)", 0.278, False, "99.8 %", 0.0003, True),
    Scheme("bound", "Slepian-Wolf bound", 0.105, False, "-", None, False),
)


def scheme(key: str) -> Scheme:
    """The scheme of that key, one of `SCHEMES`."""
    return next(each for each in SCHEMES if each.key == key)
