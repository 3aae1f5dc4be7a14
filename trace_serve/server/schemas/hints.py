"""The options of a request for hints, as far as a client of the front-end may choose them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trace_serve.errors import ConfigError
from trace_serve.hints.options import HintOptions, parse
from trace_serve.server.schemas.base import MAX_INT32, Strict

Layer = Annotated[int, Field(ge=0, lt=1 << 16)]


class HintRequest(Strict):
    """Options of `trace_hints`; the sink is always the front-end's hint directory. Meaning: docs/hints.md."""

    sites: list[Literal["experts_in", "k", "v", "experts_mid"]] | None = Field(
        None, min_length=1, max_length=4, description="of those that the engine keeps"
    )
    layers: Literal["all", "deeper-half"] | Annotated[list[Layer], Field(min_length=1, max_length=4096)] | None = Field(
        None, description="all, deeper-half, or ascending layer indices"
    )
    codes: Literal["lsb", "full"] | None = Field(None, description="lowest bits of codes, or whole codes")
    scale: Literal["lsb", "byte", "none"] | None = Field(None, description="how much of each block scale is kept")
    first_token: int | None = Field(None, ge=0, le=MAX_INT32, description="position of the first row")
    logprobs: bool | None = None
    routed_experts: bool | None = None
    versions: Literal["current", "all"] | None = Field(None, description="rows of other weights: missing, or kept")

    @model_validator(mode="after")
    def _usable(self) -> HintRequest:
        try:
            parse(self.options(), HintOptions())
        except ConfigError as exc:
            raise PydanticCustomError("trace_hints", "{why}", {"why": str(exc)}) from None
        return self

    def options(self) -> dict[str, Any]:
        """The options that were set."""
        return self.model_dump(exclude_none=True)
