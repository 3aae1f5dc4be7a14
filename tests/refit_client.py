"""What the tests of weight updates ask of an engine."""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
import urllib.error
import urllib.request
from multiprocessing.reduction import ForkingPickler
from typing import Any

import engine_model
import torch

from trace_serve.engine.launch import EngineProcess
from trace_serve.hints import wire

PROMPT = engine_model.token_ids(9, 20)


def generate(engine: EngineProcess, *, prompt: list[int] | None = None, new: int = 4, **custom: Any) -> dict[str, Any]:
    """A greedy answer with log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, "custom_params": custom or None}
    body = {"input_ids": prompt or PROMPT, "sampling_params": sampling, "return_logprob": True}
    return engine.request("/generate", body, timeout_s=120)


def outcome(engine: EngineProcess) -> tuple[list[float], list[bytes]]:
    """Log-probabilities of an answer, and every byte of its hints."""
    answer = generate(engine, trace_hints={"sink": "inline", "scale": "byte"})["meta_info"]
    hints = wire.from_bytes(base64.b64decode(answer["trace_hints"]["data"]))
    assert all(site.present.all() for site in hints.sites)
    arrays = [
        array for site in hints.sites for array in (site.bits, site.scales, site.global_log2) if array is not None
    ]
    return [entry[0] for entry in answer["output_token_logprobs"]], [array.tobytes() for array in arrays]


def weights(engine: EngineProcess) -> dict[str, Any]:
    found: dict[str, Any] = engine.request("/trace/report")["weights"]
    return found


def post(engine: EngineProcess, path: str, body: dict[str, Any] | None = None) -> tuple[bool, str]:
    """Success and message of a weight-update call, whatever its status."""
    try:
        answer = engine.request(path, body or {}, timeout_s=120)
    except urllib.error.HTTPError as exc:
        with exc:
            answer = json.loads(exc.read())
    return bool(answer.get("success")), str(answer["message"])


def by_value(tensors: Any) -> str:
    return base64.b64encode(pickle.dumps(tensors)).decode()


def by_handle(tensors: Any) -> str:
    """As torch's multiprocessing sends tensors: handles to memory of this process."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


def send(engine: EngineProcess, tensors: Any, **fields: Any) -> tuple[bool, str]:
    """One bucket of the open session."""
    payload = tensors if isinstance(tensors, str) else by_value(tensors)
    return post(engine, "/update_weights_from_tensor", {"serialized_named_tensors": [payload], **fields})


def changed(name: str, tensor: torch.Tensor, value: float) -> list[tuple[str, torch.Tensor]]:
    """The tensor with one value replaced."""
    other = tensor.clone()
    other.view(-1)[0] = value
    return [(name, other)]


class Stream:
    """A streamed request in a thread of its own, so that weights can change under it."""

    def __init__(self, engine: EngineProcess, *, prompt: list[int], new: int, **custom: Any) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, "custom_params": custom or None}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}
        self._request = urllib.request.Request(
            engine.url + "/generate",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"},
        )
        self.last: dict[str, Any] = {}
        self._tokens = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    with self._changed:
                        self.last = json.loads(line[len(b"data: ") :])
                        self._tokens = len(self.last.get("output_ids", ()))
                        self._changed.notify_all()

    def wait_for(self, tokens: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._tokens >= tokens, timeout=60), self.last

    def result(self) -> dict[str, Any]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.last
