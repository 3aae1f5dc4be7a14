"""Prompts are counted as the engine counts them, without transformers and off the event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import prepare_policy

from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, parse_request
from trace_serve.server.tokens import PromptCounter


async def test_a_chat_prompt_is_counted_with_its_template(tmp_path: Path) -> None:
    prepare_policy(tmp_path)
    counter = PromptCounter(tmp_path)
    request = parse_request(ChatRequest, {"messages": [{"role": "user", "content": "hié"}]})
    assert await counter.count(request) == len("<user>hié\n<assistant>".encode())
    counter.close()


async def test_a_text_prompt_and_token_ids_are_counted(tmp_path: Path) -> None:
    prepare_policy(tmp_path)
    counter = PromptCounter(tmp_path)
    assert await counter.count(parse_request(CompletionRequest, {"prompt": "hello"})) == 5
    assert await counter.count(parse_request(CompletionRequest, {"prompt": [1, 2, 3]})) == 3
    counter.close()


def test_a_message_that_the_engine_would_continue_is_left_to_it(tmp_path: Path) -> None:
    prepare_policy(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert PromptCounter(tmp_path).count_blocking(parse_request(ChatRequest, {"messages": messages})) is None


def test_a_broken_template_or_a_missing_tokenizer_is_left_to_the_engine(tmp_path: Path) -> None:
    request = parse_request(ChatRequest, {"messages": [{"role": "user", "content": "a"}]})
    assert PromptCounter(tmp_path).count_blocking(request) is None
    prepare_policy(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert PromptCounter(tmp_path).count_blocking(request) is None


def test_the_server_imports_neither_torch_nor_transformers_nor_sglang() -> None:
    code = (
        "import sys, trace_serve.server.run, trace_serve.server.cli, trace_serve.server.process;"
        "heavy = {'torch', 'transformers', 'sglang'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
