"""The engine and transformers as arms over one policy: the same prompts, and proof of what each computes in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_model
import engine_models_oracle
import pytest
import torch
import transformers

from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import Role, SampleRecord, read_results
from eval_gate.arms.source import resolve
from eval_gate.noise import NoiseFloor
from eval_gate.preflight import check_arm, compare_arms
from trace_serve.engine.launch import EngineProcess
from trace_serve.guided.hf.fake_quantized import fake_quantize
from trace_serve.policy.manifest import Policy
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.engine

CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}],
    "max_tokens": 4,
    "temperature": 0.0,
    "top_p": 1.0,
    "stream": False,
}
TEXT = {"prompt": "Hello there", **{name: value for name, value in CHAT.items() if name != "messages"}}


async def test_engine_and_transformers_render_prompts_to_the_same_tokens(
    fp4_engine: EngineProcess, fp4_policy: Policy
) -> None:
    training = resolve(Role.TRAINING, f"hf:{fp4_policy.path}", Endpoint(url=""))
    serving = resolve(Role.SERVING, str(fp4_policy.path), Endpoint(url=""))
    async with (
        HttpArm(Endpoint(fp4_engine.url, api_key=fp4_engine.api_key)) as engine,
        training.open(60.0, Path("unused")) as trainer,
    ):
        for body in (CHAT, TEXT):
            ids = await engine.tokenize(body)
            assert ids is not None
            assert ids == await trainer.tokenize(body)
            answer = await engine.complete({**body, "model": engine.model})
            assert answer.failure is None
            assert answer.prompt_tokens == len(ids)
            own = await trainer.complete(body)
            assert own.prompt_tokens == len(ids)
        reports = [await arm.report() for arm in (trainer, engine)]
    one, two = (
        source.evidence.model_copy(update={"report": report})
        for source, report in zip((training, serving), reports, strict=True)
    )
    assert check_arm(Role.TRAINING, one) == []
    assert compare_arms(one, two) == []
    assert one.generation == two.generation


def test_the_training_time_version_of_a_recipe_is_nearer_to_the_engine_than_bf16_is(
    fp4_engine: EngineProcess, fp4_policy: Policy
) -> None:
    prompts = [engine_model.token_ids(seed, 100) for seed in (77, 78, 79)]
    answers = [engine_models_oracle.generate(fp4_engine, prompt, new_tokens=8) for prompt in prompts]

    def distance(model: Any) -> float:
        """Mean difference of the log-probabilities that the engine and the model give to the same tokens."""
        total, count = 0.0, 0
        for answer in answers:
            tokens = torch.tensor(answer.prompt + answer.output)
            served = torch.tensor(answer.prompt_logprobs + answer.output_logprobs)
            with torch.inference_mode():
                logits = model(tokens[None]).logits[0, :-1].float()
            own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            total, count = total + float((own - served).abs().sum()), count + len(served)
        return total / count

    model = transformers.AutoModelForCausalLM.from_pretrained(fp4_policy.path, dtype=torch.bfloat16).eval()
    bf16 = distance(model)
    fake_quantize(model, Recipe(kv="bf16"))
    experts = distance(model)
    model = transformers.AutoModelForCausalLM.from_pretrained(fp4_policy.path, dtype=torch.bfloat16).eval()
    fake_quantize(model, fp4_policy.recipe)
    assert distance(model) < experts < bf16


def test_an_arm_against_itself_on_the_engine_shows_its_noise(
    fp4_engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", fp4_engine.api_key)
    queries = tmp_path / "q.jsonl"
    lines = [
        {"id": f"q{i}", "prompt": f"Question {i}", "max_tokens": 4, "checker": {"type": "contains", "expected": "e"}}
        for i in range(12)
    ]
    queries.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "eval_gate.cli", "aa", "--arm", fp4_engine.url, "--key-env", "ENGINE_KEY"]
    options = ["--queries", str(queries), "--out", str(tmp_path / "aa"), "--concurrency", "4", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = NoiseFloor.model_validate_json(done.stdout)
    assert (found.queries, found.scored, found.unscored) == (12, 12, 0)
    assert found.grades_differ <= found.texts_differ <= 12
    records = [r for r in read_results(tmp_path / "aa" / "results.jsonl") if isinstance(r, SampleRecord)]
    assert len(records) == 24
    assert fp4_engine.api_key not in (tmp_path / "aa" / "results.jsonl").read_text()
    differing = {
        name for name in {r.query_id for r in records} if len({r.text for r in records if r.query_id == name}) > 1
    }
    assert len(differing) == found.texts_differ
