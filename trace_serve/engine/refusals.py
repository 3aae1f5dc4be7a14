"""Modes of SGLang under which hints or the packed cache could not be right, refused by name before a model loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class _Refusal:
    argument: str
    bad: Callable[[Any], bool]
    why: str


def _several(value: Any) -> bool:
    return int(value) > 1


_MOVES = "KV slots move out of the pool and back into others, and the rows of their tokens stay behind"

_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal("enable_hierarchical_cache", bool, _MOVES),
    _Refusal("enable_lmcache", bool, _MOVES),
    _Refusal("enable_flexkv", bool, _MOVES),
    _Refusal("enable_hisparse", bool, _MOVES),
    _Refusal("enable_unified_cache_external_linker", bool, _MOVES),
    _Refusal("disaggregation_decode_enable_offload_kvcache", bool, _MOVES),
    _Refusal(
        "disaggregation_mode",
        lambda value: value != "null",
        "the rows of a prompt would be in another engine than those of its answer",
    ),
    _Refusal(
        "speculative_algorithm",
        lambda value: value is not None,
        "slots are written for drafted tokens that are not accepted, and by a second model",
    ),
    _Refusal("dllm_algorithm", lambda value: value is not None, "a token is computed by several passes"),
    _Refusal(
        "moe_a2a_backend",
        lambda value: value != "none",
        "its dispatch quantizes the experts' inputs by rules of its own",
    ),
    _Refusal("ep_size", _several, "a rank would not see the outcomes of experts on another"),
    _Refusal("ep_num_redundant_experts", bool, "routed experts would be numbered by place, not by expert"),
    _Refusal("enable_eplb", bool, "routed experts would be numbered by place, not by expert"),
    _Refusal("pp_size", _several, "the rows of a layer would be in another process than the answer"),
    _Refusal("dp_size", _several, "several schedulers would share one report; start several engines instead"),
)
"""What cannot be right with an FP4 recipe, by argument of SGLang's server."""


def refuse(server_args: Any) -> None:
    """Checks the resolved arguments of SGLang's server; called for engines with an FP4 recipe.

    Raises:
        ConfigError: naming the argument, why it cannot be right, and what to do.
    """
    for refusal in _REFUSALS:
        value = getattr(server_args, refusal.argument, None)
        if value is not None and refusal.bad(value):
            flag = f"--{refusal.argument.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: got {value!r}; with an FP4 recipe {refusal.why}. Leave it at its default, or serve with "
                "--recipe bf16",
                field=flag,
            )


ARGUMENTS = tuple(refusal.argument for refusal in _REFUSALS)
"""Arguments that are looked at; one that SGLang renamed would not be refused any more, so a test compares them."""
