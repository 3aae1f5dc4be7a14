"""Every place in SGLang that the patch layer relies on, by name, and whether it is what we expect.

`check_all` (doctor, and `python -m trace_serve.engine.seams --json`) looks at an installation; `check_process` looks at
the running process of an engine after the plugin ran. SGLang only logs a hook whose target is gone, so a start that
does not ask would serve BF16 and call it FP4.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from trace_serve.errors import SeamError


@dataclass(frozen=True)
class SeamStatus:
    """Attributes:
    name: the seam's name in errors and in `doctor`.
    kind: `patch`, `hook` or `registry`.
    target: dotted path or file in SGLang.
    ok: whether it is as expected.
    detail: what was found, and what it costs when it is missing.
    """

    name: str
    kind: str
    target: str
    ok: bool
    detail: str


def _status(name: str, kind: str, target: str, check: Callable[[], str | None], why: str) -> SeamStatus:
    """`check` returns None when all is well, or what is wrong."""
    try:
        problem = check()
    except (ImportError, AttributeError, TypeError, OSError, ValueError) as exc:
        problem = f"{type(exc).__name__}: {exc}"
    return SeamStatus(name, kind, target, problem is None, "ok" if problem is None else f"{problem} ({why})")


def _hook_exists(target: str, expected: tuple[str, ...] | None) -> str | None:
    function = pkgutil.resolve_name(target)
    got = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    if expected is not None and got != expected:
        return f"parameters are {got}, expected {expected}"
    return None


def _hook_applied(target: str) -> str | None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return None if target in HookRegistry._patched else "the hook is not applied"


def _bootstrap_patched() -> str | None:
    import sglang

    source = inspect.getsource(sglang)
    return None if "sglang.bootstrap" in source else "not patched; run `trace-serve patch apply`"


def _mixtral_patched() -> str | None:
    from sglang.srt.model_loader.utils import get_model_architecture

    found = "supports_mixtral_moe" in inspect.getsource(get_model_architecture)
    return None if found else "not patched; run `trace-serve patch apply`"


def _flush_patched() -> str | None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    source = inspect.getsource(inspect.unwrap(SchedulerWeightUpdaterManager.end_weight_update))
    return None if "flush_cache" in source else "not patched; run `trace-serve patch apply`"


def _stream_logprobs_patched() -> str | None:
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    source = "".join(inspect.getsource(OpenAIServingChat).split())
    found = "ifremaining_logprobsisnotNone:" in source
    return None if found else "not patched; run `trace-serve patch apply`"


def _host_memory_patched() -> str | None:
    from sglang.srt.mem_cache.pool_host.common import alloc_with_host_register

    found = "torch.cuda.is_available()" in inspect.getsource(alloc_with_host_register)
    return None if found else "not patched; run `trace-serve patch apply`"


def _tied_patched(module: str, attribute: str) -> Callable[[], str | None]:
    def check() -> str | None:
        source = inspect.getsource(getattr(pkgutil.resolve_name(module), attribute))
        return None if "tie_word_embeddings" in source else "not patched; run `trace-serve patch apply`"

    return check


def _olmoe_config_patched() -> str | None:
    from sglang.srt.models.olmoe import OlmoeAttention

    source = inspect.getsource(OlmoeAttention.__init__)
    found = "self.total_num_kv_heads * self.head_dim" in source
    return None if found else "not patched; run `trace-serve patch apply`"


_PATCHES: tuple[tuple[str, str, Callable[[], str | None], str], ...] = (
    ("bootstrap", "sglang/__init__.py", _bootstrap_patched, "a spawned child cannot import sgl_kernel on a CPU"),
    ("mixtral-moe", "sglang/srt/model_loader/utils.py", _mixtral_patched, "Mixtral loads as the dense class"),
    (
        "flush-after-update",
        "sglang/srt/managers/scheduler_components/weight_updater.py",
        _flush_patched,
        "KV of old weights serves new ones",
    ),
    (
        "host-memory",
        "sglang/srt/mem_cache/pool_host/common.py",
        _host_memory_patched,
        "the CPU engine dies when routed experts are returned",
    ),
    (
        "stream-logprobs",
        "sglang/srt/entrypoints/openai/serving_chat.py",
        _stream_logprobs_patched,
        "a stream lacks log-probabilities of its tokens",
    ),
    (
        "tied-embeddings-mixtral",
        "sglang/srt/models/mixtral.py",
        _tied_patched("sglang.srt.models.mixtral", "MixtralForCausalLM"),
        "random logits for a tied head",
    ),
    (
        "tied-embeddings-olmoe",
        "sglang/srt/models/olmoe.py",
        _tied_patched("sglang.srt.models.olmoe", "OlmoeForCausalLM"),
        "random logits for a tied head",
    ),
    (
        "olmoe-config",
        "sglang/srt/models/olmoe.py",
        _olmoe_config_patched,
        "OLMoE with fewer KV heads does not load, and its norms ignore the config",
    ),
)

_REGISTRIES: tuple[tuple[str, str, type, str], ...] = (
    ("quantization-methods", "sglang.srt.layers.quantization.QUANTIZATION_METHODS", dict, "experts stay BF16"),
    ("quantization-methods-cpu", "sglang.srt.layers.quantization.CPU_QUANTIZATION_METHODS", dict, "experts stay BF16"),
    ("quantization-choices", "sglang.srt.arg_groups.choices.QUANTIZATION_CHOICES", list, "the flag is refused"),
    (
        "kv-registry",
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.KV_CACHE_QUANT_REGISTRY",
        dict,
        "KV stays BF16",
    ),
    (
        "kv-access-registry",
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.KV_CACHE_ATTENTION_ACCESS_REGISTRY",
        dict,
        "attention cannot read the pool",
    ),
)


def _is_a(target: str, kind: type) -> str | None:
    value = pkgutil.resolve_name(target)
    return None if isinstance(value, kind) else f"is a {type(value).__name__}, expected a {kind.__name__}"


def _holds_ours(target: str) -> str | None:
    from trace_serve.engine import spec

    value: Any = pkgutil.resolve_name(target)
    return None if spec.QUANTIZATION in value else "our entry is missing"


def check_all() -> list[SeamStatus]:
    """Looks at the installed SGLang: patched sources, hook targets and their signatures, registries."""
    from trace_serve.engine import hooks

    return [
        *(_status(name, "patch", target, check, why) for name, target, check, why in _PATCHES),
        *(
            _status(hook.name, "hook", hook.target, partial(_hook_exists, hook.target, hook.parameters), hook.why)
            for hook in hooks.HOOKS
        ),
        *(
            _status(name, "registry", target, partial(_is_a, target, kind), why)
            for name, target, kind, why in _REGISTRIES
        ),
    ]


def check_process() -> list[SeamStatus]:
    """`check_all`, and that in this process every hook is applied and every registry holds our entry."""
    from trace_serve.engine import hooks

    live = [
        *(
            _status(hook.name, "hook", hook.target, partial(_hook_applied, hook.target), hook.why)
            for hook in hooks.HOOKS
        ),
        *(_status(name, "registry", target, partial(_holds_ours, target), why) for name, target, _, why in _REGISTRIES),
    ]
    broken = {status.name: status for status in live if not status.ok}
    return [broken.get(status.name, status) for status in check_all()]


def process_summary() -> dict[str, str]:
    """`check_process` by name: `ok`, or what is wrong."""
    return {status.name: "ok" if status.ok else status.detail for status in check_process()}


def require(statuses: list[SeamStatus]) -> None:
    """Raises:
    SeamError: naming every seam that is not as expected.
    """
    broken = [status for status in statuses if not status.ok]
    if broken:
        found = "; ".join(f"seam {status.name} ({status.target}): {status.detail}" for status in broken)
        raise SeamError(f"{found}. Run `trace-serve doctor`")


def main() -> int:
    """Prints the installation's seams; exit code 1 when one is missing."""
    statuses = check_all()
    if "--json" in sys.argv[1:]:
        print(json.dumps([asdict(status) for status in statuses]))
    else:
        for status in statuses:
            print(f"{'ok     ' if status.ok else 'missing'} {status.kind:8} {status.name:28} {status.detail}")
    return 0 if all(status.ok for status in statuses) else 1


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.exit(main())
