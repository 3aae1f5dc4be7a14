"""Parts of the engine layer that need no engine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trace_serve.engine import cpu_fallback, spec
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import ConfigError
from trace_serve.recipe import Recipe


def test_a_spec_survives_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(expert_layers=(1, 3), kv="nvfp4", k_rotation=16)
    sent = spec.EngineSpec(recipe=recipe, run_dir="/run", hint_dir="/hints", policy_digest="sha256:1")
    monkeypatch.setenv(spec.ENV, sent.to_env())
    assert spec.from_env() == sent


def test_without_the_variable_a_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(spec.ENV, raising=False)
    assert spec.from_env() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"recipe": {}}', '{"run_dir": "/r", "unknown": 1}'])
def test_a_damaged_spec_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(spec.ENV, text)
    with pytest.raises(ConfigError, match=spec.ENV):
        spec.from_env()


def test_another_process_sees_the_heartbeat_and_the_counters(tmp_path: Path) -> None:
    reader = Telemetry(tmp_path, create=True)
    assert reader.age_s() is None
    code = (
        "import sys; from trace_serve.engine.telemetry import Telemetry; t = Telemetry(sys.argv[1]);"
        "t.beat(); t.add('saturated', 3); t.add('saturated', 4)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    age = reader.age_s()
    assert age is not None
    assert 0 <= age < 60
    assert reader.incidents()["saturated"] == 7
    time.sleep(0.02)
    later = reader.age_s()
    assert later is not None
    assert later > age


def test_new_slots_go_to_each_requests_row_and_columns() -> None:
    table = torch.full((4, 8), -1, dtype=torch.int32)
    cpu_fallback.assign_req_to_token_pool_cpu(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 0]),
        end_offset=torch.tensor([5, 3]),
        out_cache_loc=torch.tensor([70, 71, 80, 81, 82]),
        pool_len=8,
    )
    assert table[2].tolist() == [-1, -1, -1, 70, 71, -1, -1, -1]
    assert table[0].tolist() == [80, 81, 82, -1, -1, -1, -1, -1]
    assert (table[[1, 3]] == -1).all()


def test_a_column_past_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="past the table"):
        cpu_fallback.assign_req_to_token_pool_cpu(
            torch.tensor([0]),
            torch.zeros(1, 4, dtype=torch.int32),
            torch.tensor([3]),
            torch.tensor([5]),
            torch.tensor([1, 2]),
            4,
        )


def test_what_the_fallback_does_not_implement_raises_when_called() -> None:
    code = (
        "from trace_serve.engine import cpu_fallback; cpu_fallback.install(); import sgl_kernel\n"
        "try: import sgl_kernel.scalar_type\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('a submodule was importable')\n"
        "try: sgl_kernel.verify_tree_greedy_cpu()\n"
        "except RuntimeError as exc: assert 'verify_tree_greedy_cpu' in str(exc)\n"
        "else: raise SystemExit('it did not raise')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bootstrap_leaves_other_processes_alone() -> None:
    code = (
        "import os, sys; os.environ.pop('SGLANG_USE_CPU_ENGINE', None)\n"
        "from trace_serve.engine import bootstrap; bootstrap.prepare()\n"
        "assert 'sgl_kernel' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_launching_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; import trace_serve.engine.launch, trace_serve.server.app, eval_gate.run, eval_gate.cli\n"
        "heavy = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
