"""What cannot be right with an FP4 recipe is refused by the name of SGLang's argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trace_serve.engine import refusals
from trace_serve.errors import ConfigError

DEFAULTS: dict[str, Any] = {"disaggregation_mode": "null", "moe_a2a_backend": "none"}


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**(DEFAULTS | changed))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_hisparse", True),
        ("enable_unified_cache_external_linker", True),
        ("disaggregation_decode_enable_offload_kvcache", True),
        ("disaggregation_mode", "prefill"),
        ("disaggregation_mode", "decode"),
        ("speculative_algorithm", "EAGLE"),
        ("dllm_algorithm", "x"),
        ("moe_a2a_backend", "deepep"),
        ("ep_size", 2),
        ("ep_num_redundant_experts", 4),
        ("enable_eplb", True),
        ("pp_size", 2),
        ("dp_size", 2),
    ],
)
def test_a_mode_in_which_hints_would_be_wrong_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        refusals.refuse(arguments(**{argument: value}))
    flag = "--" + argument.replace("_", "-")
    assert refused.value.field == flag
    assert flag in str(refused.value)


def test_the_defaults_are_served() -> None:
    refusals.refuse(arguments(ep_size=1, pp_size=1, dp_size=1, enable_hierarchical_cache=False))


def test_every_argument_is_one_that_sglang_has() -> None:
    from sglang.srt.server_args import ServerArgs

    known = {name for kind in ServerArgs.__mro__ for name in getattr(kind, "__annotations__", {})}
    assert set(refusals.ARGUMENTS) <= known
