"""Which names a request may give as its `model`."""

from __future__ import annotations

from collections.abc import Sequence

from trace_serve.server.errors import not_found
from trace_serve.server.service import Service


def check_model(model: str | None, answering: Sequence[Service]) -> None:
    """Refuses a model that no policy in service is called.

    Args:
        model: as the client wrote it; None takes any.
        answering: services whose answers clients get.

    Raises:
        ApiError: 404.
    """
    if model is None or any(model in service.model_names for service in answering):
        return
    names = " or ".join(repr(service.authorization.name) for service in answering)
    raise not_found(
        f"model: got {model!r}, expected {names}, the policy in service", param="model", code="model_not_found"
    )
