"""Requests that weights change under: which version computed each token, and what becomes of those that lag behind."""

from __future__ import annotations

import base64
import re
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_model
import numpy as np
import pytest
import refit_client as client
import torch
import transformers

from trace_serve.engine.launch import EngineProcess
from trace_serve.engine.push import Pause, Push
from trace_serve.hints import wire

pytestmark = pytest.mark.engine

TRAINERS_PAGE = Path(__file__).parents[3] / "docs/trainers.md"
PROMPT = engine_model.token_ids(41, 30)
NEW = 600
ALL = {"sink": "inline", "scale": "byte", "versions": "all"}


@pytest.fixture(scope="module")
def a() -> dict[str, torch.Tensor]:
    return engine_model.weights(0)


@pytest.fixture
def engine(refit_engine: EngineProcess) -> EngineProcess:
    """Serves B as version `b` when a test starts."""
    with Push(refit_engine.url, refit_engine.api_key) as push:
        push.state_dict(engine_model.weights(1), version="b")
    return refit_engine


def push_under(
    engine: EngineProcess, weights: dict[str, torch.Tensor], pause: Pause | None, **custom: Any
) -> dict[str, Any]:
    """The answer of a request that the weights `a` arrived under, after some of its tokens."""
    stream = client.Stream(engine, prompt=PROMPT, new=NEW, **custom)
    stream.wait_for(8)
    with Push(engine.url, engine.api_key, pause=pause) as push:
        push.state_dict(weights, version="a")
    return stream.result()


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def hints(answer: dict[str, Any]) -> wire.HintFile:
    return wire.from_bytes(base64.b64decode(answer["meta_info"]["trace_hints"]["data"]))


def test_a_retracted_request_keeps_what_the_old_weights_sampled(
    engine: EngineProcess, a: dict[str, torch.Tensor]
) -> None:
    undisturbed = client.generate(engine, prompt=PROMPT, new=NEW, trace_hints=ALL)
    before = client.weights(engine)["mixed_requests"]
    answer = push_under(engine, a, "retract", trace_hints=ALL)
    spans = answer["meta_info"]["weight_version_spans"]
    (_, cut, _), _ = spans["sampled"]
    assert spans["sampled"] == [[0, cut, "b"], [cut, NEW, "a"]]
    assert spans["rows"] == [[0, len(PROMPT) + NEW - 1, "a"]]
    assert (spans["version_diff"], spans["stale_tokens"]) == (1, 0)
    assert client.weights(engine)["mixed_requests"] == before + 1
    # Log-probabilities and hints of a token are those of the pass that sampled it, before and after.
    assert answer["output_ids"][:cut] == undisturbed["output_ids"][:cut]
    assert logprobs(answer)[:cut] == logprobs(undisturbed)[:cut]
    of_old = len(PROMPT) + cut - 1
    found, expected = hints(answer), hints(undisturbed)
    assert found.weight_versions == ((0, of_old, "b"), (of_old, len(PROMPT) + NEW - 1, "a"))
    for got, want in zip(found.sites, expected.sites, strict=True):
        assert got.present.all()
        np.testing.assert_array_equal(got.bits[:of_old], want.bits[:of_old])
        np.testing.assert_array_equal(got.scales[:of_old], want.scales[:of_old])
    np.testing.assert_array_equal(found.logprobs[len(PROMPT) - 1 :], np.float32(logprobs(answer)))


def test_rows_of_old_weights_are_missing_unless_they_are_asked_for(
    engine: EngineProcess, a: dict[str, torch.Tensor]
) -> None:
    answer = push_under(engine, a, "retract", trace_hints={**ALL, "versions": "current"})
    cut = answer["meta_info"]["weight_version_spans"]["sampled"][0][1]
    for site in hints(answer).sites:
        assert site.present.tolist() == [i >= len(PROMPT) + cut - 1 for i in range(len(PROMPT) + NEW - 1)]


def test_a_request_that_goes_on_in_place_has_rows_of_both_versions(
    engine: EngineProcess, a: dict[str, torch.Tensor]
) -> None:
    answer = push_under(engine, a, "in_place", trace_hints=ALL)
    spans = answer["meta_info"]["weight_version_spans"]
    cut = spans["sampled"][0][1]
    rows = len(PROMPT) + NEW - 1
    assert spans["sampled"] == [[0, cut, "b"], [cut, NEW, "a"]]
    assert spans["rows"] == [[0, len(PROMPT) - 1 + cut, "b"], [len(PROMPT) - 1 + cut, rows, "a"]]
    assert [list(span) for span in hints(answer).weight_versions] == spans["rows"]
    # Its KV was not flushed, and still is no prefix for others.
    after = client.generate(engine, prompt=PROMPT)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version_spans"]["rows"] == [[0, len(PROMPT) + 3, "a"]]
    with Push(engine.url, engine.api_key) as push:
        push.state_dict(a, version="a again")
    assert logprobs(client.generate(engine, prompt=PROMPT)) == logprobs(after)


