"""What a client may send: every field, its type and its range. Anything else is refused by name.

Types are strict: "4" is not a number and 1 is not a boolean. A null means the default. Ranges that depend on the policy
(vocabulary, context length) are checked by `limits.check_limits`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from trace_serve.server.errors import ApiError, bad_request

MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1

Label = Annotated[str, StringConstraints(max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _join_text_parts(value: object) -> object:
    """Text parts become one string, separated by line breaks; other kinds of parts are refused."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        ok = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not ok or set(part) != {"type", "text"}:
            raise PydanticCustomError(
                "text_part", f"part {index} should be {{'type': 'text', 'text': ...}}; this policy reads text only"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _prompt_kind(value: object) -> str:
    return "tokens" if isinstance(value, list) else "text"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_text_parts)] = Field(
        description="text, or a list of {'type': 'text', 'text': ...} parts"
    )
    name: Label | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="one more chunk with token counts before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="token counts on every chunk")


class GenerationRequest(_Strict):
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

    stop: Annotated[list[StopString], BeforeValidator(_stop_list), Field(max_length=16)] | None = Field(
        None, description="a string or up to 16, of 1 to 256 characters"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64, description="ids in the vocabulary")
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None

    return_routed_experts: bool | None = Field(None, description="extension of the engine")
    return_token_ids: bool | None = Field(None, description="extension of the engine")
    trace_hints: bool | None = Field(
        None,
        description="write rounding hints; fetch them from /v1/rollouts/{x-trace-rollout}/hints, with ?choice=0 and so "
        "on when n > 1",
    )
    rid: Label | None = Field(None, description="a label for logs; the request id is minted by the server")
    user: Label | None = Field(None, description="a label for logs")

    @property
    def completion_limit(self) -> int | None:
        """Tokens the client asked for at most, or None for the route's default."""
        return self.max_tokens

    def upstream_payload(self, *, rid: str, served_name: str) -> dict[str, Any]:
        """The JSON object that the engine receives: only fields that were set, our id, its own model name."""
        payload = self.model_dump(exclude_none=True, exclude={"model", "rid", "user", "trace_hints"})
        payload["model"] = served_name
        payload["rid"] = rid
        if self.trace_hints:
            payload["custom_params"] = {"trace_hints": "file"}
        return payload


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="only with logprobs: true")
    return_prompt_token_ids: bool | None = Field(None, description="extension of the engine")
    return_meta_info: bool | None = Field(None, description="extension of the engine")

    @property
    def completion_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


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


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(model: type[RequestT], raw: object) -> RequestT:
    """Validates a parsed JSON body.

    Raises:
        ApiError: 400 that names the field, what was got and what was expected.
    """
    if not isinstance(raw, Mapping):
        raise bad_request(f"body: got {_shown(raw)}, expected a JSON object")
    try:
        request = model.model_validate(raw)
    except ValidationError as exc:
        raise _named(exc.errors(include_url=False, include_context=False)[0]) from None
    _check_combinations(request)
    return request


def _check_combinations(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: only allowed with stream: true", param="stream_options")
    if request.top_k == 0:
        raise bad_request("top_k: got 0, expected -1 (off) or 1 and more", param="top_k")
    limit = request.completion_limit
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise bad_request(
            f"min_tokens: got {request.min_tokens}, expected at most max_tokens ({limit})", param="min_tokens"
        )
    if isinstance(request, ChatRequest):
        both = request.max_tokens is not None and request.max_completion_tokens is not None
        if both and request.max_tokens != request.max_completion_tokens:
            raise bad_request(
                "max_completion_tokens: differs from max_tokens; send one of the two", param="max_completion_tokens"
            )
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request("echo: not possible together with logprobs; send one of the two", param="echo")


def _named(error: ErrorDetails) -> ApiError:
    location = [part for part in error["loc"] if part not in ("text", "tokens", "[key]")]
    param = str(location[0]) if location else None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] == "extra_forbidden":
        return bad_request(f"{path}: unknown or unsupported field; remove it", param=param, code="unknown_field")
    if error["type"] == "missing":
        return bad_request(f"{path}: missing, expected a value", param=param, code="missing_field")
    message = error["msg"][0].lower() + error["msg"][1:]
    return bad_request(f"{path}: got {_shown(error['input'])}, {message}", param=param, code="invalid_value")


def _shown(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)
