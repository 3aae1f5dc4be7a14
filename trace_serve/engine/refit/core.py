"""Weight updates of the scheduler: checked before they write, whole or refused, and never a mix that serves.

A trainer opens a session, sends buckets, ends it. Buckets are checked completely before they are written, and written
in place: two copies of a model do not fit beside each other. So there are three outcomes. A whole update serves under
a new version. An update that failed before anything was written leaves the old version serving. Anything else leaves
weights of two versions, and the engine is quarantined: it refuses to generate until a whole update has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trace_serve.engine import expert_weights, state
from trace_serve.engine.refit import staleness, status, transport
from trace_serve.engine.refit.hold import Hold
from trace_serve.engine.refit.manifest import Manifest, check_directory
from trace_serve.engine.refit.session import Session
from trace_serve.engine.refit.versions import Versions
from trace_serve.errors import ConfigError, EngineError, TraceServeError
from trace_serve.policy.digest import digest_directory

logger = logging.getLogger(__name__)

_DISK_FORMATS = (None, "auto", "safetensors")


class Refit:
    """Weight updates of one scheduler process.

    Args:
        scheduler: SGLang's scheduler, with its model loaded.
        directory: the model directory it was loaded from.

    Attributes:
        versions: labels of all versions so far.
        session: the open update session.
        quarantined: why nothing is generated; None while the engine serves.
    """

    def __init__(self, scheduler: Any, directory: Path, label: str) -> None:
        from sglang.srt.runtime_context import get_parallel

        engine = state.get()
        self.versions = Versions(label, engine.spec.policy_digest)
        self.session: Session | None = None
        self.quarantined: str | None = None
        self._scheduler = scheduler
        self._hold = Hold(scheduler)
        self._directory = directory
        self._rank: int = get_parallel().tp_rank
        self._status = status.WeightStatus(label=label, model_digest=engine.spec.policy_digest)
        self._publish()

    @cached_property
    def _manifest(self) -> Manifest:
        """Read when the first update comes: an engine that gets none needs no safetensors files."""
        return Manifest.of_directory(self._directory)

    # The scheduler's own side: pauses, time limit, requests that come while nothing may be computed.

    def is_overdue(self) -> bool:
        """Whether the trainer of the open session was not heard for too long."""
        return self.session is not None and self.session.idle_s() > state.get().spec.refit_timeout_s

    def abandon(self) -> None:
        """Ends an overdue session; the scheduler calls it on every rank in the same iteration."""
        if self.session is not None:
            self._close(f"the sender of the update was not heard for {state.get().spec.refit_timeout_s:.0f} s")

    def tick(self) -> None:
        """Runs once a scheduler iteration, after requests were taken in: in quarantine they are turned away."""
        if self.quarantined is not None:
            self._hold.turn_away(self.refusal())

    def trainer_paused(self, paused: bool) -> None:
        self._hold.trainer_paused(paused)

    def refusal(self) -> str:
        return f"engine is quarantined: {self.quarantined}; send a full weight update"

    # Operations of a trainer. Each returns (success, message).

    def begin(self, selector: str) -> tuple[bool, str]:
        """Opens a session. One that is still open belongs to a trainer that is gone, and is closed as it is."""
        if self.session is not None:
            self._close("another update session was opened before this one ended")
        try:
            _ = self._manifest
        except (TraceServeError, OSError, ValueError) as exc:
            return False, f"this engine cannot be updated: {one_line(exc)}"
        self._hold.take()
        self.session = Session(selector)
        self._publish()
        return True, "Success"

    def bucket(
        self,
        manager: Any,
        selector: str,
        label: str | None,
        receive: Callable[[], transport.NamedTensors],
        names: list[str],
    ) -> tuple[bool, str]:
        """Receives, checks and loads one bucket of the open session.

        Args:
            manager: SGLang's weight updater of the scheduler.
            selector: runners to load it into.
            label: the trainer's name for the version.
            receive: returns the tensors, or raises.
            names: of the tensors, as far as they are known before they are received.
        """
        if self.session is None:
            return False, "no weight-update session is open; call /begin_weight_update first"
        session = self.session
        session.heard()
        tensors: transport.NamedTensors = []
        with transport.beating(state.get().telemetry, state.get().spec.refit_timeout_s):
            try:
                tensors = receive()
                names = [name for name, _ in tensors]
                self._manifest.check(tensors)
                fault = None
            except Exception as exc:
                fault = one_line(exc)
            fault = agree(manager.tp_cpu_group, fault)
            if fault is not None:
                session.refuse(names, fault)
                self._refused(fault)
                return False, f"bucket refused, nothing of it was loaded: {fault}"
            self._load(manager, selector, tensors)
        session.heard()
        if session.broken is not None:
            return False, f"bucket failed while it was loaded: {session.broken}"
        session.accept(names)
        session.label = label if label is not None else session.label
        return True, "Success"

    def _load(self, manager: Any, selector: str, tensors: transport.NamedTensors) -> None:
        session = self.session
        assert session is not None
        fault = None
        try:
            if not session.touched:
                for _, runner in manager._select_runners(session.selector):
                    runner.weight_updater.begin_weight_update()
            session.touched = True
            for _, runner in manager._select_runners(selector):
                loaded, message = runner.weight_updater.load_weights_from_distributed(tensors)
                fault = fault or (None if loaded else message)
        except Exception as exc:
            fault = one_line(exc)
        session.broken = session.broken or agree(manager.tp_cpu_group, fault)

    def end(self, manager: Any) -> tuple[bool, str]:
        """Closes the session: makes its weights serve if they are a whole update."""
        session = self.session
        if session is None:
            return False, "no weight-update session is open; call /begin_weight_update first"
        fault = session.fault(self._manifest, partial=self._may_be_partial())
        if not session.touched:
            fault = fault if session.refused or session.lost else None
            self._close(fault)
            if self.quarantined is not None:
                return False, self.refusal()
            return fault is None, f"the old weights serve: {fault or 'none were sent'}"
        if fault is None:
            fault = agree(manager.tp_cpu_group, self._finalize(manager, session))
        if fault is not None:
            self._close(fault)
            return False, self.refusal()
        label, self.session = session.label, None
        return True, self._serve(manager, label, "")

    def _may_be_partial(self) -> bool:
        return state.get().spec.partial_refit and self.quarantined is None

    def _finalize(self, manager: Any, session: Session) -> str | None:
        with transport.beating(state.get().telemetry, state.get().spec.refit_timeout_s):
            try:
                for _, runner in manager._select_runners(session.selector):
                    expert_weights.mark_loaded(runner.model, session.received)
                    runner.weight_updater.end_weight_update(run_post_load=False)
            except Exception as exc:
                return one_line(exc)
        return None

    def disk(self, manager: Any, path: str, load_format: str | None, label: str | None) -> tuple[bool, str]:
        """Loads a model directory, all of which is checked before anything is written."""
        engine = state.get()
        with transport.beating(engine.telemetry, engine.spec.refit_timeout_s):
            try:
                if self.session is not None:
                    raise ConfigError("a weight-update session is open; end it first", field="model_path")
                if load_format not in _DISK_FORMATS:
                    raise ConfigError(f"load_format: got {load_format!r}, expected auto", field="load_format")
                directory = Path(path)
                check_directory(self._manifest, directory, engine.spec.recipe, engine.telemetry.beat)
                digest = digest_directory(directory) if self._rank == 0 else ""
                fault = None
            except Exception as exc:
                fault = one_line(exc)
            fault = agree(manager.tp_cpu_group, fault)
            if fault is not None:
                self._refused(fault)
                return False, f"update refused, the old weights serve: {fault}"
            self._hold.take()
            fault = agree(manager.tp_cpu_group, self._load_directory(manager, path))
        if fault is not None:
            self._quarantine(fault)
            return False, self.refusal()
        return True, self._serve(manager, label, digest)

    def _load_directory(self, manager: Any, path: str) -> str | None:
        for _, runner in manager._select_runners():
            before = runner.model_config.model_path
            try:
                loaded, message = runner.weight_updater.update_weights_from_disk(path, "auto")
                fault = None if loaded else " ".join(str(message).split())
            except Exception as exc:
                fault = one_line(exc)
            if fault is not None:
                runner.model_config.model_path = before
                return fault
        return None

    def poison(self, reason: str) -> None:
        """Quarantines the engine because something other than an update changed its weights."""
        self._hold.take()
        self._quarantine(reason)

    def count(self, name: str, by: int) -> None:
        """Adds to a telemetry counter, once for all ranks."""
        if self._rank == 0:
            state.get().telemetry.add(name, by)

    # Outcomes.

    def _serve(self, manager: Any, label: str | None, digest: str) -> str:
        """The weights are whole: they serve under a new version from here on."""
        engine = state.get()
        live = staleness.in_flight(self._scheduler)
        staleness.note(live, engine.weight_version)
        name = self.versions.next_label(label)
        engine.weight_version = self.versions.add(name, digest)
        self._scheduler.record_weight_version_change(new_version=name)
        staleness.cut(live, engine.weight_version)
        self.count("weight_updates", 1)
        self.quarantined = None
        # The cache is keyed by version too, so what cannot be flushed under running requests is never found again.
        flushed = manager.flush_cache()
        torch.distributed.barrier(group=manager.tp_cpu_group)
        self._status = replace(self._status, version=engine.weight_version, label=name, model_digest=digest)
        self._hold.release()
        self._publish()
        kept = "" if flushed else f"; {len(live)} requests in flight keep the KV of the weights they started with"
        return f"weights {name!r} serve{kept}"

    def _close(self, fault: str | None) -> None:
        """Ends the session without new weights: the old ones serve if none was touched."""
        session, self.session = self.session, None
        assert session is not None
        if session.touched:
            self._quarantine(fault or "an update ended before it was whole")
            return
        if fault is not None:
            self._refused(fault)
        if self.quarantined is None:
            self._hold.release()
        self._publish()

    def _quarantine(self, reason: str) -> None:
        logger.error("weights of two versions: %s", reason)
        self.quarantined = reason
        self._status = replace(self._status, last_refused=reason)
        self._publish()
        self._hold.turn_away(self.refusal())

    def _refused(self, fault: str) -> None:
        logger.warning("weight update refused: %s", fault)
        self._status = replace(self._status, last_refused=fault)
        self._publish()

    def _publish(self) -> None:
        """Tells the HTTP process, which reads it without asking the scheduler."""
        if self._rank != 0:
            return
        engine = state.get()
        self._status = replace(self._status, session_open=self.session is not None, quarantined=self.quarantined)
        status.write(engine.spec.run_dir, self._status)
        engine.telemetry.put("refit_session", int(self.session is not None))
        engine.telemetry.put("quarantined", int(self.quarantined is not None))


def agree(group: Any, fault: str | None) -> str | None:
    """The first fault that any tensor-parallel rank has; all ranks then do the same."""
    size = torch.distributed.get_world_size(group=group)
    if size == 1:
        return fault
    faults: list[str | None] = [None] * size
    torch.distributed.all_gather_object(faults, fault, group=group)
    if len(set(faults)) == 1:
        return fault
    return next((f"rank {rank}: {found}" for rank, found in enumerate(faults) if found is not None), None)


def one_line(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    return text if isinstance(exc, TraceServeError) else f"{type(exc).__name__}: {text}"


def require(refit: Refit | None) -> Refit:
    """Raises:
    EngineError: the scheduler has not reported yet, so there is nothing to update.
    """
    if refit is None:
        raise EngineError("the scheduler is not ready for weight updates; wait until the engine answers")
    return refit
