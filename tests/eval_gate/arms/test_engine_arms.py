"""The engine and transformers as arms over one policy: the same prompts, and proof of what each computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.http import Endpoint, HttpArm
from eval_gate.arms.records import Role
from eval_gate.arms.source import resolve
from eval_gate.preflight import check_arm, compare_arms
from trace_serve.engine.launch import EngineProcess
from trace_serve.policy.manifest import Policy

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
