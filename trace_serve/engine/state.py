"""What one engine process holds: its spec, its kernels, its counters and, in the scheduler, the hint slot pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from trace_serve import nvfp4
from trace_serve.engine.spec import EngineSpec
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import EngineError
from trace_serve.kernels import RecipeKernels, kernels_for

if TYPE_CHECKING:
    from trace_serve.engine.refit.core import Refit
    from trace_serve.hints.slots import ExpertInputSlots, SlotVersions


class EngineState:
    """One per process.

    Attributes:
        slots: outcomes of quantizing expert inputs; None outside the scheduler and where inputs stay BF16.
        versions: weight version of each KV slot; None outside the scheduler of an FP4 engine.
        locations: KV slots of the tokens of the running forward pass, in row order.
        check_seams: what each seam of this process is, by name: `ok` or what is wrong; set by the plugin.
        refit: weight updates; None outside the scheduler.
        weight_version: counts weight updates; rows computed under another version are missing rows.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.telemetry = Telemetry(spec.run_dir)
        self.kernels: RecipeKernels = kernels_for(spec.recipe, "cpu")
        self.counters: Tensor = nvfp4.new_counters()
        self.slots: ExpertInputSlots | None = None
        self.versions: SlotVersions | None = None
        self.locations: Tensor | None = None
        self.check_seams: Callable[[], dict[str, str]] = dict
        self.refit: Refit | None = None
        self.weight_version = 0

    def begin_forward(self, locations: Tensor | None) -> None:
        """Announces a forward pass that will write the given KV slots."""
        self.telemetry.beat()
        self.locations = locations
        if self.versions is not None and locations is not None:
            self.versions.mark(locations, self.weight_version)

    def capture_experts_in(self, layer: int, quantized: nvfp4.Quantized) -> None:
        """Stores the outcome of quantizing one layer's expert inputs under the KV slots of their tokens.

        A forward pass whose rows are not its tokens (another pass than the one announced) is counted and not stored:
        a missing row is marked missing, a wrong row would be believed.
        """
        self.telemetry.beat()
        if self.slots is None:
            return
        if self.locations is None or self.locations.shape[0] != quantized.codes.shape[0]:
            self.telemetry.add("capture_mismatches", 1)
            return
        self.slots.store(layer, self.locations, quantized, self.weight_version)

    def flush_counters(self) -> None:
        """Moves the incident counts of the kernels to the shared telemetry."""
        for name, count in zip(nvfp4.INCIDENT_NAMES, self.counters.tolist(), strict=True):
            if count:
                self.telemetry.add(name, count)
        self.counters.zero_()


_state: EngineState | None = None


def create(spec: EngineSpec) -> EngineState:
    """Sets the state of this process; a second call with the same spec returns the same state."""
    global _state
    if _state is None or _state.spec != spec:
        _state = EngineState(spec)
    return _state


def get() -> EngineState:
    """Raises:
    EngineError: the plugin did not run in this process.
    """
    if _state is None:
        raise EngineError("the trace_serve plugin did not run in this process; run `trace-serve doctor`")
    return _state
