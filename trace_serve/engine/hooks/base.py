"""What one hook is: a place in SGLang that the patch layer wraps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


@dataclass(frozen=True)
class Hook:
    """Attributes:
    name: how `doctor` and errors call the seam.
    target: dotted path in SGLang.
    type: how SGLang's registry combines the wrapper with the original.
    function: the wrapper.
    why: what is lost without it.
    parameters: names that the wrapper relies on, in order; a changed signature is a moved seam. None takes any.
    """

    name: str
    target: str
    type: HookType
    function: Callable[..., Any]
    why: str
    parameters: tuple[str, ...] | None = None
