"""From one answer to its rollout record, and what of the record is only known when it is read: the hints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from trace_serve.server.rollouts import hint_files
from trace_serve.server.rollouts.store import RolloutStore
from trace_serve.server.service import Service


class Recording:
    """One request on its way into the store.

    Args:
        store: where the record goes.
        rollout_id: the request's own id.
        owner: whose key may read the record.
        service: the policy that answers.
        route: that the request came by.
        hints: whether it asked for hints.
    """

    def __init__(
        self, store: RolloutStore, rollout_id: str, owner: str, service: Service, *, route: str, hints: bool
    ) -> None:
        self._store = store
        self._authorization = service.authorization
        self._id = rollout_id
        self._route = route
        self._hints = hints
        store.begin(rollout_id, owner)

    def end(self, outcome: str, metadata: dict[str, Any] | None) -> None:
        """The request has ended.

        Args:
            outcome: `ok`, or why there is no whole answer.
            metadata: what the engine's answer said beside its tokens.
        """
        choices = (metadata or {}).get("trace_rollout")
        if outcome != "ok":
            self._store.fail(self._id, outcome)
        elif not isinstance(choices, list) or not choices:
            self._store.fail(self._id, "the engine's answer had no record of its tokens")
        else:
            self._store.finish(self._id, self._record(metadata or {}, choices))

    def _record(self, metadata: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        authorization = self._authorization
        policy = {"name": authorization.name, "version": authorization.version, "digest": authorization.digest}
        return {
            "id": self._id,
            "object": "trace.rollout",
            "created": int(time.time()),
            "route": self._route,
            "policy": policy,
            "recipe_id": authorization.recipe.recipe_id,
            "verdict_id": authorization.verdict_id,
            "weight_version": metadata.get("weight_version"),
            "hints_requested": self._hints,
            "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        }


def with_hints(record: dict[str, Any], hint_dir: Path | None) -> dict[str, Any]:
    """The record with the state of each choice's hints, looked up now; reads directories, so not on the event loop.

    Args:
        record: as it is stored.
        hint_dir: where the engine writes hint files; None when it writes none.
    """
    wanted = record.pop("hints_requested")
    single = len(record["choices"]) == 1
    for choice in record["choices"]:
        name = record["id"] if single else hint_files.choice_name(record["id"], choice["index"])
        suffix = "" if single else f"?choice={choice['index']}"
        found = None if hint_dir is None or not wanted else hint_files.state(hint_dir, name)
        if found is not None and found["status"] == "ready":
            found["path"] = f"/v1/rollouts/{record['id']}/hints{suffix}"
        choice["hints"] = found
    return record
