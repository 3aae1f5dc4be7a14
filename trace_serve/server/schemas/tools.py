"""Tools that a model may call, and the form that its answer must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from trace_serve.server.schemas.base import Strict, ToolName
from trace_serve.server.schemas.json_schema import MAX_SCHEMA_BYTES, MAX_SCHEMA_NESTING, check_json_schema

MAX_TOOLS = 64
MAX_CALLS = 64
MAX_ARGUMENTS = 64 << 10
MAX_DESCRIPTION = 8192


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        check_json_schema(schema)
    except ValueError as exc:
        raise PydanticCustomError("json_schema", "schema cannot be used: {why}", {"why": str(exc)}) from None
    return schema


def _object_text(text: str) -> str:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise PydanticCustomError("arguments", "arguments should be a JSON object as text")
    return text


JsonSchema = Annotated[
    dict[str, Any],
    AfterValidator(_bounded),
    Field(description=f"JSON Schema of at most {MAX_SCHEMA_BYTES} bytes and {MAX_SCHEMA_NESTING} levels"),
]


class FunctionTool(Strict):
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    parameters: JsonSchema | None = Field(None, description="JSON Schema of the arguments; none takes any")
    strict: bool | None = Field(None, description="calls follow `parameters` exactly")


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    name: ToolName


class NamedToolChoice(Strict):
    """Asks for a call of exactly this tool."""

    type: Literal["function"]
    function: NamedFunction


class FunctionCall(Strict):
    name: ToolName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS), AfterValidator(_object_text)] = Field(
        description="a JSON object as text"
    )


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(None, ge=0, lt=MAX_CALLS, description="accepted because streams carry it; not used")


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = Field(None, description="the engine follows the schema whatever this says")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ToolWord = Literal["none", "auto", "required"]
ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
