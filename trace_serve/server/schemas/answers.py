"""What the routes answer, for the OpenAPI document; generation answers are the engine's own bytes and are not re-made.

Objects of the engine may have more fields than are listed here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")
    message: str = Field(description="one line: what was got, what was expected, what to change")
    type: str = Field(description="OpenAI's error type, as in invalid_request_error")
    param: str | None = Field(description="the field at fault")
    code: str | None = Field(description="a stable word for programs")


class ErrorAnswer(BaseModel):
    """Every error, on every route; in a stream that has begun, the last event."""

    model_config = ConfigDict(extra="forbid")
    error: ErrorDetail


class Usage(_Open):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class VersionSpans(_Open):
    """Spans are [first, end, label]; `rows` are prompt and output tokens but the last, `sampled` are output tokens."""

    rows: list[list[int | str]] | None = None
    sampled: list[list[int | str]] | None = None
    version_diff: int | None = Field(None, description="weight updates between the oldest and the newest token")
    stale_tokens: int | None = None


class RolloutTokens(_Open):
    """The tokens of one choice."""

    prompt_token_ids: list[int] | None
    output_token_ids: list[int]
    output_logprobs: list[float | None] = Field(description="of each output token, by the pass that sampled it")
    finish_reason: str | None
    weight_version_spans: VersionSpans | None


class AnswerMetadata(_Open):
    weight_version: str | None = Field(None, description="label of the weights that sampled the last token")
    weight_versions: list[dict[str, Any]] | None = Field(None, description="spans of output tokens by weights")
    trace_hints: list[dict[str, Any] | None] | None = Field(
        None, description="of each choice: what became of its hints"
    )
    trace_rollout: list[RolloutTokens] | None = Field(None, description="of each choice, when it was asked for")


class AnsweredCall(_Open):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: dict[str, Any]


class AnsweredMessage(_Open):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(_Open):
    index: int
    message: AnsweredMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(_Open):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: AnswerMetadata | None = None


class TextChoice(_Open):
    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class TextCompletion(_Open):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    metadata: AnswerMetadata | None = None


class ChunkDelta(_Open):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChunkChoice(_Open):
    index: int
    delta: ChunkDelta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatChunk(_Open):
    """One chunk of a stream; the last ones may have no choices, but usage or metadata."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metadata: AnswerMetadata | None = None


class TextChunkChoice(_Open):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class TextChunk(_Open):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None = None
    metadata: AnswerMetadata | None = None


class ModelEntry(_Open):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    policy_version: str
    policy_digest: str
    max_model_len: int | None


class ModelList(_Open):
    object: Literal["list"]
    data: list[ModelEntry]


class Tokens(_Open):
    tokens: list[int]
    count: int
    max_model_len: int


class PolicyName(_Open):
    name: str
    version: str
    digest: str


class HintState(_Open):
    status: Literal["ready", "absent", "dropped", "failed", "expired"]
    bytes: int | None = None
    path: str | None = Field(None, description="where the hint file is, when it is ready")
    reason: str | None = None


class RolloutChoice(RolloutTokens):
    index: int
    hints: HintState | None = Field(description="null when none were asked for")


class Rollout(_Open):
    """Kept in memory for the key that made it, for a while."""

    id: str
    object: Literal["trace.rollout"]
    created: int
    route: str
    policy: PolicyName
    recipe_id: str
    verdict_id: str | None
    weight_version: str | None
    choices: list[RolloutChoice]


class Report(_Open):
    """What the engine loaded, as its scheduler reported it (docs/architecture.md), with the policy and the verdict."""

    policy: PolicyName
    verdict_id: str | None
    serving_mode: Literal["rollout", "production"]


class Live(BaseModel):
    model_config = ConfigDict(extra="forbid")
    status: Literal["live"]


class Ready(_Open):
    status: Literal["ready"]
    policy: str
    context_length: int
