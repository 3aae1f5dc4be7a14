"""How a bucket of tensors reaches the scheduler: serialized in a request, or broadcast in a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import ProcessError
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import ConfigError, EngineError

NamedTensors = list[tuple[str, Tensor]]
FLATTENED = "flattened_bucket"
_BEAT_S = 1.0
_SHARING = (
    "a tensor of another process cannot be opened here; send it by value (trace_serve.engine.push does), or call "
    "torch.multiprocessing.set_sharing_strategy('file_system') in the sender and keep it alive until the answer"
)


@contextmanager
def beating(telemetry: Telemetry, limit_s: float) -> Iterator[None]:
    """Signs of life while the scheduler waits for a sender, for at most `limit_s` seconds.

    A scheduler that receives is not frozen; one that waits longer than any transfer may take is.
    """
    stop = Event()

    def beat() -> None:
        for _ in range(max(1, int(limit_s / _BEAT_S))):
            telemetry.beat()
            if stop.wait(_BEAT_S):
                return

    thread = Thread(target=beat, name="refit-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def from_request(payloads: Any, load_format: str | None, rank: int) -> NamedTensors:
    """Opens the payload of one rank of `/update_weights_from_tensor`.

    Args:
        payloads: a serialized list of (name, tensor), or flattened bucket: one for all ranks, or one a rank.
        load_format: None or `flattened_bucket`.
        rank: tensor-parallel rank.

    Raises:
        ConfigError: a load format that bypasses the checkpoint loader, several payloads but fewer than ranks, or other
            content.
        EngineError: the payload cannot be opened.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    _check_format(load_format)
    if len(payloads) != 1 and len(payloads) <= rank:
        raise ConfigError(
            f"serialized_named_tensors: got {len(payloads)} payloads, expected one, or one for each rank",
            field="serialized_named_tensors",
        )
    monkey_patch_torch_reductions()
    try:
        content = MultiprocessingSerializer.deserialize(payloads[rank if len(payloads) > 1 else 0])
    except Exception as exc:
        hint = f"; {_SHARING}" if isinstance(exc, OSError | EOFError | ProcessError) else ""
        raise EngineError(
            f"serialized_named_tensors: cannot be opened: {type(exc).__name__}: {exc}{hint}",
            field="serialized_named_tensors",
        ) from exc
    if load_format == FLATTENED:
        return _flattened(content)
    if not isinstance(content, list | tuple) or not all(_is_pair(item) for item in content):
        raise ConfigError(
            "serialized_named_tensors: expected a list of (name, tensor) pairs", field="serialized_named_tensors"
        )
    return [
        (name, tensor.get(rank) if isinstance(tensor, LocalSerializedTensor) else tensor) for name, tensor in content
    ]


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)


def _check_format(load_format: str | None) -> None:
    if load_format not in (None, FLATTENED):
        raise ConfigError(
            f"load_format: got {load_format!r}, expected none or {FLATTENED!r}; others bypass the checkpoint loader, "
            "which experts are quantized behind",
            field="load_format",
        )


def _flattened(content: Any) -> NamedTensors:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    try:
        bucket = FlattenedTensorBucket(flattened_tensor=content["flattened_tensor"], metadata=content["metadata"])
        tensors: NamedTensors = bucket.reconstruct_tensors()
    except Exception as exc:
        raise ConfigError(
            f"serialized_named_tensors: not a flattened bucket: {type(exc).__name__}: {exc}",
            field="serialized_named_tensors",
        ) from exc
    return tensors


def from_broadcast(updater: Any, request: Any) -> NamedTensors:
    """Receives the tensors of `/update_weights_from_distributed`; rank 0 of the group sends them one after the other.

    They are received even when they will be refused, so that sender and engine stay in step.

    Args:
        updater: SGLang's WeightUpdater, which holds the process groups.
        request: names, dtypes, shapes, group name and load format.

    Raises:
        ConfigError: metadata that cannot be received, or a group that does not exist.
        EngineError: the sender went away, or sent nothing within the group's time limit.
    """
    _check_format(request.load_format)
    names, dtypes, shapes = request.names, request.dtypes, request.shapes
    if not len(names) == len(dtypes) == len(shapes):
        raise ConfigError(
            f"names, dtypes, shapes: got {len(names)}, {len(dtypes)} and {len(shapes)}, expected as many of each",
            field="names",
        )
    for name, dtype in zip(names, dtypes, strict=True):
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"tensor {name!r}: unknown dtype {dtype!r}, expected bfloat16", field="dtypes")
    if request.group_name not in updater._model_update_group:
        raise ConfigError(
            f"group_name: got {request.group_name!r}, which does not exist; call /init_weights_update_group first",
            field="group_name",
        )
    try:
        tensors: NamedTensors = updater.receive_weights_from_distributed(
            names=names, dtypes=dtypes, shapes=shapes, group_name=request.group_name, load_format=request.load_format
        )
    except Exception as exc:
        raise EngineError(
            f"broadcast in group {request.group_name!r} failed: {str(exc).splitlines()[0]}; destroy the group, "
            "create it again and resend",
            field="group_name",
        ) from exc
    return tensors
