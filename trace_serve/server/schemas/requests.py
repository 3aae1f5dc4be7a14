"""The requests that sample tokens, field by field; the descriptions are those of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, StringConstraints, Tag

from trace_serve.server.schemas.base import (
    MAX_CHOICES,
    MAX_INT32,
    MAX_TOP_LOGPROBS,
    Label,
    StopString,
    Strict,
    TokenId,
)
from trace_serve.server.schemas.hints import HintRequest
from trace_serve.server.schemas.messages import MAX_MESSAGES, Message
from trace_serve.server.schemas.tools import MAX_TOOLS, NamedToolChoice, ResponseFormat, Tool, ToolWord

AS_SENT = ("tools", "response_format")
"""Chat templates print tools with their keys in the client's order, and nulls inside a JSON Schema mean something."""


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompt_kind(value: object) -> str:
    return "tokens" if isinstance(value, list) else "text"


def _hint_kind(value: object) -> str:
    return "options" if isinstance(value, Mapping | HintRequest) else "flag"


def _choice_kind(value: object) -> str:
    return "named" if isinstance(value, Mapping | NamedToolChoice) else "word"


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="one more chunk with token counts before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="token counts on every chunk")


class GenerationRequest(Strict):
    """Fields that both routes share."""

    model: Label | None = Field(None, description="name of the policy in service, or of the engine's model")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="with the prompt, at most the context length")
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32, description="at most max_tokens")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only with stream: true")

    temperature: float | None = Field(None, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**30, description="-1 or 1 and more; -1 is off")
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=300, description="token id (in the vocabulary) to bias, -100 to 100"
    )

    stop: (
        Annotated[
            list[StopString],
            BeforeValidator(_stop_list, json_schema_input_type=StopString | list[StopString]),
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description="a string or up to 16, of 1 to 256 characters")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64, description="ids in the vocabulary")
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None

    return_routed_experts: bool | None = Field(
        None,
        description="extension: the experts of every token, base64 of little-endian int32 [tokens, MoE layers, top-k], "
        "in `sglext.routed_experts` (of a stream, in its last chunk before usage)",
    )
    return_token_ids: bool | None = Field(
        None, description="extension: ids of prompt and answer; in chat only without stream"
    )
    trace_hints: (
        Annotated[
            Annotated[bool, Tag("flag")] | Annotated[HintRequest, Tag("options")],
            Discriminator(_hint_kind),
        ]
        | None
    ) = Field(
        None,
        description="extension: write rounding hints; fetch them from /v1/rollouts/{x-trace-rollout}/hints, with "
        "?choice=0 and so on when n > 1. true, or an object with some of the options of docs/hints.md",
    )
    return_rollout: bool | None = Field(
        None,
        description="extension: token ids, log-probabilities, finish reason and weight versions of the answer in "
        "`metadata.trace_rollout` and at /v1/rollouts/{x-trace-rollout}; implied by trace_hints",
    )
    weight_version: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        None,
        description="extension: answer only with these weights (the x-trace-weight-version header of an answer); 409 "
        "when others are loaded",
    )
    rid: Label | None = Field(None, description="a label for logs; the request id is minted by the server")
    user: Label | None = Field(None, description="a label for logs")

    _as_sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def completion_limit(self) -> int | None:
        """Tokens the client asked for at most, or None for the route's default."""
        return self.max_tokens

    def keep_as_sent(self, raw: Mapping[str, Any]) -> None:
        """Remembers the fields that the engine must get exactly as the client wrote them."""
        self._as_sent.update({name: raw[name] for name in AS_SENT if raw.get(name) is not None})

    @property
    def records_rollout(self) -> bool:
        """Whether the answer's tokens are kept for /v1/rollouts."""
        return bool(self.return_rollout or self.trace_hints)

    def upstream_payload(self, *, rid: str, served_name: str) -> dict[str, Any]:
        """The JSON object that the engine receives: only fields that were set, our id, its own model name."""
        own = {"model", "rid", "user", "trace_hints", "return_rollout", "weight_version"}
        payload = self.model_dump(exclude_none=True, exclude=own) | self._as_sent
        payload["model"] = served_name
        payload["rid"] = rid
        custom: dict[str, Any] = {}
        if self.trace_hints:
            options = self.trace_hints.options() if isinstance(self.trace_hints, HintRequest) else {}
            custom["trace_hints"] = {**options, "sink": "file"} if options else "file"
        if self.records_rollout:
            custom["trace_rollout"] = True
        if self.weight_version is not None:
            custom["max_version_diff"] = 0
        if custom:
            payload["custom_params"] = custom
        return payload


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="only with logprobs: true")
    tools: list[Tool] | None = Field(
        None,
        min_length=1,
        max_length=MAX_TOOLS,
        description="functions with distinct names; needs a server with --tool-call-parser unless tool_choice is none",
    )
    tool_choice: (
        Annotated[
            Annotated[ToolWord, Tag("word")] | Annotated[NamedToolChoice, Tag("named")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = Field(None, description="only with tools; auto is the default")
    parallel_tool_calls: bool | None = Field(None, description="only with tools; false asks for one call at most")
    response_format: ResponseFormat | None = Field(
        None, description="text, any JSON object, or JSON that follows a schema; not together with tools"
    )
    return_prompt_token_ids: bool | None = Field(
        None, description="extension of the engine: ids of the prompt; without stream"
    )
    return_meta_info: bool | None = Field(None, description="extension of the engine; without stream")

    @property
    def completion_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may be a tool call."""
        return self.tools is not None and self.tool_choice != "none"


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. One prompt a request."""

    prompt: Annotated[
        Annotated[Annotated[str, StringConstraints(min_length=1)], Tag("text")]
        | Annotated[Annotated[list[TokenId], Field(min_length=1)], Tag("tokens")],
        Discriminator(_prompt_kind),
    ] = Field(description="text, or token ids in the vocabulary")
    echo: bool | None = Field(None, description="not together with logprobs")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def completion_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else 16
