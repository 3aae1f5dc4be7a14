"""What an engine process is told about the policy it runs, carried to every child in one environment variable."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field

from trace_serve.errors import ConfigError
from trace_serve.hints.options import HintOptions, parse
from trace_serve.recipe import PRESETS, Recipe

ENV = "TRACE_SERVE_ENGINE"
KEY_ENV = "TRACE_SERVE_ENGINE_KEY"
"""Carries the engine's bearer key; a command line could be read by every user of the machine."""
FAILURE_PREFIX = "trace-serve engine failed: "
"""Starts the line of the engine's log that says why it did not start; the launcher shows that line."""
EXIT_SEAM = 10
"""Exit status of an engine that found a seam moved: starting it again cannot help."""
QUANTIZATION = "trace_nvfp4"
"""Name of our method for SGLang's --quantization."""


@dataclass(frozen=True)
class EngineSpec:
    """Attributes:
    recipe: numeric choices; the `bf16` preset is the training-time version.
    run_dir: directory of telemetry, owned by this engine.
    hint_dir: directory that hint files are written to; None refuses requests for hint files.
    policy_digest: digest of the policy directory, stored in every hint file.
    tokenizer_digest: digest of the tokenizer files, reported to the gate's preflight.
    chat_template_digest: digest of the chat template, reported to the gate's preflight.
    parent_pid: process that started the engine; the engine ends when that is gone.
    stall_limit_s: seconds without a sign of life after which the scheduler counts as frozen.
    refit_timeout_s: seconds without a word from its trainer after which a weight update counts as failed.
    partial_refit: whether a weight update may leave tensors out, because they are not trained.
    hints: sites and layers that the engine keeps, and what a request gets that does not say otherwise.
    hint_urls: URL prefixes that a request may name as the place of its hints.
    hint_shm: whether hints may go to shared memory.
    hint_queue_items, hint_queue_bytes: hints that wait to be written; more are dropped, and marked so.
    hint_inline_bytes: largest hint file that is returned in an answer.
    hint_ttl_s: age at which a hint file is removed; None keeps it.
    hint_dir_bytes: size of the hint directory above which the oldest files are removed; None does not limit it.
    """

    recipe: Recipe
    run_dir: str
    parent_pid: int = 0
    hint_dir: str | None = None
    policy_digest: str = ""
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    stall_limit_s: float = 20.0
    refit_timeout_s: float = 300.0
    partial_refit: bool = False
    hints: HintOptions = field(default_factory=HintOptions)
    hint_urls: tuple[str, ...] = ()
    hint_shm: bool = False
    hint_queue_items: int = 256
    hint_queue_bytes: int = 1 << 28
    hint_inline_bytes: int = 1 << 23
    hint_ttl_s: float | None = None
    hint_dir_bytes: int | None = None

    def to_env(self) -> str:
        raw = dataclasses.asdict(self)
        raw["recipe"] = self.recipe.to_dict()
        return json.dumps(raw, sort_keys=True)


def from_env() -> EngineSpec | None:
    """The spec of this engine, or None in a process that is not one of ours.

    Raises:
        ConfigError: the variable is set but cannot be read.
    """
    text = os.environ.get(ENV)
    if not text:
        return None
    try:
        raw = json.loads(text)
        recipe = Recipe.from_dict(raw.pop("recipe", PRESETS["bf16"].to_dict()))
        hints = raw.pop("hints", {})
        raw["hint_urls"] = tuple(raw.get("hint_urls", ()))
        return EngineSpec(recipe=recipe, hints=parse(hints, HintOptions()), **raw)
    except (ValueError, TypeError, AttributeError, ConfigError) as exc:
        raise ConfigError(f"{ENV}: {exc}; it is written by trace_serve.engine.launch, do not set it by hand") from exc
