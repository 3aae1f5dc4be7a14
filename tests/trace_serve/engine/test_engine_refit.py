"""Weight updates on the real engine: the weights that serve are all of one version, or none serve."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_model
import pytest
import refit_client as client
import torch
from engine_client import START_TIMEOUT_S

from trace_serve.engine.launch import EngineConfig, EngineProcess
from trace_serve.engine.push import Push
from trace_serve.errors import EngineError
from trace_serve.policy.build import build_policy
from trace_serve.recipe import Recipe

pytestmark = pytest.mark.engine

GATE = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
UP = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
DOWN = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


@pytest.fixture(scope="module")
def a() -> dict[str, torch.Tensor]:
    return engine_model.weights(0)


@pytest.fixture(scope="module")
def b() -> dict[str, torch.Tensor]:
    return engine_model.weights(1)


@pytest.fixture(scope="module")
def fresh_b(refit_engine: EngineProcess) -> tuple[list[float], list[bytes]]:
    """Measured before any update, since the engine starts with B."""
    assert client.weights(refit_engine)["version"] == 0
    return client.outcome(refit_engine)


@pytest.fixture
def engine(
    refit_engine: EngineProcess, fresh_b: tuple[list[float], list[bytes]], b: dict[str, torch.Tensor]
) -> Iterator[EngineProcess]:
    """Serves B before and after every test, whatever the test left it with."""
    yield refit_engine
    push(refit_engine, b)
    assert client.outcome(refit_engine) == fresh_b


def push(engine: EngineProcess, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    with Push(engine.url, engine.api_key, **options) as to_engine:
        to_engine.state_dict(tensors)


def load(engine: EngineProcess, path: Path) -> tuple[bool, str]:
    return client.post(engine, "/update_weights_from_disk", {"model_path": str(path)})


def assert_refuses_to_generate(engine: EngineProcess, reason: str) -> None:
    for path, prompt in (("/generate", {"input_ids": [5, 6]}), ("/v1/completions", {"prompt": "ab", "model": "tiny"})):
        for stream in (False, True):
            with pytest.raises(urllib.error.HTTPError) as refused:
                engine.request(path, {**prompt, "stream": stream})
            with refused.value as error:
                assert error.code == 503
                text = error.read().decode()
            assert "quarantined" in text
            assert reason in text
    assert reason in client.weights(engine)["quarantined"]
    assert engine.request("/trace/heartbeat")["quarantined"]
    assert not engine.request("/trace/report")["ready"]


def test_there_and_back_twice_equals_a_fresh_load_bit_for_bit(
    engine: EngineProcess,
    fresh_b: tuple[list[float], list[bytes]],
    a: dict[str, torch.Tensor],
    b: dict[str, torch.Tensor],
    model_a: Path,
    model_b: Path,
) -> None:
    small = {"bucket_bytes": 20_000}
    push(engine, a, **small)
    by_tensor = client.outcome(engine)
    assert by_tensor != fresh_b
    push(engine, b, **small)
    assert client.outcome(engine) == fresh_b
    assert load(engine, model_a)[0]
    assert client.outcome(engine) == by_tensor
    assert load(engine, model_b)[0]
    assert client.outcome(engine) == fresh_b


def test_halves_of_a_projection_may_come_in_different_buckets(
    engine: EngineProcess, fresh_b: tuple[list[float], list[bytes]], b: dict[str, torch.Tensor]
) -> None:
    others = [item for item in b.items() if item[0] not in (GATE, UP)]
    assert client.post(engine, "/begin_weight_update")[0]
    for bucket in ([(UP, b[UP])], others, [(GATE, b[GATE])]):
        assert client.send(engine, bucket)[0]
    assert client.post(engine, "/end_weight_update")[0]
    assert client.outcome(engine) == fresh_b


def test_a_prefix_of_the_old_weights_is_not_reused(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    prompt = engine_model.token_ids(31, 60)
    client.generate(engine, prompt=prompt)
    assert client.generate(engine, prompt=prompt)["meta_info"]["cached_tokens"] > 0
    push(engine, a)
    assert client.generate(engine, prompt=prompt)["meta_info"]["cached_tokens"] == 0


BAD = {
    "unknown-name": (lambda b: [("model.layers.9.x.weight", b[GATE])], "no tensor of that name"),
    "shape": (lambda b: [(GATE, b[GATE].T.contiguous())], "got shape"),
    "dtype": (lambda b: [(GATE, b[GATE].float())], "got torch.float32"),
    "nan": (lambda b: client.changed(GATE, b[GATE], float("nan")), "NaN"),
    "infinity": (lambda b: client.changed("lm_head.weight", b["lm_head.weight"], float("inf")), "infinite"),
    "twice": (lambda b: [(GATE, b[GATE]), (GATE, b[GATE])], "twice"),
    "not-a-list": (lambda b: {"a": 1}, "pairs"),
    "not-a-tensor": (lambda b: [(GATE, 3)], "expected a dense tensor"),
    "not-a-pickle": (lambda b: "bm90IGEgcGlja2xl", "cannot be opened"),
    "forbidden-class": (lambda b: [(GATE, Path("/x"))], "cannot be opened"),
    "handle-of-another-process": (lambda b: client.by_handle([(GATE, b[GATE].clone())]), "file_system"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_bucket_is_refused_and_the_old_weights_serve(
    engine: EngineProcess, fresh_b: tuple[list[float], list[bytes]], b: dict[str, torch.Tensor], case: str
) -> None:
    make, reason = BAD[case]
    assert client.post(engine, "/begin_weight_update")[0]
    success, message = client.send(engine, make(b))
    assert not success
    assert reason in message
    success, message = client.post(engine, "/end_weight_update")
    assert not success
    assert "old weights serve" in message
    assert client.weights(engine)["quarantined"] is None
    assert client.outcome(engine) == fresh_b


def test_a_refused_bucket_can_be_sent_again(engine: EngineProcess, b: dict[str, torch.Tensor]) -> None:
    assert client.post(engine, "/begin_weight_update")[0]
    assert not client.send(engine, client.changed(GATE, b[GATE], float("nan")))[0]
    assert client.send(engine, list(b.items()))[0]
    assert client.post(engine, "/end_weight_update")[0]


@pytest.mark.parametrize("case", ["only-gate", "only-up", "one-missing", "nan-in-the-second-bucket"])
def test_an_update_that_ends_half_done_quarantines_until_a_full_one_arrives(
    engine: EngineProcess, a: dict[str, torch.Tensor], case: str
) -> None:
    buckets, reason = {
        "only-gate": ([[(GATE, a[GATE])]], "never received"),
        "only-up": ([[(UP, a[UP])]], "never received"),
        "one-missing": ([[item for item in a.items() if item[0] != DOWN]], DOWN),
        "nan-in-the-second-bucket": ([[(UP, a[UP])], client.changed(GATE, a[GATE], float("nan"))], "NaN"),
    }[case]
    assert client.post(engine, "/begin_weight_update")[0]
    for bucket in buckets:
        client.send(engine, bucket)
    success, message = client.post(engine, "/end_weight_update")
    assert not success
    assert reason in message
    assert_refuses_to_generate(engine, reason)
    # A second partial update does not lift it; only a full one does, which the fixture sends.
    assert client.post(engine, "/begin_weight_update")[0]
    assert client.send(engine, [(GATE, a[GATE]), (UP, a[UP]), (DOWN, a[DOWN])])[0]
    assert not client.post(engine, "/end_weight_update")[0]
    assert_refuses_to_generate(engine, "never received")


def test_a_directory_lifts_the_quarantine_too(
    engine: EngineProcess, fresh_b: tuple[list[float], list[bytes]], a: dict[str, torch.Tensor], model_b: Path
) -> None:
    assert client.post(engine, "/begin_weight_update")[0]
    assert client.send(engine, [(GATE, a[GATE])])[0]
    assert not client.post(engine, "/end_weight_update")[0]
    assert load(engine, model_b)[0]
    assert client.outcome(engine) == fresh_b


def wait_until_closed(engine: EngineProcess) -> bool:
    """Whether the engine closes the open session by itself, within a minute."""
    deadline = time.monotonic() + 60
    while client.weights(engine)["session_open"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.parametrize("touched", [False, True])
def test_a_trainer_that_dies_does_not_hold_the_engine(
    engine: EngineProcess, fresh_b: tuple[list[float], list[bytes]], a: dict[str, torch.Tensor], touched: bool
) -> None:
    assert client.post(engine, "/begin_weight_update")[0]
    if touched:
        assert client.send(engine, [(GATE, a[GATE])])[0]
    assert wait_until_closed(engine)
    if touched:
        assert_refuses_to_generate(engine, "not heard")
    else:
        assert client.outcome(engine) == fresh_b


def test_a_new_session_takes_over_from_a_dead_one(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    assert client.post(engine, "/begin_weight_update")[0]
    assert client.send(engine, [(GATE, a[GATE])])[0]
    push(engine, a)
    assert client.weights(engine)["quarantined"] is None


def test_weights_outside_a_session_are_refused(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    success, message = client.send(engine, [(GATE, a[GATE])])
    assert not success
    assert "/begin_weight_update" in message
    assert not client.post(engine, "/end_weight_update")[0]
    success, message = client.post(engine, "/update_weights_from_ipc", {"zmq_handles": {"0": "ipc:///x"}})
    assert not success
    assert "not supported" in message


DAMAGE = {
    "truncated": "truncated",
    "nan": "NaN",
    "missing": "not there",
    "no-directory": "no weights",
    "other-recipe": "its recipe is",
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_directory_is_refused_and_the_old_weights_serve(
    engine: EngineProcess,
    fresh_b: tuple[list[float], list[bytes]],
    a: dict[str, torch.Tensor],
    model_a: Path,
    tmp_path: Path,
    case: str,
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "damaged"
    if case == "other-recipe":
        build_policy(model_a, path, name="other", version="1", recipe=Recipe(experts="w4a16"))
    elif case != "no-directory":
        shutil.copytree(model_a, path)
        shard = path / "model.safetensors"
        if case == "truncated":
            os.truncate(shard, shard.stat().st_size - 100)
        else:
            kept = dict(client.changed(GATE, a[GATE], float("nan"))) if case == "nan" else {}
            save_file({**{k: v for k, v in a.items() if k != GATE}, **kept}, shard, metadata={"format": "pt"})
    success, message = load(engine, path)
    assert not success
    assert DAMAGE[case] in message
    assert "old weights serve" in message
    assert client.outcome(engine) == fresh_b


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_packed_policy_loads_as_the_weights_it_was_packed_from(
    engine: EngineProcess, a: dict[str, torch.Tensor], model_a: Path, tmp_path: Path, layout: str
) -> None:
    push(engine, a)
    expected = client.outcome(engine)
    policy = build_policy(model_a, tmp_path / "packed", name="packed", version="1", recipe=Recipe(), weights=layout)
    assert load(engine, policy.path)[0]
    assert client.outcome(engine) == expected
    assert client.weights(engine)["model_digest"] == policy.digest


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


TRAINER = """
import os, sys, torch
from datetime import timedelta
sys.path.insert(0, sys.argv[2])
import engine_model
from sglang.srt.utils import init_custom_process_group
mode = sys.argv[3]
group = init_custom_process_group(backend="gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", world_size=2, rank=0,
                                  group_name="refit", timeout=timedelta(seconds=60))
