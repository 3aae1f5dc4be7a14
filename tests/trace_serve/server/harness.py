"""The real front-end as a child process over the scripted engine, and what tests need to look at both."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import scripted_engine

from trace_serve.errors import EngineError, TraceServeError
from trace_serve.recipe import PRESETS
from trace_serve.server.authorization import Authorization
from trace_serve.server.observe.logging_setup import configure_logging
from trace_serve.server.process import ServerProcess
from trace_serve.server.run import fail, run_server
from trace_serve.settings import Settings

RECIPE = PRESETS["default"]
DIGEST = "sha256:" + "ab" * 32
ENGINE_FILE = "engine.json"


class ScriptedEngine:
    """An `EngineLike` whose process is `scripted_engine.py`; leaves its pid, address and key in a file for the test."""

    served_name = scripted_engine.SERVED_NAME
    api_key = "scripted-engine-key"

    def __init__(self, directory: Path, *, recipe_id: str = RECIPE.recipe_id) -> None:
        self._directory = directory
        self._recipe_id = recipe_id
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def start(self) -> None:
        if (self._directory / "fail-start").exists():
            raise EngineError("scripted: the engine cannot start")
        report = {
            "context_length": scripted_engine.CONTEXT_LENGTH,
            "vocab_size": scripted_engine.VOCAB_SIZE,
            "recipe_id": self._recipe_id,
            "policy_digest": (self._directory / "reported-digest").read_text(),
            "mode": "fp4",
        }
        port = self.url.rsplit(":", 1)[1]
        command = [sys.executable, scripted_engine.__file__, "--port", port, "--key", self.api_key]
        self._process = subprocess.Popen([*command, "--report", json.dumps(report)], start_new_session=True)

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.poll() is not None:
                raise EngineError(f"scripted: ended with {self.poll()}")
            with contextlib.suppress(OSError):
                engine_get(self.url, self.api_key, "/trace/heartbeat")
                break
            time.sleep(0.05)
        assert self._process is not None
        state = {"pid": self._process.pid, "url": self.url, "key": self.api_key}
        temporary = self._directory / "engine.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(self._directory / ENGINE_FILE)

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def stop(self, timeout_s: float) -> None:
        if self._process is None:
            return
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                return


def engine_get(url: str, key: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=2) as answer:
        parsed: dict[str, Any] = json.loads(answer.read())
        return parsed


class Running:
    """A front-end that was started, and the scripted engine behind it."""

    def __init__(self, directory: Path, api_key: str | None = None, **settings: object) -> None:
        self.directory = directory
        self.api_key = api_key
        prepare_policy(directory)
        self.hint_dir = directory / "hints"
        self.hint_dir.mkdir(exist_ok=True)
        fast = {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 0.5, "restart_backoff_s": 0.2, **settings}
        self.process = ServerProcess(
            directory,
            mode="rollout",
            hint_dir=self.hint_dir,
            api_key=api_key,
            log_path=directory / "server.log",
            environment={f"TRACE_SERVE_{name.upper()}": str(value) for name, value in fast.items()},
            command=[sys.executable, __file__],
        )

    @property
    def url(self) -> str:
        return self.process.url

    def log(self) -> list[dict[str, Any]]:
        lines = (self.directory / "server.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def engine(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.directory / ENGINE_FILE).read_text())
        return state

    def seen(self) -> dict[str, Any]:
        state = self.engine()
        return engine_get(state["url"], state["key"], "/script/seen")

    def set_health(self, **health: object) -> None:
        state = self.engine()
        engine_get(state["url"], state["key"], "/script/health", dict(health))

    def __enter__(self) -> Running:
        self.process.start()
        try:
            self.process.wait_ready(20)
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop(10)


def prepare_policy(directory: Path) -> None:
    """A tokenizer of one token a byte, and a chat template of known length; enough for the front-end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    if not (directory / "reported-digest").exists():
        (directory / "reported-digest").write_text(DIGEST)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("policy", type=Path)
    parser.add_argument("--exit-with-parent", action="store_true")
    for name in ("mode", "host", "port", "hint-dir"):
        parser.add_argument(f"--{name}")
    args = vars(parser.parse_args())
    try:
        code = serve_scripted(args.pop("policy"), Settings.load(**args))
    except TraceServeError as error:
        code = fail(error)
    sys.exit(code)


def serve_scripted(policy: Path, settings: Settings) -> int:
    configure_logging(settings.log_level, settings.log_format)
    authorization = Authorization(
        path=policy,
        name="scripted",
        version="1",
        recipe=RECIPE,
        digest=DIGEST,
        mode="rollout",
        verdict_id="sha256:verdict",
        hints=True,
    )
    return run_server(settings, authorization, lambda _: ScriptedEngine(policy))


if __name__ == "__main__":
    main()
