"""Talking to a running engine as a trainer does."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trace_serve.engine.launch import EngineProcess
from trace_serve.hints import wire

START_TIMEOUT_S = 480.0
"""Seconds that a test waits for an engine to be ready."""

Options = str | dict[str, Any]


def body(prompt: list[int], *, new: int = 6, hints: Options | None = "inline", **extra: Any) -> dict[str, Any]:
    """A greedy request of `/generate`; keys of `extra` that are sampling parameters go there."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    for key in ("n", "temperature", "ignore_eos"):
        if key in extra:
            sampling[key] = extra.pop(key)
    if hints is not None:
        sampling["custom_params"] = {"trace_hints": hints}
    return {"input_ids": prompt, "sampling_params": sampling, **extra}


def generate(engine: EngineProcess, prompt: list[int], **options: Any) -> dict[str, Any]:
    return engine.request("/generate", body(prompt, **options), timeout_s=120)


def together(engine: EngineProcess, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests at once; answers in their order."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: engine.request("/generate", one, timeout_s=240), bodies))


def decoded(answer: dict[str, Any]) -> wire.HintFile:
    found = answer["meta_info"]["trace_hints"]
    assert found["status"] == "ok", found
    return wire.from_bytes(base64.b64decode(found["data"]))


def post(engine: EngineProcess, path: str, content: dict[str, Any] | None = None) -> None:
    headers = {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"}
    data = b"" if content is None else json.dumps(content).encode()
    urllib.request.urlopen(urllib.request.Request(engine.url + path, data=data, headers=headers), timeout=60).close()


def flush(engine: EngineProcess) -> None:
    post(engine, "/flush_cache")


def events(engine: EngineProcess, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(engine.url + path, data=json.dumps(content).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[len(b"data: ") :])


def wait_for(path: Path, timeout_s: float = 30.0) -> Path:
    """Hints are written behind the answer's back."""
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
    return path


def assert_rows_equal(a: wire.HintFile, b: wire.HintFile, rows: slice = slice(None)) -> None:
    """Bit for bit: tokens, masks, bits, scales, per-token scales and routed experts."""
    np.testing.assert_array_equal(a.token_ids[rows], b.token_ids[rows])
    assert [site.name for site in a.sites] == [site.name for site in b.sites]
    for x, y in zip(a.sites, b.sites, strict=True):
        np.testing.assert_array_equal(x.present[rows], y.present[rows], err_msg=x.name)
        np.testing.assert_array_equal(x.bits[rows], y.bits[rows], err_msg=x.name)
        for left, right in ((x.scales, y.scales), (x.global_log2, y.global_log2)):
            if left is not None and right is not None:
                np.testing.assert_array_equal(left[rows], right[rows], err_msg=x.name)
    if a.routed_experts is not None and b.routed_experts is not None:
        np.testing.assert_array_equal(a.routed_experts[rows], b.routed_experts[rows])


def agreement(a: wire.HintFile, b: wire.HintFile, rows: slice = slice(None)) -> float:
    """Share of equal hint bits over all sites and layers; unrelated rows agree in about half."""
    wrong = total = 0
    for x, y in zip(a.sites, b.sites, strict=True):
        differing = np.bitwise_count(x.bits[rows] ^ y.bits[rows])
        wrong += int(differing.sum())
        total += differing.size * 16
    return 1 - wrong / total
