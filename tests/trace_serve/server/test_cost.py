"""A prompt is counted only where its length might matter."""

from __future__ import annotations

import pytest

from trace_serve.server.admission.cost import surely_fits
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest

CONTEXT = 2048


@pytest.mark.parametrize(
    ("text", "max_tokens", "fits"),
    [
        ("short", 16, True),
        ("short", None, True),
        ("short", CONTEXT, False),
        ("x" * 1000, 16, True),
        ("x" * CONTEXT, 16, False),
        ("龜" * 600, 16, False),
    ],
)
def test_a_prompt_that_fits_even_with_a_token_a_byte_needs_no_counting(
    text: str, max_tokens: int | None, fits: bool
) -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens})
    plain = CompletionRequest.model_validate({"prompt": text, "max_tokens": max_tokens})
    assert surely_fits(chat, CONTEXT) is fits
    assert surely_fits(plain, CONTEXT) is fits


def test_many_short_messages_are_counted() -> None:
    messages = [{"role": "user", "content": "hi"}] * 60
    assert not surely_fits(ChatRequest.model_validate({"messages": messages, "max_tokens": 16}), CONTEXT)
