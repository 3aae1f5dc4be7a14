"""Starting, watching and stopping one engine (no torch, no sglang in this process)."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trace_serve.engine import spec
from trace_serve.engine.architectures import Architecture
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import ConfigError, EngineError, SeamError, TraceServeError
from trace_serve.hints.options import HintOptions
from trace_serve.hints.sinks import remove_stale
from trace_serve.policy.digest import digest_directory
from trace_serve.policy.packed import check_directory
from trace_serve.policy.tokenizer import chat_template_digest, tokenizer_digest
from trace_serve.recipe import PRESETS, Recipe

_POLL_S = 0.25
_DRAIN_S = 5.0
_FRONT_END_SECRETS = ("TRACE_SERVE_API_KEY", "TRACE_SERVE_ADMIN_KEY")


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
        max_total_tokens: size of the KV pool in tokens.
        max_running_requests: requests decoded together.
        chunked_prefill_size: tokens a prefill pass; longer prompts are cut.
        context_length: longest prompt plus answer; None takes the model's own.
        stall_limit_s: seconds without a sign of life after which the scheduler counts as frozen.
        refit_timeout_s: seconds without a word from its trainer after which a weight update counts as failed.
        partial_refit: whether a weight update may leave tensors out, because they are not trained.
        tensor_parallel: ranks that share the model, each with a core of its own on the CPU; it has to divide the KV
            heads or be divided by them, and leave each expert a multiple of 16 intermediate values.
        device: `cpu` or `cuda`.
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
    max_total_tokens: int = 16384
    max_running_requests: int = 32
    chunked_prefill_size: int = 2048
    context_length: int | None = None
    stall_limit_s: float = 20.0
    refit_timeout_s: float = 300.0
    partial_refit: bool = False
    tensor_parallel: int = 1
    device: str = "cpu"
    metrics: bool = False
    extra_args: tuple[str, ...] = field(default=())


def _cores_of_ranks(ranks: int) -> str:
    """SGLang's list of cores for each rank, separated by `|`: equal shares, or one in turn where there are few."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class EngineProcess:
    """One SGLang server on loopback behind a secret key, in its own process group.

    Not restarted by itself; `server.supervisor` does that with a fresh instance.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.recipe = config.recipe or PRESETS["bf16"]
        self.served_name = config.model.name
        self.api_key = secrets.token_hex(24)
        self._port = 0
        self._model_arguments: tuple[str, ...] = ()
        self._model_package = "trace_serve.engine.models"
        self._process: subprocess.Popen[bytes] | None = None
        self._run_dir: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        if self.config.log_path is not None:
            return self.config.log_path
        if self._run_dir is None:
            raise EngineError("the engine has not been started")
        return Path(self._run_dir.name) / "engine.log"

    def start(self) -> None:
        """Starts the process and returns at once.

        Raises:
            EngineError: it runs already, or the model directory is not there.
            ConfigError: SGLang is not installed, this engine cannot compute the recipe exactly, or it cannot serve this
                model's architecture (the reason is named).
            PolicyError: the weights are damaged, or packed otherwise than the recipe says; the file or tensor is named.
        """
        if self._process is not None:
            raise EngineError("the engine is already started; make a new EngineProcess to start another")
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("sglang is not installed here; run `pip install 'trace-serve[engine]'`", field="engine")
        if not self.recipe.exact_in_bf16:
            raise ConfigError(
                "recipe: it has global scales that are not powers of two, so BF16 cannot hold its values exactly, and "
                "this engine multiplies their BF16 images; choose pow2 scales (preset portable)",
                field="recipe",
            )
        if not (self.config.model / "config.json").is_file():
            raise EngineError(
                f"model {self.config.model}: no config.json there; expected a Hugging Face model directory"
            )
        architecture = Architecture.of(self.config.model)
        architecture.check(
            self.recipe,
            device=self.config.device,
            context_length=self.config.context_length,
            ranks=self.config.tensor_parallel,
        )
        self._model_arguments = architecture.arguments(device=self.config.device)
        self._model_package = architecture.model_package
        packed = check_directory(self.config.model, self.recipe)
        if packed is not None and self.config.tensor_parallel > 1 and self.recipe.four_over_six != "off":
            raise ConfigError(
                "tensor_parallel: a packed checkpoint of a recipe with 4over6 is served by one rank in this version: a "
                "padded slice would be rounded a second time; serve the BF16 weights, or use one rank",
                field="tensor_parallel",
            )
        if self.config.tensor_parallel < 1:
            raise ConfigError(
                f"tensor_parallel: got {self.config.tensor_parallel}, expected 1 or more ranks", field="tensor_parallel"
            )
        self._run_dir = tempfile.TemporaryDirectory(prefix="trace-serve-engine-")
        Telemetry(self._run_dir.name, create=True, ranks=self.config.tensor_parallel)
        if self.config.hint_dir is not None:
            self.config.hint_dir.mkdir(parents=True, exist_ok=True)
        self._port = _free_port()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trace_serve.engine.main", *self._arguments()],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _spec(self) -> spec.EngineSpec:
        model = self.config.model
        assert self._run_dir is not None
        return spec.EngineSpec(
            recipe=self.recipe,
            run_dir=self._run_dir.name,
            parent_pid=os.getpid(),
            hint_dir=None if self.config.hint_dir is None else str(self.config.hint_dir.resolve()),
            policy_digest=self.config.policy_digest or digest_directory(model),
            tokenizer_digest=tokenizer_digest(model),
            chat_template_digest=chat_template_digest(model),
            stall_limit_s=self.config.stall_limit_s,
            refit_timeout_s=self.config.refit_timeout_s,
            partial_refit=self.config.partial_refit,
            hints=self.config.hints,
            hint_urls=self.config.hint_urls,
            hint_shm=self.config.hint_shm,
            hint_ttl_s=self.config.hint_ttl_s,
            hint_dir_bytes=self.config.hint_dir_bytes,
        )

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, spec.ENV: self._spec().to_env(), spec.KEY_ENV: self.api_key}
        for name in _FRONT_END_SECRETS:
            env.pop(name, None)
        env.pop("SGLANG_PLUGINS", None)
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        env.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", self._model_package)
        # Over TCP, torch's rendezvous would listen on every interface, for anybody.
        assert self._run_dir is not None
        env.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{self._run_dir.name}/rendezvous")
        # With a file in its place, SGLang names shared memory after these alone.
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port))
        env.pop("PROMETHEUS_MULTIPROC_DIR", None)
        if self.config.metrics:
            # SGLang's processes share their counters through files; here they are removed with the engine.
            shared = Path(self._run_dir.name) / "metrics"
            shared.mkdir(exist_ok=True)
            env["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
        if self.config.device == "cpu":
            env.update(SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="")
            # Two engines and their clients share the cores here; more threads than one a scheduler only contend.
            env.setdefault("OMP_NUM_THREADS", "1")
            if self.config.tensor_parallel > 1:
                env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_of_ranks(self.config.tensor_parallel))
        return env

    def _arguments(self) -> list[str]:
        config = self.config
        arguments = {
            "--model-path": str(config.model),
            "--served-model-name": self.served_name,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--device": config.device,
            "--dtype": "bfloat16",
            "--max-total-tokens": str(config.max_total_tokens),
            "--max-running-requests": str(config.max_running_requests),
            "--chunked-prefill-size": str(config.chunked_prefill_size),
            "--log-level": "warning",
        }
        if config.tensor_parallel > 1:
            arguments["--tp-size"] = str(config.tensor_parallel)
        if config.device == "cpu":
            arguments["--attention-backend"] = "torch_native"
        if config.context_length is not None:
            arguments["--context-length"] = str(config.context_length)
        if self.recipe.experts != "bf16":
            arguments["--quantization"] = spec.QUANTIZATION
        flags = ["--skip-server-warmup", "--sleep-on-idle", "--enable-return-routed-experts"]
        if config.metrics:
            flags.append("--enable-metrics")
        # Joined by "=", so that no value can be taken for an option, whatever it starts with.
        joined = [f"{name}={value}" for name, value in arguments.items()]
        return [*joined, *flags, *self._model_arguments, *config.extra_args]

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        return None if self._process is None else self._process.poll()

    def wait_ready(
        self, timeout_s: float = 300.0, *, progress: Callable[[float], None] | None = None
    ) -> dict[str, Any]:
        """Blocks until the engine answers and one canary request came back; returns its report.

        Args:
            timeout_s: seconds to wait for both together.
            progress: called several times a second with the seconds waited.

        Raises:
            SeamError: it found that a place in SGLang is not what it was; the message names it.
            ConfigError: it refused an argument by name.
            EngineError: it exited otherwise, did not answer in time, or the canary's answer is not what this recipe
                gives. The engine is stopped first in every case.
        """
        begin = time.monotonic()
        try:
            while True:
                waited = time.monotonic() - begin
                if progress is not None:
                    progress(waited)
                if self.poll() is not None:
                    raise self._ended()
                if waited > timeout_s:
                    raise EngineError(
                        f"engine for {self.config.model} did not answer within {timeout_s:.0f} s; see {self.log_path}"
                    )
                try:
                    loaded = self.request("/trace/report", timeout_s=5)
                    break
                except (OSError, ValueError):
                    time.sleep(_POLL_S)
            self._canary(loaded, max(timeout_s - (time.monotonic() - begin), 30))
        except BaseException:
            self.stop()
            raise
        return loaded

    def _ended(self) -> TraceServeError:
        words = self.last_words()
        # A scheduler that finds a moved seam takes its parent down by a signal, so its words are looked at too.
        seam = self.poll() == spec.EXIT_SEAM or "SeamError" in words
        kind = SeamError if seam else ConfigError if self.poll() == ConfigError.exit_code else EngineError
        return kind(f"engine for {self.config.model} exited with status {self.poll()}: {words}")

    def _canary(self, loaded: dict[str, Any], timeout_s: float) -> None:
        """One greedy request. On an FP4 engine its hints must be there and not be all zero."""
        wants_hints = bool(loaded["hints"]["sites"])
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        if wants_hints:
            sampling["custom_params"] = {"trace_hints": "inline"}
        body = {"input_ids": [1, 2, 3, 4, 5], "sampling_params": sampling}
        try:
            answer = self.request("/generate", body, timeout_s=timeout_s)
        except (OSError, ValueError) as exc:
            raise EngineError(f"canary: the first request failed: {exc}; {self.last_words()}") from exc
        if wants_hints:
            from trace_serve.hints import wire

            found = answer["meta_info"].get("trace_hints") or {}
            if found.get("status") != "ok":
                reason = found.get("reason", "the answer carries none")
                raise EngineError(f"canary: seam collect: no hints: {reason}; run `trace-serve doctor`")
            hints = wire.from_bytes(base64.b64decode(found["data"]), expect_recipe_id=self.recipe.recipe_id)
            wire.require_nonzero(hints)

    def request(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """One JSON request to the engine.

        Raises:
            OSError: connection failed or the status is not 2xx (urllib.error.HTTPError).
            ValueError: the answer is not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            parsed: dict[str, Any] = json.loads(response.read())
            return parsed

    def last_words(self) -> str:
        """The reason the engine gave, or the end of its log."""
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it left no log"
        for line in reversed(lines):
            if spec.FAILURE_PREFIX in line:
                return line.split(spec.FAILURE_PREFIX, 1)[1]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["its log is empty"])[-1].strip()[-600:]

    def stop(self, timeout_s: float = 10.0) -> None:
        """Kills the whole process group and waits for it; safe to call twice.

        SGLang's own shutdown drains without a bound. The front-end finishes or cuts its requests first, and hint files
        appear by rename, so only hints that still wait for their sink are waited for, some seconds at most.
        """
        process = self._process
        if process is not None:
            self._drain_hints(min(timeout_s, _DRAIN_S))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            if self.config.hint_shm:
                # A killed engine cannot remove its own; what a process on its way out holds is left to the next one.
                remove_stale()
        if self._run_dir is not None:
            self._run_dir.cleanup()

    def _drain_hints(self, timeout_s: float) -> None:
        if self._run_dir is None or self.poll() is not None:
            return
        telemetry = Telemetry(self._run_dir.name)
        end = time.monotonic() + timeout_s
        while telemetry.hints_pending and self.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S / 5)

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
