"""Sending a trainer's weights to a running engine, so that it serves all of them or none (no sglang here).

    with Push(engine.url, engine.api_key) as push:
        push.state_dict(model.state_dict(), version="step-12")

Tensors travel by value, in buckets, so the trainer may run anywhere and reuse its buffers at once. Beside the engine,
`Push.directory` is faster: the engine reads the files itself.
"""

from __future__ import annotations

import base64
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from trace_serve.errors import ConfigError, EngineError

Pause = Literal["abort", "retract", "in_place"]
_PROTOCOL = 4


class Push:
    """Pauses the engine, sends weights, and lets it go on. Not thread-safe.

    Args:
        url: of the engine, without a path.
        api_key: its bearer key.
        pause: what becomes of requests in flight. `retract`: they are prefilled again by the new weights and go on ·
            `in_place`: they go on with the KV of the old ones · `abort`: they end with what they have · None: the
            update waits until they have finished.
        bucket_bytes: size of one request; the engine holds one bucket beside its weights.
        timeout_s: longest wait for the answer to one request.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        pause: Pause | None = "retract",
        bucket_bytes: int = 1 << 28,
        timeout_s: float = 600.0,
    ) -> None:
        self._url, self._key = url.rstrip("/"), api_key
        self._pause, self._bucket_bytes, self._timeout_s = pause, bucket_bytes, timeout_s

    def __enter__(self) -> Self:
        if self._pause is not None:
            self._post("/pause_generation", {"mode": self._pause})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pause is not None:
            self._post("/continue_generation", {})

    def state_dict(self, tensors: Mapping[str, Tensor], *, version: str | None = None) -> None:
        """Sends every tensor of the model under its checkpoint name.

        Args:
            tensors: dense, finite, with the dtypes and shapes of the checkpoint that the engine was started from.
            version: label of the weights; None continues the last one's.

        Raises:
            ConfigError: a value that is not a tensor.
            EngineError: the engine refused or lost the update; the message says whether the old weights serve or it is
                quarantined.
        """
        self._session(tensors.items(), version)

    def tensors(self, tensors: Iterable[tuple[str, Tensor]], *, version: str | None = None) -> None:
        """As `state_dict`, from an iterator, for a trainer that gathers one tensor at a time."""
        self._session(tensors, version)

    def directory(self, path: Path | str, *, version: str | None = None) -> None:
        """Makes the engine load a model directory or policy that it can read itself.

        Raises:
            EngineError: as `state_dict`.
        """
        body = {"model_path": str(path), "weight_version": version}
        self._post("/update_weights_from_disk", {key: value for key, value in body.items() if value is not None})

    def _session(self, tensors: Iterable[tuple[str, Tensor]], version: str | None) -> None:
        self._post("/begin_weight_update", {})
        try:
            for bucket in _buckets(tensors, self._bucket_bytes):
                # torch's own reduction would send handles to shared memory instead of values.
                payload = base64.b64encode(pickle.dumps(bucket, protocol=_PROTOCOL)).decode()
                body: dict[str, Any] = {"serialized_named_tensors": [payload]}
                if version is not None:
                    body["weight_version"] = version
                self._post("/update_weights_from_tensor", body)
        except BaseException as exc:
            # The engine decides what it is left with; without this it would wait for the rest of the update.
            raise self._failed(exc) from exc
        self._post("/end_weight_update", {})

    def _failed(self, cause: BaseException) -> BaseException:
        try:
            self._post("/end_weight_update", {})
        except EngineError as exc:
            text = str(cause) or type(cause).__name__
            return EngineError(f"{text}; {exc}") if isinstance(cause, Exception) else cause
        return cause

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                response.read()
        except urllib.error.HTTPError as exc:
            with exc:
                raise EngineError(f"{path}: {_message(exc.read())}") from exc
        except OSError as exc:
            raise EngineError(f"{path}: no answer from {self._url}: {exc}") from exc


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500]


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups tensors into lists of at most `limit` bytes; a larger tensor is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name!r}: got {type(tensor).__name__}, expected a tensor", field=name)
        # A copy of its own: pickle would send the whole storage of a view.
        own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        if bucket and size + own.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, own))
        size += own.nbytes
    if bucket:
        yield bucket
