"""Starts an engine of ours for a directory arm: the one place that knows `trace_serve.engine.launch`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eval_gate.arms.http import Endpoint

if TYPE_CHECKING:
    from trace_serve.recipe import Recipe


@asynccontextmanager
async def running(
    directory: Path,
    recipe: Recipe | None,
    digest: str | None,
    endpoint: Endpoint,
    startup_timeout_s: float,
    log: Path,
) -> AsyncIterator[Endpoint]:
    """Yields the endpoint of an engine that serves `directory` under `recipe` (None = BF16), and stops it afterwards.

    Raises:
        EngineError: the engine did not start or did not become ready.
    """
    from trace_serve.engine.launch import EngineConfig, EngineProcess

    process = EngineProcess(EngineConfig(model=directory, recipe=recipe, policy_digest=digest, log_path=log))
    try:
        await asyncio.to_thread(process.start)
        await asyncio.to_thread(process.wait_ready, startup_timeout_s)
        yield replace(endpoint, url=process.url, api_key=process.api_key, model=None)
    finally:
        await asyncio.to_thread(process.stop)
