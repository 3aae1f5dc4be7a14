"""Counts the tokens of a prompt with the policy's own tokenizer, off the event loop.

Uses `tokenizers` and `jinja2` directly: importing transformers would load torch into the front-end. Both come with
the `engine` extra. Where a prompt cannot be counted here, the engine's own check decides.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from trace_serve.server.schemas.messages import ToolMessage
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, GenerationRequest

log = structlog.get_logger("trace_serve.tokens")


class PromptCounter:
    """Counts prompts of one policy directory; loads the tokenizer at the first use, in a worker thread."""

    def __init__(self, policy_dir: Path, *, threads: int = 2) -> None:
        self._dir = policy_dir
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._lock = threading.Lock()
        self._loaded = False
        self._tokenizer: Any = None
        self._template: Any = None
        self._shows_tools: bool | None = None
        self._specials: dict[str, str] = {}

    async def count(self, request: GenerationRequest) -> int | None:
        """Prompt tokens of a request, or None when the engine has to count."""
        if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
            return len(request.prompt)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.count_blocking, request)

    def count_blocking(self, request: GenerationRequest) -> int | None:
        self._load_once()
        if self._tokenizer is None:
            return None
        try:
            if isinstance(request, CompletionRequest):
                return len(self._tokenizer.encode(request.prompt).ids)
            if isinstance(request, ChatRequest) and self._template is not None:
                return self._count_chat(request)
        except Exception as exc:  # a template may raise anything; the engine answers for it
            log.warning("prompt_not_counted", error=str(exc))
        return None

    async def shows_tools(self) -> bool | None:
        """Whether the chat template shows a request's tools to the model; None where no template was found here."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._load_once)
        return self._shows_tools

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_chat(self, request: ChatRequest) -> int | None:
        if request.messages[-1].role == "assistant":
            return None  # the engine continues such a message in a way of its own
        if request.tools is not None or any(isinstance(message, ToolMessage) for message in request.messages):
            return None  # how tools and calls reach the template is the engine's to decide
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        text = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._specials)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _load_once(self) -> None:
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            try:
                self._load()
            except Exception as exc:  # the tokenizers library raises nothing more precise
                log.warning("tokenizer_not_loaded", path=str(self._dir), error=str(exc))

    def _load(self) -> None:
        from tokenizers import Tokenizer

        config_path = self._dir / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        template = self._template_source(config)
        if template is not None:
            self._template = _environment().from_string(template)
            self._shows_tools = "tools" in template
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(name)
            value = token.get("content") if isinstance(token, dict) else token
            if isinstance(value, str):
                self._specials[name] = value
        self._tokenizer = Tokenizer.from_file(str(self._dir / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def _template_source(self, config: dict[str, Any]) -> str | None:
        path = self._dir / "chat_template.jinja"
        if path.exists():
            return path.read_text("utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default")
        return template if isinstance(template, str) else None


def _environment() -> Any:
    """A sandboxed Jinja environment with what chat templates in the Hugging Face format expect."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env
