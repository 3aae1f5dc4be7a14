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
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_serve.engine import spec
from trace_serve.engine.architectures import Architecture
from trace_serve.engine.command import EngineCommand, check_extra, engine_command
from trace_serve.engine.config import EngineConfig
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import ConfigError, EngineError, SeamError, TraceServeError
from trace_serve.hints.sinks import remove_stale
from trace_serve.policy.digest import digest_directory
from trace_serve.policy.packed import check_directory
from trace_serve.policy.tokenizer import chat_template_digest, tokenizer_digest
from trace_serve.recipe import PRESETS

__all__ = ["EngineConfig", "EngineProcess"]

_POLL_S = 0.25
_ARGPARSE = 2
"""Exit status of a process whose command line SGLang cannot read."""
_DRAIN_S = 5.0


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


class EngineProcess:
    """One SGLang server behind a secret key, in its own process group.

    Not restarted by itself; `server.engines.supervisor` does that with a fresh instance.

    Args:
        config: how to run the model.
        api_key: bearer key of the engine; None makes one.
    """

    def __init__(self, config: EngineConfig, api_key: str | None = None) -> None:
        self.config = config
        self.recipe = config.recipe or PRESETS["bf16"]
        self.served_name = config.model.name
        self.api_key = api_key or secrets.token_hex(24)
        self._port = config.port
        self._process: subprocess.Popen[bytes] | None = None
        self._run_dir: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.config.host == "0.0.0.0" else self.config.host
        return f"http://{host}:{self._port}"

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
        command = self._prepare("main")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command.words,
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def resolve(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """What `start` would run: SGLang's arguments as it resolves them, without weights, a port or a card.

        Values that SGLang takes from the memory of a card are those of the machine that asks.

        Returns:
            `command`: words of the command line; `arguments`: every argument of SGLang's server that is not at its
            default; `seams`: number of verified places in SGLang.

        Raises:
            What `start` and `wait_ready` raise for arguments and seams.
        """
        command = self._prepare("resolve")
        try:
            done = subprocess.run(
                command.words, env=command.environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        finally:
            self.stop()
        if done.returncode != 0:
            raise _failure(done.returncode, f"arguments of the engine for {self.config.model}", _reason(done.stderr))
        resolved: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {"command": command.words, **resolved}

    def _prepare(self, module: str) -> EngineCommand:
        """Checks what can be checked without SGLang, and makes the run directory."""
        config = self.config
        architecture = self._checked()
        check_extra(config.extra_args)
        self._run_dir = tempfile.TemporaryDirectory(prefix="trace-serve-engine-")
        Telemetry(self._run_dir.name, create=True, ranks=config.tensor_parallel)
        if config.hint_dir is not None:
            config.hint_dir.mkdir(parents=True, exist_ok=True)
        self._port = config.port or _free_port(config.host)
        return engine_command(
            config, self._spec(), architecture, module=module, name=self.served_name, port=self._port, key=self.api_key
        )

    def _checked(self) -> Architecture:
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
        return architecture

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
        return _failure(self.poll(), f"engine for {self.config.model}", self.last_words())

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
            return _reason(self.log_path.read_text(errors="replace"))
        except OSError:
            return "it left no log"

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


def _failure(status: int | None, what: str, words: str) -> TraceServeError:
    # A scheduler that finds a moved seam takes its parent down by a signal, so its words are looked at too.
    seam = status == spec.EXIT_SEAM or "SeamError" in words
    refused = status in (ConfigError.exit_code, _ARGPARSE)
    kind = SeamError if seam else ConfigError if refused else EngineError
    return kind(f"{what} exited with status {status}: {words}")


def _reason(output: str) -> str:
    lines = output.strip().splitlines()
    for line in reversed(lines):
        if spec.FAILURE_PREFIX in line:
            return line.split(spec.FAILURE_PREFIX, 1)[1]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["its log is empty"])[-1].strip()[-600:]
