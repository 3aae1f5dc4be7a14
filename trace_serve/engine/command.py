"""The command line and the environment of an engine's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trace_serve.engine import spec
from trace_serve.engine.architectures import Architecture
from trace_serve.engine.config import EngineConfig
from trace_serve.errors import ConfigError

_OWN = {
    "--api-key": "the engine's key",
    "--dtype": "the recipe",
    "--host": "host",
    "--model": "the policy",
    "--model-path": "the policy",
    "--port": "port",
    "--quantization": "the recipe",
    "--served-model-name": "the policy",
    "--device": "device",
    "--tp": "tensor_parallel",
    "--tp-size": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
}
"""Arguments of SGLang's server that follow from what is said elsewhere, and where."""

_FRONT_END_SECRETS = ("TRACE_SERVE_API_KEY", "TRACE_SERVE_ADMIN_KEY")


class EngineCommand(NamedTuple):
    """What to run; the engine's key is in the environment alone."""

    words: list[str]
    environment: dict[str, str]


def check_extra(arguments: Sequence[str]) -> None:
    """Raises:
    ConfigError: further arguments of SGLang's server say what follows from something else.
    """
    for word in arguments:
        option = word.split("=", 1)[0]
        if option in _OWN:
            raise ConfigError(
                f"engine_args: got {option}, which follows from {_OWN[option]}; leave it out", field="engine_args"
            )


def engine_command(
    config: EngineConfig,
    engine_spec: spec.EngineSpec,
    architecture: Architecture,
    *,
    module: str,
    name: str,
    port: int,
    key: str,
) -> EngineCommand:
    """The process of an engine.

    Args:
        config: how to run the model.
        engine_spec: what the process is told about the policy; its run directory is there.
        architecture: of the model.
        module: of `trace_serve.engine`: `main` serves, `resolve` says what would be served.
        name: model name that the engine answers to.
        port: that it listens on.
        key: its bearer key.
    """
    arguments = [*_arguments(config, engine_spec, name, port), *architecture.arguments(device=config.device)]
    return EngineCommand(
        [sys.executable, "-m", f"trace_serve.engine.{module}", *arguments, *config.extra_args],
        _environment(config, engine_spec, architecture, port, key),
    )


def _arguments(config: EngineConfig, engine_spec: spec.EngineSpec, name: str, port: int) -> list[str]:
    arguments = {
        "--model-path": str(config.model),
        "--served-model-name": name,
        "--host": config.host,
        "--port": str(port),
        "--device": config.device,
        "--dtype": "bfloat16",
        "--max-running-requests": str(config.max_running_requests),
        "--chunked-prefill-size": str(config.chunked_prefill_size),
        "--log-level": "warning",
    }
    if config.max_total_tokens is not None:
        arguments["--max-total-tokens"] = str(config.max_total_tokens)
    if config.tensor_parallel > 1:
        arguments["--tp-size"] = str(config.tensor_parallel)
    if config.device == "cpu":
        arguments["--attention-backend"] = "torch_native"
    if config.context_length is not None:
        arguments["--context-length"] = str(config.context_length)
    if engine_spec.recipe.experts != "bf16":
        arguments["--quantization"] = spec.QUANTIZATION
    flags = ["--skip-server-warmup", "--sleep-on-idle", "--enable-return-routed-experts"]
    if config.metrics:
        flags.append("--enable-metrics")
    # Joined by "=", so that no value can be taken for an option, whatever it starts with.
    return [*(f"{option}={value}" for option, value in arguments.items()), *flags]


def _environment(
    config: EngineConfig, engine_spec: spec.EngineSpec, architecture: Architecture, port: int, key: str
) -> dict[str, str]:
    env = {**os.environ, spec.ENV: engine_spec.to_env(), spec.KEY_ENV: key}
    for name in _FRONT_END_SECRETS:
        env.pop(name, None)
    env.pop("SGLANG_PLUGINS", None)
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    env.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", architecture.model_package)
    # Over TCP, torch's rendezvous would listen on every interface, for anybody.
    env.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{engine_spec.run_dir}/rendezvous")
    # With a file in its place, SGLang names shared memory after these alone.
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if config.metrics:
        # SGLang's processes share their counters through files; here they are removed with the engine.
        shared = Path(engine_spec.run_dir) / "metrics"
        shared.mkdir(exist_ok=True)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
    if config.device == "cpu":
        env.update(SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="")
        # Two engines and their clients share the cores here; more threads than one a scheduler only contend.
        env.setdefault("OMP_NUM_THREADS", "1")
        if config.tensor_parallel > 1:
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_of_ranks(config.tensor_parallel))
    return env


def _cores_of_ranks(ranks: int) -> str:
    """SGLang's list of cores for each rank, separated by `|`: equal shares, or one in turn where there are few."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)
