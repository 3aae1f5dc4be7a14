"""A front-end as a child process, for programs that start one, use it and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from trace_serve.errors import ConfigError, EngineError, TraceServeError, VerdictRefused
from trace_serve.settings import Mode

_POLL_S = 0.2


class ServerProcess:
    """`trace-serve serve` on loopback, in a session of its own, stopped with its engine when the parent is gone.

    Args:
        policy: policy directory.
        mode: `rollout` or `production`.
        verdict, public_key: see `trace-serve serve`.
        hint_dir: directory for hint files.
        host, port: address; port 0 takes a free one.
        api_key: bearer key for clients, passed in the environment so that it shows in no process list.
        log_path: file that receives the server's log; default is the parent's standard error.
        engine_log: file that receives the engine's output.
        environment: further TRACE_SERVE_ variables.
        command: what to run instead of `python -m trace_serve.server`, for tests with another engine.
    """

    def __init__(
        self,
        policy: Path,
        *,
        mode: Mode,
        verdict: Path | None = None,
        public_key: Path | None = None,
        hint_dir: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        log_path: Path | None = None,
        engine_log: Path | None = None,
        environment: dict[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.host = host
        self.port = port or _free_port(host)
        self.api_key = api_key
        self.log_path = log_path
        options = {
            "--mode": mode,
            "--host": host,
            "--port": str(self.port),
            "--verdict": verdict,
            "--public-key": public_key,
            "--hint-dir": hint_dir,
            "--engine-log": engine_log,
        }
        self._command = [*(command or [sys.executable, "-m", "trace_serve.server"]), str(policy), "--exit-with-parent"]
        self._command += [part for name, value in options.items() if value is not None for part in (name, str(value))]
        self._environment = dict(environment or {})
        if api_key is not None:
            self._environment["TRACE_SERVE_API_KEY"] = api_key
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process and returns at once."""
        with contextlib.ExitStack() as stack:
            log = None if self.log_path is None else stack.enter_context(self.log_path.open("wb"))
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait_ready(self, timeout_s: float = 600.0, *, progress: Callable[[float], None] | None = None) -> None:
        """Blocks until the server accepts requests.

        Args:
            timeout_s: longest wait.
            progress: called several times a second with the seconds waited.

        Raises:
            ConfigError, VerdictRefused: the server refused the policy (exit code 3); the message is the server's.
            EngineError: it ended otherwise, or is not ready in time; it has been stopped.
        """
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            if progress is not None:
                progress(waited)
            code = self.poll()
            if code is not None:
                raise self._ended(code)
            if self._answers_ready():
                return
            if waited > timeout_s:
                self.stop()
                raise EngineError(f"the server was not ready in {timeout_s:g} s; see {self.log_path or 'its log'}")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """Drains and ends the server and its engine; by force after `timeout_s`. Returns the exit code."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        return self._process.returncode

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _answers_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def _ended(self, code: int) -> TraceServeError:
        words = self._last_words()
        if code != ConfigError.exit_code:
            return EngineError(f"the server ended with code {code}: {words}")
        return VerdictRefused(words) if "verdict" in words else ConfigError(words)

    def _last_words(self) -> str:
        if self.log_path is None:
            return "see its standard error"
        lines = self.log_path.read_text("utf-8", "replace").strip().splitlines()
        said = [line.removeprefix("trace-serve: ") for line in lines if line.startswith("trace-serve: ")]
        if said:
            return said[-1]
        events = [event for line in lines if (event := _event(line)).get("reason")]
        return str(events[-1]["reason"]) if events else (lines[-1] if lines else "it left no log")


def _event(line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
