"""A registry of small policies with signed verdicts, a front-end over scripted engines, and its admin API."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import ScriptedEngine, engine_get, prepare_policy
from safetensors.numpy import save_file
from signed_policy import CONFIG, Keys, sign

from trace_serve.errors import TraceServeError
from trace_serve.policy import Policy, build_policy, load_policy
from trace_serve.recipe import PRESETS, Recipe
from trace_serve.server.authorization import Authorization
from trace_serve.server.process import ServerProcess
from trace_serve.server.run import fail, serve_policy
from trace_serve.settings import Mode, Settings

ADMIN_KEY = "an-admin-key-0123456789"
API_KEY = "a-client-key"


class World:
    """A registry directory that tests fill, and the server on it."""

    def __init__(self, directory: Path, *, mode: Mode = "rollout", **settings: object) -> None:
        self.directory = directory
        self.registry = directory / "registry"
        self.registry.mkdir(exist_ok=True)
        self.keys = Keys(directory)
        self.mode = mode
        self.settings = settings
        self.process: ServerProcess | None = None

    def add(self, label: str, *, weight: float = 1.0, recipe: Recipe = PRESETS["default"], **config: Any) -> Policy:
        """Builds `name@version` into the registry; policies of one configuration differ in their weights only."""
        name, version = label.split("@")
        model = self.directory / f"model-{name}-{version}"
        model.mkdir()
        prepare_policy(model)
        (model / "reported-digest").unlink()
        (model / "config.json").write_text(json.dumps({**CONFIG, **config}))
        save_file({"a.weight": np.full((2, 3), weight, dtype=np.float16)}, model / "model.safetensors")
        out = self.registry / f"{name}-{version}"
        build_policy(model, out, name=name, version=version, recipe=recipe)
        shutil.rmtree(model)
        return load_policy(out)

    def sign(self, policy: Policy, **changes: Any) -> None:
        sign(policy, self.keys, policy.path.with_name(policy.path.name + ".verdict.dsse.json"), **changes)

    @property
    def state_dir(self) -> Path:
        return self.registry / ".trace-serve"

    def start(self, policy: str | None = None) -> None:
        fast = {
            "heartbeat_interval_s": 0.2,
            "heartbeat_timeout_s": 1.0,
            "restart_backoff_s": 0.2,
            "registry": self.registry,
            "admin_port": 0,
            "admin_key": ADMIN_KEY,
            "engine_start_timeout_s": 30,
            "drain_s": 5,
            "public_key": self.keys.public,
            **self.settings,
        }
        self.process = ServerProcess(
            self.directory,
            mode=self.mode,
            api_key=API_KEY,
            log_path=self.directory / "server.log",
            environment={f"TRACE_SERVE_{name.upper()}": str(value) for name, value in fast.items()},
            command=[sys.executable, __file__, *([] if policy is None else ["--policy", policy])],
        )
        self.process.start()
        self.event("admin_listening")
        if policy is not None:
            self.process.wait_ready(30)

    def stop(self) -> int | None:
        return None if self.process is None else self.process.stop(15)

    def log(self) -> list[dict[str, Any]]:
        lines = (self.directory / "server.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def event(self, name: str, *, seconds: float = 30) -> dict[str, Any]:
        """The last event of that name in the server's log, waited for."""
        deadline = time.monotonic() + seconds
        while True:
            found = [line for line in self.log() if line.get("event") == name]
            if found:
                return found[-1]
            assert self.process is not None
            assert self.process.poll() is None, (self.directory / "server.log").read_text()
            assert time.monotonic() < deadline, f"no {name} in the log"
            time.sleep(0.05)

    def admin(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> httpx.Response:
        url = f"http://127.0.0.1:{self.event('admin_listening')['port']}{path}"
        return httpx.request(method, url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def ask(self, text: str = "tokens=1", **body: Any) -> httpx.Response:
        assert self.process is not None
        url = f"{self.process.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": text}], **body}
        return httpx.post(url, json=body, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state_dir / "audit.jsonl").read_text().splitlines()]

    def engine(self, label: str) -> dict[str, Any]:
        """Address, key and pid of the engine that was started last for a policy."""
        state: dict[str, Any] = json.loads((self.directory / f"engine-{label}" / "engine.json").read_text())
        return state

    def script(self, label: str, **health: object) -> None:
        state = self.engine(label)
        engine_get(state["url"], state["key"], "/script/health", dict(health))

    def seen(self, label: str) -> dict[str, Any]:
        state = self.engine(label)
        return engine_get(state["url"], state["key"], "/script/seen")


class PolicyEngine(ScriptedEngine):
    """A scripted engine that reports the policy it was started for."""

    def __init__(self, root: Path, authorization: Authorization) -> None:
        directory = root / f"engine-{authorization.label}"
        directory.mkdir(exist_ok=True)
        (directory / "reported-digest").write_text(authorization.digest)
        super().__init__(directory, recipe_id=authorization.recipe.recipe_id)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--exit-with-parent", action="store_true")
    for name in ("mode", "host", "port", "policy"):
        parser.add_argument(f"--{name}")
    args = vars(parser.parse_args())
    directory, policy = args.pop("directory"), args.pop("policy")
    try:
        code = serve_policy(policy, Settings.load(**args), lambda _: partial(PolicyEngine, directory))
    except TraceServeError as error:
        code = fail(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
