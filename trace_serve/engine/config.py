"""How to run one model on an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trace_serve.hints.options import HintOptions
from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class EngineConfig:
    """How to run one model.

    Attributes:
        model: directory with Hugging Face model files.
        recipe: numeric choices; None is BF16, the training-time version.
        hint_dir: where requests for hint files are written; None refuses them.
        hints: sites and layers that the engine keeps, and the options of a request that does not say otherwise.
        hint_urls: URL prefixes that a request may name as the place of its hints.
        hint_shm: whether hints may go to shared memory.
        hint_ttl_s: age at which a hint file is removed; None keeps it.
        hint_dir_bytes: size of the hint directory above which its oldest files are removed; None does not limit it.
        log_path: file that receives the engine's output; None is `engine.log` in its run directory.
        policy_digest: digest of `model` when the caller has it already; None computes it.
        max_total_tokens: size of the KV pool in tokens; None is what the memory holds.
        max_running_requests: requests decoded together.
        chunked_prefill_size: tokens a prefill pass; longer prompts are cut.
        context_length: longest prompt plus answer; None takes the model's own.
        stall_limit_s: seconds without a sign of life after which the scheduler counts as frozen.
        refit_timeout_s: seconds without a word from its trainer after which a weight update counts as failed.
        partial_refit: whether a weight update may leave tensors out, because they are not trained.
        tensor_parallel: ranks that share the model, each with a core of its own on the CPU; it has to divide the KV
            heads or be divided by them, and leave each expert a multiple of 16 intermediate values.
        device: `cpu` or `cuda`.
        host: address that the engine listens on. Whoever reaches it and has its key can replace the weights.
        port: port that it listens on; 0 takes a free one.
        metrics: whether SGLang's own Prometheus metrics are on its `/metrics`.
        extra_args: further arguments of SGLang's server, as on its command line.
    """

    model: Path
    recipe: Recipe | None = None
    hint_dir: Path | None = None
    hints: HintOptions = field(default_factory=HintOptions)
    hint_urls: tuple[str, ...] = ()
    hint_shm: bool = False
    hint_ttl_s: float | None = None
    hint_dir_bytes: int | None = None
    log_path: Path | None = None
    policy_digest: str | None = None
    max_total_tokens: int | None = 16384
    max_running_requests: int = 32
    chunked_prefill_size: int = 2048
    context_length: int | None = None
    stall_limit_s: float = 20.0
    refit_timeout_s: float = 300.0
    partial_refit: bool = False
    tensor_parallel: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 0
    metrics: bool = False
    extra_args: tuple[str, ...] = field(default=())
