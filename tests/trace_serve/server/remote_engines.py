"""Scripted engines that the test runs itself, as a front-end started with --engine-url sees them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import scripted_engine
from harness import DIGEST, RECIPE, Running, engine_get

KEY = "remote-engine-key"
CHAT = "/v1/chat/completions"


def wait_until(check: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


class RemoteScript:
    """One scripted engine on a port of its own; may be stopped and started again there.

    Args:
        plain: without /trace routes, as a server that is not ours.
        digest: what it reports to have loaded.
    """

    def __init__(self, *, plain: bool = False, digest: str = DIGEST) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        limits = {"context_length": scripted_engine.CONTEXT_LENGTH, "vocab_size": scripted_engine.VOCAB_SIZE}
        self.report: dict[str, Any] = (
            {} if plain else {**limits, "recipe_id": RECIPE.recipe_id, "policy_digest": digest}
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, scripted_engine.__file__, "--port", str(self.port), "--key", KEY]
        self._process = subprocess.Popen([*command, "--report", json.dumps(self.report)])
        wait_until(self._answers, "the scripted engine answers")

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def seen(self) -> dict[str, Any]:
        return engine_get(self.url, KEY, "/script/seen")

    def health(self, **wanted: object) -> None:
        engine_get(self.url, KEY, "/script/health", dict(wanted))

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        try:
            return bool(self.seen())
        except OSError:
            return False

    def __enter__(self) -> RemoteScript:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def front_end(directory: Path, urls: list[str], **settings: object) -> Running:
    """A front-end, not started yet, in front of engines at these URLs."""
    key_file = directory / "engine.key"
    key_file.write_text(KEY + "\n")
    running = Running(directory, engine_urls=",".join(urls), engine_key_file=key_file, **settings)
    config = {"max_position_embeddings": 2048, "vocab_size": scripted_engine.VOCAB_SIZE}
    (directory / "config.json").write_text(json.dumps(config))
    return running


def ready(running: Running) -> bool:
    try:
        return httpx.get(running.url + "/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(running: Running, script: str = "tokens=1", **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": script}], **fields}
    return httpx.post(running.url + CHAT, json=body, timeout=60)
