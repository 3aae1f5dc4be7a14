"""How many tokens a request may use, before its prompt has been counted and after."""

from __future__ import annotations

from trace_serve.server.schemas.messages import AssistantMessage, Message
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, GenerationRequest

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of a token: about that of English and of Chinese under today's vocabularies."""
TOKENS_PER_MESSAGE = 8
"""What a chat template adds to each message."""

TEMPLATE_TOKENS = 256
"""What a chat template may add once, such as a system message of its own."""


def estimate_prompt(request: GenerationRequest) -> int:
    """Prompt tokens by the length of the text; exact for a prompt of token ids. Costs no tokenization."""
    if isinstance(request, CompletionRequest):
        return len(request.prompt) if isinstance(request.prompt, list) else _tokens_of(request.prompt)
    if isinstance(request, ChatRequest):
        tools = sum(_tokens_of(tool.model_dump_json()) for tool in request.tools or ())
        return tools + sum(_tokens_of_message(message) for message in request.messages)
    return 1


def surely_fits(request: GenerationRequest, context_length: int) -> bool:
    """Whether prompt and completion fit even if every byte of the text is a token, so that nothing has to be counted.

    Counting takes a thread and two switches, which a short prompt waits for longer than for anything else here. Should
    a tokenizer or template make more of a text than is allowed for, the engine itself refuses the request.
    """
    longest_prompt = BYTES_PER_TOKEN * estimate_prompt(request) + TEMPLATE_TOKENS
    return longest_prompt + (request.completion_limit or 1) <= context_length


def token_cost(request: GenerationRequest, prompt_tokens: int, *, context_length: int, default_completion: int) -> int:
    """Tokens that a request may hold in the engine: its prompt, and for each choice all it may sample.

    Args:
        request: the request.
        prompt_tokens: counted or estimated.
        context_length: of the engine; prompt and completion never exceed it.
        default_completion: what a request without `max_tokens` counts as sampling.
    """
    completion = request.completion_limit or default_completion
    room = max(1, context_length - prompt_tokens)
    return prompt_tokens + (request.n or 1) * min(completion, room)


def _tokens_of_message(message: Message) -> int:
    tokens = _tokens_of(message.content or "") + TOKENS_PER_MESSAGE
    if isinstance(message, AssistantMessage):
        tokens += sum(_tokens_of(call.model_dump_json()) for call in message.tool_calls or ())
        tokens += _tokens_of(message.reasoning_content or "")
    return tokens


def _tokens_of(text: str) -> int:
    return len(text.encode()) // BYTES_PER_TOKEN + 1
