"""Types that every request model shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1

Label = Annotated[str, StringConstraints(max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Strict(BaseModel):
    """Types are not coerced, unknown fields are refused, numbers are finite, instances do not change."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
