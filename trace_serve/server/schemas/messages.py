"""The messages of a conversation, and which may follow which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trace_serve.server.schemas.base import Label, Strict
from trace_serve.server.schemas.tools import MAX_CALLS, ToolCall

MAX_MESSAGES = 4096
MAX_PARTS = 4096


def _join_text_parts(value: object) -> object:
    """Text parts become one string, separated by line breaks; other kinds of parts are refused."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise PydanticCustomError("text_part", f"content should have at most {MAX_PARTS} parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        ok = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not ok or set(part) != {"type", "text"}:
            raise PydanticCustomError(
                "text_part", f"part {index} should be {{'type': 'text', 'text': ...}}; this policy reads text only"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class TextPart(Strict):
    """Documents one part of a message's content; parts are joined before validation."""

    type: Literal["text"]
    text: str


Text = Annotated[
    str,
    BeforeValidator(
        _join_text_parts, json_schema_input_type=str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    ),
    Field(description="text, or a list of {'type': 'text', 'text': ...} parts"),
]


class TextMessage(Strict):
    role: Literal["system", "developer", "user"]
    content: Text
    name: Label | None = None


class AssistantMessage(Strict):
    """An earlier answer, as it was received; fields that answers carry as null are accepted as null."""

    role: Literal["assistant"]
    content: Text | None = Field(None, description="text; may be null when there are tool calls")
    name: Label | None = None
    tool_calls: list[ToolCall] | None = Field(None, min_length=1, max_length=MAX_CALLS)
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str = Field(min_length=1, max_length=256)
    name: Label | None = None


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def conversation_fault(messages: Sequence[Message]) -> str | None:
    """What is wrong with the order of messages, with the place of the message at fault; None when nothing is."""
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_calls:
                return (
                    f"messages[{index}].tool_call_id: got {message.tool_call_id[:60]!r}, expected the id of a tool "
                    "call that was made before and not answered yet"
                )
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            return f"messages[{index}]: expected a tool message that answers call {sorted(open_calls)[0][:60]!r} first"
        if isinstance(message, AssistantMessage):
            if message.content is None and not message.tool_calls:
                return f"messages[{index}].content: got null, expected text or tool_calls"
            ids = [call.id for call in message.tool_calls or ()]
            open_calls = set(ids)
            if len(open_calls) < len(ids):
                return f"messages[{index}].tool_calls: two calls have one id, expected distinct ids"
    return f"messages: expected a tool message that answers call {sorted(open_calls)[0][:60]!r}" if open_calls else None
