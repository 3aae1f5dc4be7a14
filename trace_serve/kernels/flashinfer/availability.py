"""Whether the FlashInfer backend can run on a device, with the reason where it cannot."""

from __future__ import annotations

import importlib.util

import torch

from trace_serve.errors import EngineError
from trace_serve.kernels.base import Availability
from trace_serve.kernels.flashinfer import contract, environment

NAME = "flashinfer"
CAPABILITIES = ((10, 0), (10, 3))
"""GB200 and B200 (sm_100), GB300 and B300 (sm_103). Rubin (sm_107) needs other tile parameters than ours."""


def capability_reason(capability: tuple[int, int]) -> str:
    """Why a card of this compute capability cannot run the backend; empty if it can."""
    if capability in CAPABILITIES:
        return ""
    return f"needs sm_100 or sm_103, not sm_{capability[0]}{capability[1]}"


def reason(device: torch.device | str) -> str:
    """Why the backend cannot run on a device, in words that follow its name; empty if it can.

    Imports FlashInfer (seconds) only when the device could run it.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return f"runs on cuda, not on {place.type}"
    if not torch.cuda.is_available():
        return "needs a CUDA device: none is visible"
    unfit = capability_reason(torch.cuda.get_device_capability(place))
    if unfit:
        return unfit
    if importlib.util.find_spec("flashinfer") is None:
        return f"needs {contract.DISTRIBUTION}=={contract.VERSION}: it is not installed"
    problem = environment.exact_math_problem()
    if problem:
        return f"needs exact math: {problem}"
    try:
        contract.check_contract()
    except EngineError as exc:
        return str(exc)
    return ""


def available(device: torch.device | str) -> Availability:
    """`reason` as the registry of backends states it."""
    why = reason(device)
    return Availability(NAME, not why, why)