def test_a_request_that_would_lag_too_far_behind_is_ended(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    before = client.weights(engine)
    answer = push_under(engine, a, "retract", max_version_diff=0)
    finish = answer["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    assert "max_version_diff" in finish["message"]
    spans = answer["meta_info"]["weight_version_spans"]
    cut = spans["sampled"][0][1]
    assert 8 <= cut < NEW
    assert len(answer["output_ids"]) <= cut + 1
    assert spans["stale_tokens"] == cut
    after = client.weights(engine)
    assert after["stale_requests"] == before["stale_requests"] + 1
    assert after["stale_tokens"] == before["stale_tokens"] + cut


def test_a_request_within_its_limit_goes_on(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    answer = push_under(engine, a, "retract", max_version_diff=1)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["meta_info"]["weight_version_spans"]["stale_tokens"] == 0


@pytest.mark.parametrize("limit", [-1, 1.5, "2", True])
def test_a_bad_limit_is_refused(engine: EngineProcess, limit: object) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.generate(engine, max_version_diff=limit)
    with refused.value as error:
        assert error.code == 400
        assert "max_version_diff" in error.read().decode()


def test_without_a_pause_an_update_waits_for_running_requests(
    engine: EngineProcess, a: dict[str, torch.Tensor]
) -> None:
    answer = push_under(engine, a, None)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["meta_info"]["weight_version_spans"]["sampled"] == [[0, NEW, "b"]]
    assert client.generate(engine)["meta_info"]["weight_version"] == "a"


def test_an_aborting_pause_ends_requests_with_what_they_have(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    answer = push_under(engine, a, "abort")
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert {span[2] for span in answer["meta_info"]["weight_version_spans"]["sampled"]} == {"b"}


def test_a_trainers_own_pause_outlives_the_session(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    engine.request("/pause_generation", {"mode": "retract"})
    with Push(engine.url, engine.api_key, pause=None) as push:
        push.state_dict(a, version="a")
    stream = client.Stream(engine, prompt=PROMPT, new=4)
    time.sleep(0.5)
    assert stream.last == {}
    engine.request("/continue_generation", {})
    assert stream.result()["meta_info"]["weight_version"] == "a"


def test_requests_in_flight_get_an_error_when_weights_end_up_mixed(
    engine: EngineProcess, a: dict[str, torch.Tensor]
) -> None:
    stream = client.Stream(engine, prompt=PROMPT, new=NEW)
    stream.wait_for(8)
    engine.request("/pause_generation", {"mode": "in_place"})
    assert client.post(engine, "/begin_weight_update")[0]
    assert client.send(engine, list(a.items())[:10])[0]
    assert not client.post(engine, "/end_weight_update")[0]
    finish = stream.result()["meta_info"]["finish_reason"]
    assert (finish["type"], finish["status_code"]) == ("abort", 503)
    assert "quarantined" in finish["message"]
    engine.request("/continue_generation", {})
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.generate(engine)
    refused.value.close()


def test_the_loop_of_the_trainers_page_trains_on_rollouts_and_serves_what_it_learned(
    engine: EngineProcess, model_b: Path, tmp_path: Path
) -> None:
    code = re.search(r"^## The loop\n+```python\n(.*?)^```", TRAINERS_PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert code is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(model_b, dtype=torch.bfloat16).train()
    files: list[wire.HintFile] = []

    def rollouts() -> Iterator[SimpleNamespace]:
        """One answer a step, of the weights that the step before it sent."""
        for step in range(2):
            answer = client.generate(engine, prompt=PROMPT, new=8, trace_hints="inline")
            path = tmp_path / f"{step}.safetensors"
            path.write_bytes(base64.b64decode(answer["meta_info"]["trace_hints"]["data"]))
            files.append(wire.read(path))
            ids = torch.tensor([[*PROMPT, *answer["output_ids"]]])
            yield SimpleNamespace(hint_paths=[path], ids=ids, mask=torch.ones_like(ids))

    def loss_of(logits: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[0, :-1].float(), batch.ids[0, 1:])

    before = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    names = {
        "model": model,
        "rollouts": rollouts(),
        "loss_of": loss_of,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "engine_url": engine.url,
        "api_key": engine.api_key,
    }
    exec(compile(code[1], str(TRAINERS_PAGE), "exec"), names)
    assert not torch.equal(model.model.layers[0].mlp.experts.down_proj, before)
    assert [[version for *_, version in each.weight_versions] for each in files] == [["b"], ["step-0"]]
    trained = client.generate(engine, prompt=PROMPT, new=1, trace_hints="inline")
    assert [version for *_, version in hints(trained).weight_versions] == ["step-1"]
    with torch.inference_mode():
        scores = model.eval()(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].float().log_softmax(-1)
    served = logprobs(trained)[0]
    assert abs(float(scores[trained["output_ids"][0]]) - served) < 0.1
