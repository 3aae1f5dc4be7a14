"""Parts of weight updates that need no engine."""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import engine_model
import numpy as np
import pytest
import torch

from trace_serve.engine.push import Push
from trace_serve.engine.refit import status
from trace_serve.engine.refit.manifest import Manifest, check_directory
from trace_serve.engine.refit.session import Session
from trace_serve.engine.refit.versions import Versions, sampled_versions
from trace_serve.errors import ConfigError, EngineError, PolicyError, ShapeError
from trace_serve.policy.build import build_policy
from trace_serve.recipe import Recipe

GATE, UP, DOWN = (f"model.layers.0.block_sparse_moe.experts.1.{name}.weight" for name in ("w1", "w3", "w2"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_model.write_engine_model(tmp_path_factory.mktemp("manifest") / "tiny")


@pytest.fixture(scope="module")
def manifest(model: Path) -> Manifest:
    return Manifest.of_directory(model)


def test_spans_cover_every_token_once_in_order() -> None:
    versions = Versions("start")
    assert versions.add("step-1") == 1
    assert versions.spans([0, 0, 1, 1, 1, 0]) == ((0, 2, "start"), (2, 5, "step-1"), (5, 6, "start"))
    assert versions.spans(torch.tensor([1], dtype=torch.int32)) == ((0, 1, "step-1"),)
    assert versions.spans(np.array([], dtype=np.int32)) == ()
    assert versions.spans([-1, 0]) == ((0, 1, "unknown"), (1, 2, "start"))


def test_updates_without_a_label_are_told_apart() -> None:
    versions = Versions("step-1")
    for expected in ("step-1+1", "step-1+2"):
        versions.add(versions.next_label(None))
        assert versions.labels[-1] == expected
    assert versions.next_label("step-2") == "step-2"


def test_a_token_is_as_old_as_the_pass_that_sampled_it() -> None:
    # Prompt of 3, output of 4; in place: rows themselves say it.
    assert sampled_versions([(0, 2)], [0, 0, 0, 0, 1, 1], 3, 4) == [0, 0, 1, 1]
    # Retracted after two tokens: all rows are new, the two tokens are not.
    assert sampled_versions([(0, 2)], [1] * 6, 3, 4) == [0, 0, 1, 1]
    # Retracted twice.
    assert sampled_versions([(0, 1), (1, 3)], [2] * 6, 3, 4) == [0, 1, 1, 2]
    assert sampled_versions([], [], 0, 0) == []


def test_a_whole_session_has_no_fault(manifest: Manifest) -> None:
    session = Session("all")
    session.accept(manifest.tensors)
    assert session.fault(manifest, partial=False) is None
    session.refuse([GATE], "NaN")
    assert "NaN" in str(session.fault(manifest, partial=False))
    session.accept([GATE])
    assert session.fault(manifest, partial=False) is None
    session.broken = "disk on fire"
    assert session.fault(manifest, partial=True) == "disk on fire"


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        ((GATE, UP), None),
        ((DOWN,), None),
        ((GATE,), "other half"),
        ((UP, DOWN), "other half"),
        (("lm_head.weight",), None),
    ],
)
def test_a_partial_session_needs_both_halves(manifest: Manifest, received: tuple[str, ...], fault: str | None) -> None:
    session = Session("all")
    session.accept(received)
    found = session.fault(manifest, partial=True)
    assert found is None if fault is None else fault in str(found)
    assert "never received" in str(session.fault(manifest, partial=False))


def test_a_bucket_that_could_not_be_read_is_not_forgotten(manifest: Manifest) -> None:
    session = Session("all")
    session.accept([GATE, UP])
    session.refuse([], "not a pickle")
    assert "not a pickle" in str(session.fault(manifest, partial=True))
    session.accept(manifest.tensors)
    assert session.fault(manifest, partial=True) is None


def test_names_dtypes_shapes_and_values_are_checked(manifest: Manifest) -> None:
    good = engine_model.weights(3)
    manifest.check(good.items())
    tensor = good[GATE]
    bad: list[tuple[Any, type[Exception], str]] = [
        ([("model.x", tensor)], ConfigError, "no tensor of that name"),
        ([("lm_head.weight.extra", tensor)], ConfigError, "no tensor of that name"),
        ([(GATE, tensor.half())], ShapeError, "float16"),
        ([(GATE, tensor[:-1])], ShapeError, "shape"),
        ([(GATE, tensor.to_sparse())], ConfigError, "dense"),
        ([(GATE, [1.0])], ConfigError, "dense"),
        ([(GATE, tensor * float("inf"))], ConfigError, "NaN or infinite"),
    ]
    for bucket, error, message in bad:
        with pytest.raises(error, match=message):
            manifest.check(bucket)