tensors = list(engine_model.weights(0).items())
for i, (name, tensor) in enumerate(tensors):
    if mode == "die" and i == 3:
        os._exit(9)
    torch.distributed.broadcast(tensor, src=0, group=group)
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["whole", "die"])
def test_a_trainer_broadcasts_its_weights_in_a_gloo_group(
    engine: EngineProcess, a: dict[str, torch.Tensor], model_a: Path, mode: str
) -> None:
    assert load(engine, model_a)[0]
    expected = client.outcome(engine)
    port = free_port()
    tests = str(Path(engine_model.__file__).parent)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(port), tests, mode], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        named = {"group_name": "refit"}
        refused = client.post(engine, "/init_weights_update_group", {**group, **named})
        assert not refused[0]
        assert "gloo" in refused[1]
        joined = client.post(engine, "/init_weights_update_group", {**group, **named, "backend": "gloo"})
        for _ in range(10):
            if joined[0]:
                break
            # The trainer takes longer to import torch than the engine waits for it here.
            joined = client.post(engine, "/init_weights_update_group", {**group, **named, "backend": "gloo"})
        assert joined[0], joined[1]
        assert client.post(engine, "/begin_weight_update")[0]
        metadata = {
            "names": list(a),
            "dtypes": ["bfloat16"] * len(a),
            "shapes": [list(tensor.shape) for tensor in a.values()],
            **named,
        }
        success, message = client.post(engine, "/update_weights_from_distributed", metadata)
        ended = client.post(engine, "/end_weight_update")
        if mode == "whole":
            assert (success, ended[0]) == (True, True), (message, ended)
        else:
            assert (success, ended[0]) == (False, False)
            assert "broadcast" in message
            assert "old weights serve" in ended[1]
        assert client.outcome(engine) == expected
        client.post(engine, "/destroy_weights_update_group", named)
    finally:
        trainer.kill()
        trainer.communicate()


