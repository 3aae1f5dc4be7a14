"""Keeping the scheduler from computing while weights are not whole, beside the pauses that a trainer asks for."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class Hold:
    """Two reasons to stand still, in SGLang's one flag: the trainer's pause, and ours.

    Args:
        scheduler: SGLang's scheduler; its event loop computes nothing while `_engine_paused` is set.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._held = False
        self._paused_by_trainer = False

    def take(self) -> None:
        if not self._held:
            self._held = True
            self._paused_by_trainer = self._scheduler._engine_paused
        self._scheduler._engine_paused = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._scheduler._engine_paused = self._paused_by_trainer

    def trainer_paused(self, paused: bool) -> None:
        """Call after SGLang's own pause or continue, which set the flag."""
        self._paused_by_trainer = paused
        if self._held:
            self._scheduler._engine_paused = True

    def turn_away(self, reason: str) -> None:
        """Ends every request that waits or runs with a 503, without another forward pass."""
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        scheduler, paused = self._scheduler, self._paused_by_trainer
        if scheduler.running_batch.reqs or scheduler.chunked_req is not None or scheduler.last_batch is not None:
            # SGLang lets an aborted running request compute one more token; a retracted one only waits.
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            self.trainer_paused(paused)
        if scheduler.waiting_queue:
            finished = {
                "type": "abort",
                "message": reason,
                "status_code": int(HTTPStatus.SERVICE_UNAVAILABLE),
                "err_type": "ServiceUnavailable",
            }
            scheduler.abort_request(AbortReq(rid="", abort_all=True, abort_message=reason, finished_reason=finished))
