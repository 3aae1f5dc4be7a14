"""What one engine process holds: its spec, its kernels, its counters and, in the scheduler, the hint slot pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from trace_serve import nvfp4
from trace_serve.engine.ranks import Ranks
from trace_serve.engine.spec import EngineSpec
from trace_serve.engine.telemetry import Telemetry
from trace_serve.errors import EngineError
from trace_serve.kernels import RecipeKernels, kernels_for

if TYPE_CHECKING:
    from trace_serve.engine.refit.core import Refit
    from trace_serve.hints.sinks import AllowedTargets, Job, Receipt, SinkEvent, SinkQueue
    from trace_serve.hints.slots import ExpertSlots, SlotPasses


class EngineState:
    """One per process.

    Attributes:
        ranks: this process's place among the tensor-parallel ranks, known once the scheduler loads its model.
        widths: blocks of the sites that ranks share, see `ranks.widths_of`; empty outside the scheduler.
        layers: layers of the model; 0 outside the scheduler.
        expert_slots: outcomes of quantizing experts' inputs, by site; empty outside the scheduler and where inputs
            stay BF16.
        passes: forward pass and weight version of each KV slot; None outside the scheduler of an FP4 engine.
        pass_number: counts forward passes.
        locations: KV slots of the tokens of the running forward pass, in row order.
        check_seams: what each seam of this process is, by name: `ok` or what is wrong; set by the plugin.
        refit: weight updates; None outside the scheduler.
        weight_version: counts weight updates.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.telemetry = Telemetry(spec.run_dir)
        self.kernels: RecipeKernels = kernels_for(spec.recipe, "cpu")
        self.counters: Tensor = nvfp4.new_counters()
        self.ranks = Ranks()
        self.widths: dict[str, int] = {}
        self.layers = 0
        self.expert_slots: dict[str, ExpertSlots] = {}
        self.passes: SlotPasses | None = None
        self.pass_number = 0
        self.locations: Tensor | None = None
        self.check_seams: Callable[[], dict[str, str]] = dict
        self.refit: Refit | None = None
        self.weight_version = 0

    @property
    def shared_counters(self) -> Tensor | None:
        """Where incidents are counted that every rank sees alike: on one of them."""
        return self.counters if self.ranks.rank == 0 else None

    def begin_forward(self, locations: Tensor | None) -> None:
        """Announces a forward pass that will write the given KV slots."""
        self.telemetry.beat()
        self.locations = locations
        self.pass_number += 1
        if self.passes is not None and locations is not None:
            self.passes.mark(locations, self.pass_number, self.weight_version)

    def keeps(self, site: str, layer: int) -> bool:
        """Whether the outcomes of that site and layer are kept for hints."""
        kept = self.expert_slots.get(site)
        return kept is not None and layer in kept.layers

    def capture(self, site: str, layer: int, quantized: nvfp4.Quantized) -> None:
        """Stores the outcomes of one site and layer under the KV slots of their tokens.

        A forward pass whose rows are not its tokens (another pass than the one announced) is counted and not stored:
        a missing row is marked missing, a wrong row would be believed.
        """
        kept = self.expert_slots[site]
        rows = quantized.scales.shape[0]
        if self.locations is None or self.locations.shape[0] * kept.groups != rows:
            self.telemetry.add("capture_mismatches", 1)
            return
        kept.store(layer, self.locations, quantized, self.pass_number)

    @property
    def model_digest(self) -> str:
        """Digest of the directory that the weights were read from; empty for weights that a trainer sent."""
        return self.spec.policy_digest if self.refit is None else self.refit.versions.digests[-1]

    @cached_property
    def allowed_targets(self) -> AllowedTargets:
        """Where a request may send its hints."""
        from trace_serve.hints.sinks import AllowedTargets

        spec = self.spec
        return AllowedTargets(
            hint_dir=None if spec.hint_dir is None else Path(spec.hint_dir),
            url_prefixes=spec.hint_urls,
            shm=spec.hint_shm,
        )

    @cached_property
    def sinks(self) -> SinkQueue:
        """The queue to every place but the answer itself; its threads start with the first job."""
        from trace_serve.hints.sinks import SinkQueue

        spec = self.spec
        return SinkQueue(
            self.allowed_targets,
            max_items=spec.hint_queue_items,
            max_bytes=spec.hint_queue_bytes,
            on_event=self._count_sink_event,
            ttl_s=spec.hint_ttl_s,
            dir_max_bytes=spec.hint_dir_bytes,
        )

    def send_hints(self, job: Job) -> Receipt:
        """Queues one request's hints; never waits."""
        receipt = self.sinks.submit(job)
        if receipt.status == "queued":
            self.telemetry.add("hints_queued", 1)
        return receipt

    def _count_sink_event(self, event: SinkEvent) -> None:
        counters = {
            "written": ("hint_files", "hints_settled"),
            "failed": ("hint_failures", "hints_settled"),
            "dropped": ("hints_dropped",),
            "expired": ("hints_expired",),
        }
        for name in counters.get(event.kind, ()):
            self.telemetry.add(name, event.count)
        if event.kind == "written":
            self.telemetry.add("hint_bytes", event.bytes)

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
