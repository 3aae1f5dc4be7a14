"""A start that cannot be right stops, and says which seam or which file is at fault."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trace_serve.engine.architectures import Architecture
from trace_serve.engine.command import engine_command
from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.engine.spec import EngineSpec
from trace_serve.errors import ConfigError, EngineError, SeamError
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import PRESETS, Recipe

REMOVE_SEAM = '''
import importlib.abc, importlib.machinery, sys

class Remover(importlib.abc.MetaPathFinder):
    """Loads the module as usual and then removes one method, as a new release of SGLang might."""

    def find_spec(self, name, path, target=None):
        if name != "{module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            delattr(getattr(module, "{owner}"), "{method}")
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Remover())
'''


@pytest.mark.engine
def test_a_moved_seam_stops_the_start_and_is_named(
    fp4_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "sglang.srt.managers.scheduler_components.batch_result_processor"
    source = REMOVE_SEAM.format(
        module=module, owner="SchedulerBatchResultProcessor", method="_maybe_collect_routed_experts"
    )
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    engine = EngineProcess(EngineConfig(model=fp4_policy.path, recipe=fp4_policy.recipe, log_path=tmp_path / "log"))
    engine.start()
    with pytest.raises(SeamError, match=r"seam collect .*_maybe_collect_routed_experts"):
        engine.wait_ready(180)
    assert engine.poll() is not None


def test_a_directory_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        EngineProcess(EngineConfig(model=tmp_path)).start()


def test_a_value_that_starts_with_a_dash_is_not_taken_for_an_option() -> None:
    config, told = EngineConfig(model=Path("-model")), EngineSpec(recipe=Recipe(), run_dir="/nowhere")
    architecture = Architecture({"architectures": ["MixtralForCausalLM"]})
    words = engine_command(config, told, architecture, module="main", name="-name", port=1, key="a-key").words
    assert {"--model-path=-model", "--served-model-name=-name"} < set(words)
    assert not {"-model", "-name"} & set(words)


def test_a_recipe_that_this_engine_cannot_compute_exactly_is_refused(engine_model: Path) -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        EngineProcess(EngineConfig(model=engine_model, recipe=PRESETS["gb200"])).start()


@pytest.mark.engine
def test_an_engine_ends_with_the_process_that_started_it(fp4_policy: Policy, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trace_serve.engine.launch import EngineConfig, EngineProcess\n"
        "from trace_serve.policy.manifest import load_policy\n"
        "policy = load_policy(sys.argv[1])\n"
        "engine = EngineProcess(EngineConfig(policy.path, policy.recipe, log_path=Path(sys.argv[2])))\n"
        "engine.start(); print(engine.pid, flush=True); os._exit(9)\n"
    )
    log = tmp_path / "engine.log"
    started = subprocess.run(
        [sys.executable, "-c", code, str(fp4_policy.path), str(log)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    engine = int(started.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(engine) and psutil.Process(engine).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.2)
