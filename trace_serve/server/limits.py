"""Checks of a request against the policy in service: vocabulary and context length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trace_serve.server.errors import bad_request
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, GenerationRequest


@dataclass(frozen=True)
class Limits:
    """Attributes:
    context_length: tokens of prompt and completion together.
    vocab_size: token ids are 0 to vocab_size - 1.
    """

    context_length: int
    vocab_size: int


def check_limits(request: GenerationRequest, limits: Limits) -> None:
    """Everything that can be checked without tokenising.

    Raises:
        ApiError: 400; a token id outside the vocabulary, or more tokens than the context holds.
    """
    _check_ids("stop_token_ids", request.stop_token_ids or (), limits.vocab_size)
    for key in request.logit_bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < limits.vocab_size):
            raise bad_request(
                f"logit_bias: got key {key[:60]!r}, expected a token id from 0 to {limits.vocab_size - 1}",
                param="logit_bias",
            )
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        _check_ids("prompt", request.prompt, limits.vocab_size)
        check_context(request, len(request.prompt), limits)
    else:
        check_context(request, 1, limits)


def check_context(request: GenerationRequest, prompt_tokens: int, limits: Limits) -> None:
    """Refuses a request whose prompt and completion do not fit, once the prompt has been counted.

    Raises:
        ApiError: 400 for `max_tokens` when a smaller one would fit, else for the prompt.
    """
    if prompt_tokens >= limits.context_length:
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise bad_request(
            f"{param}: got {prompt_tokens} tokens, expected fewer than the context length of {limits.context_length}",
            param=param,
            code="context_length_exceeded",
        )
    limit = request.completion_limit
    if limit is not None and prompt_tokens + limit > limits.context_length:
        raise bad_request(
            f"max_tokens: got {limit}, expected at most {limits.context_length - prompt_tokens} after a prompt of "
            f"at least {prompt_tokens} tokens in a context of {limits.context_length}",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise bad_request(
                f"{field}: got token id {token_id}, expected 0 to {vocab_size - 1}", param=field, code="invalid_value"
            )