def test_a_tied_head_may_be_sent_and_need_not(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: t for name, t in engine_model.weights(0).items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**engine_model.CONFIG, "tie_word_embeddings": True}))
    manifest = Manifest.of_directory(tmp_path)
    manifest.check([("lm_head.weight", tensors["model.embed_tokens.weight"])])
    assert manifest.missing(tensors) == []


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_packed_checkpoint_expects_the_matrices_it_stands_for(
    model: Path, manifest: Manifest, tmp_path: Path, layout: str
) -> None:
    policy = build_policy(model, tmp_path / layout, name="p", version="1", recipe=Recipe(), weights=layout)
    assert Manifest.of_directory(policy.path).tensors == manifest.tensors
    ticks: list[int] = []
    check_directory(manifest, policy.path, Recipe(), lambda: ticks.append(1))
    assert len(ticks) == len(manifest.tensors)
    with pytest.raises(PolicyError, match="its recipe is"):
        check_directory(manifest, policy.path, Recipe(k_rotation=16), lambda: None)


def test_the_status_is_replaced_whole(tmp_path: Path) -> None:
    assert status.read(tmp_path) == status.WeightStatus()
    written = status.WeightStatus(version=3, label="step-3", quarantined="half of it")
    status.write(tmp_path, written)
    assert status.read(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == [status.FILE_NAME]


class Recorder(BaseHTTPRequestHandler):
    """Records what a client sends; refuses the bucket that the server's `refuse` counts down to."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.calls.append((self.path, self.headers["Authorization"], body))
        buckets = sum(path == "/update_weights_from_tensor" for path, _, _ in server.calls)
        refused = self.path == "/update_weights_from_tensor" and buckets == server.refuse
        ended_badly = self.path == "/end_weight_update" and 0 < server.refuse <= buckets
        message = "bucket 2 is bad" if refused else "the old weights serve"
        answer = json.dumps({"success": not (refused or ended_badly), "message": message}).encode()
        self.send_response(400 if refused or ended_badly else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    http: Any = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    http.calls, http.refuse = [], 0
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def sent(server: Any) -> list[list[tuple[str, torch.Tensor]]]:
    bodies = [body for path, _, body in server.calls if path == "/update_weights_from_tensor"]
    return [pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])) for body in bodies]


def test_a_push_sends_values_in_buckets_between_pause_and_continue(server: Any) -> None:
    base = torch.arange(4096, dtype=torch.float32).to(torch.bfloat16).view(64, 64)
    tensors = {"a": base, "view": base[:2].T, "b": torch.nn.Parameter(torch.ones(8)), "large": torch.zeros(4096)}
    with Push(f"http://127.0.0.1:{server.server_port}/", "key", bucket_bytes=9000) as push:
        push.state_dict(tensors, version="step-1")
    paths = [path for path, _, _ in server.calls]
    assert paths[:2] == ["/pause_generation", "/begin_weight_update"]
    assert paths[-2:] == ["/end_weight_update", "/continue_generation"]
    assert {key for _, key, _ in server.calls} == {"Bearer key"}
    buckets = sent(server)
    assert [[name for name, _ in bucket] for bucket in buckets] == [["a", "view", "b"], ["large"]]
    for name, tensor in (item for bucket in buckets for item in bucket):
        assert torch.equal(tensor, tensors[name].detach())
        # A view must not bring its whole storage along.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert {body["weight_version"] for path, _, body in server.calls if path.endswith("from_tensor")} == {"step-1"}


def test_a_refused_bucket_ends_the_session_and_tells_both_reasons(server: Any) -> None:
    server.refuse = 2
    tensors = {name: torch.ones(8) for name in "abcd"}
    push = Push(f"http://127.0.0.1:{server.server_port}", "key", bucket_bytes=32)
    with pytest.raises(EngineError, match=r"bucket 2 is bad; /end_weight_update: the old weights serve"), push:
        push.state_dict(tensors)
    paths = [path for path, _, _ in server.calls]
    assert paths.count("/update_weights_from_tensor") == 2
    assert paths[-2:] == ["/end_weight_update", "/continue_generation"]


def test_a_trainer_that_fails_while_it_gathers_closes_its_session(server: Any) -> None:
    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(8)
        raise KeyError("lost a shard")

    with pytest.raises(KeyError, match="lost a shard"):
        Push(f"http://127.0.0.1:{server.server_port}", "key", pause=None, bucket_bytes=1).tensors(gather())
    assert [path for path, _, _ in server.calls][-1] == "/end_weight_update"


def test_what_is_not_a_tensor_is_named(server: Any) -> None:
    with pytest.raises(ConfigError, match="'a': got list"):
        Push(f"http://127.0.0.1:{server.server_port}", "key", pause=None).tensors([("a", [1.0])])  # type: ignore[list-item]


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match="no answer from http"):
        Push("http://127.0.0.1:9", "key", pause=None).directory("/models/a")
