"""Fixtures shared by every test that needs the real engine; each engine starts once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Read when sglang is first imported, so it has to stand before any test does that.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from engine_client import START_TIMEOUT_S
from engine_model import write_engine_model

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.policy.build import build_policy
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe
from trace_serve.server.process import ServerProcess

# A shell starts background jobs with SIGINT ignored, and every child inherits that; tests interrupt their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")

CHUNK = 64


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two test processes with a pool of threads each would wait for one another; engines choose for themselves."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def fp4_policy(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    out = tmp_path_factory.mktemp("policies") / "tiny-fp4"
    return build_policy(engine_model, out, name="tiny", version="1", recipe=Recipe())


@pytest.fixture(scope="session")
def fp4_engine(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The real engine on the CPU, experts W4A4 and KV in NVFP4, prompts prefilled in chunks of 64 tokens."""
    directory = tmp_path_factory.mktemp("engine")
    config = EngineConfig(
        model=fp4_policy.path,
        recipe=fp4_policy.recipe,
        hint_dir=directory / "hints",
        log_path=directory / "engine.log",
        max_total_tokens=4096,
        chunked_prefill_size=CHUNK,
    )
    engine = EngineProcess(config)
    engine.start()
    engine.wait_ready(START_TIMEOUT_S)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_model(tmp_path_factory.mktemp("refit") / "a", seed=0)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_model(tmp_path_factory.mktemp("refit") / "b", seed=1)


@pytest.fixture(scope="session")
def refit_engine(model_b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose weights the tests of weight updates replace; its first answers are those of a fresh model B."""
    directory = tmp_path_factory.mktemp("refit-engine")
    config = EngineConfig(
        model=model_b,
        recipe=Recipe(),
        log_path=directory / "engine.log",
        max_total_tokens=4096,
        chunked_prefill_size=CHUNK,
        refit_timeout_s=4.0,
    )
    engine = EngineProcess(config)
    engine.start()
    engine.wait_ready(START_TIMEOUT_S)
    yield engine
    engine.stop()


class FrontEnd(ServerProcess):
    """A running front-end; `engine_pid` finds its engine's process."""

    def engine_pid(self) -> int:
        import psutil

        children = psutil.Process(self.pid).children(recursive=True)
        return next(p.pid for p in children if "trace_serve.engine.main" in p.cmdline())

    def scheduler_pid(self) -> int:
        import psutil

        children = psutil.Process(self.pid).children(recursive=True)
        return next(p.pid for p in children if any("sglang::scheduler" in word for word in p.cmdline()))


@pytest.fixture(scope="session")
def front_end(fp4_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """`trace-serve serve --mode rollout` over the real engine."""
    directory = tmp_path_factory.mktemp("front-end")
    server = FrontEnd(
        fp4_policy.path,
        mode="rollout",
        hint_dir=directory / "hints",
        api_key="test-key-0123456789",
        log_path=directory / "server.log",
        engine_log=directory / "engine.log",
        environment={"TRACE_SERVE_TOOL_CALL_PARSER": "qwen"},
    )
    server.start()
    server.wait_ready(START_TIMEOUT_S)
    yield server
    server.stop()