def test_a_trainer_that_never_joins_its_group_is_given_up(engine: EngineProcess) -> None:
    body = {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "nobody",
        "backend": "gloo",
    }
    begin = time.monotonic()
    assert not client.post(engine, "/init_weights_update_group", body)[0]
    assert time.monotonic() - begin < 60
    assert engine.request("/trace/heartbeat")["alive"]


def test_requests_wait_while_a_session_is_open(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    answers: list[dict[str, Any]] = []
    assert client.post(engine, "/begin_weight_update")[0]
    waiting = [threading.Thread(target=lambda: answers.append(client.generate(engine))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.5)
    # A continue of a trainer that does not know better must not start them on half-loaded weights.
    engine.request("/continue_generation", {})
    for chunk in (list(a.items())[:40], list(a.items())[40:]):
        assert client.send(engine, chunk, weight_version="step-7")[0]
        time.sleep(0.3)
        assert not answers
    assert client.post(engine, "/end_weight_update")[0]
    for thread in waiting:
        thread.join(60)
    assert len(answers) == 3
    for answer in answers:
        assert answer["meta_info"]["weight_version"] == "step-7"
        assert answer["meta_info"]["weight_version_spans"]["rows"] == [[0, len(client.PROMPT) + 3, "step-7"]]


def test_a_label_is_that_of_weights_that_serve(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    before = client.generate(engine)["meta_info"]["weight_version"]
    assert client.post(engine, "/begin_weight_update")[0]
    assert not client.send(engine, client.changed(GATE, a[GATE], float("nan")), weight_version="never")[0]
    assert not client.post(engine, "/end_weight_update")[0]
    assert client.generate(engine)["meta_info"]["weight_version"] == before
    with Push(engine.url, engine.api_key) as to_engine:
        to_engine.state_dict(a, version="step-8")
    assert client.generate(engine)["meta_info"]["weight_version"] == "step-8"
    assert engine.request("/model_info")["weight_version"] == "step-8"
    push(engine, a)
    assert client.generate(engine)["meta_info"]["weight_version"] == "step-8+1"


def test_resetting_tensors_is_not_served(engine: EngineProcess) -> None:
    engine.request("/weights_checker", {"action": "reset_tensors"})
    assert_refuses_to_generate(engine, "reset")


def test_the_served_name_survives_an_update_from_disk(engine: EngineProcess, model_a: Path) -> None:
    assert load(engine, model_a)[0]
    assert [model["id"] for model in engine.request("/v1/models")["data"]] == [engine.served_name]


def test_a_push_that_fails_says_what_the_engine_is_left_with(engine: EngineProcess, a: dict[str, torch.Tensor]) -> None:
    with pytest.raises(EngineError, match=r"NaN.*old weights serve"):
        push(engine, {**dict(client.changed(GATE, a[GATE], float("nan"))), **{k: v for k, v in a.items() if k != GATE}})
    with pytest.raises(EngineError, match="quarantined"):
        push(engine, {k: v for k, v in a.items() if k != DOWN})


@pytest.fixture(scope="module")
def rotated_engine(model_b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("rotated-engine")
    recipe = Recipe(expert_rotation=16, k_rotation=16, four_over_six="experts", global_scale_max=256)
    config = EngineConfig(
        model=model_b, recipe=recipe, log_path=directory / "engine.log", max_total_tokens=1024, partial_refit=True
    )
    engine = EngineProcess(config)
    engine.start()
    engine.wait_ready(START_TIMEOUT_S)
    yield engine
    engine.stop()


def test_rotated_experts_with_4over6_survive_updates_whole_and_partial(
    rotated_engine: EngineProcess, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], model_a: Path, model_b: Path
) -> None:
    engine = rotated_engine
    fresh = client.outcome(engine)
    push(engine, a)
    with_a = client.outcome(engine)
    assert with_a != fresh
    push(engine, b)
    assert client.outcome(engine) == fresh
    assert load(engine, model_a)[0]
    assert client.outcome(engine) == with_a
    # Only what differs from A comes, in an engine that allows it, and it comes to the same as all of B.
    experts = {name: tensor for name, tensor in b.items() if ".experts." in name}
    push(engine, experts)
    assert client.outcome(engine) != fresh
    push(engine, {name: tensor for name, tensor in b.items() if name not in experts})
    assert client.outcome(engine) == fresh
    with pytest.raises(EngineError, match="other half"):
        push(engine, {GATE: a[GATE]})
    assert_refuses_to_generate(engine, "other half")
    assert load(engine, model_b)[0]
    assert client.outcome(engine) == fresh


def test_two_ranks_take_refuse_and_give_up_updates_together(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], model_a: Path, model_b: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=model_b,
        recipe=Recipe(),
        log_path=tmp_path / "engine.log",
        max_total_tokens=1024,
        refit_timeout_s=4.0,
        tensor_parallel=2,
    )
    with EngineProcess(config) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        fresh = client.outcome(engine)
        push(engine, a)
        with_a = client.outcome(engine)
        assert with_a != fresh
        assert load(engine, model_b)[0]
        assert client.outcome(engine) == fresh
        with pytest.raises(EngineError, match=r"NaN.*old weights serve"):
            push(engine, {**b, **dict(client.changed(GATE, b[GATE], float("nan")))})
        assert client.outcome(engine) == fresh
        assert client.post(engine, "/begin_weight_update")[0]
        assert client.send(engine, [(DOWN, a[DOWN])])[0]
        assert wait_until_closed(engine)
        assert_refuses_to_generate(engine, "not heard")
        assert load(engine, model_a)[0]
        assert client.outcome(engine) == with_a
