"""The graders a query may name: one pydantic model each, told apart by `type`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

Text = Annotated[str, Field(min_length=1, max_length=20_000)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Exact(_Spec):
    """The answer, without surrounding white space, equals `expected`."""

    type: Literal["exact"]
    expected: Text


class Normalized(_Spec):
    """Equal after case folding and dropping punctuation and repeated white space."""

    type: Literal["normalized"]
    expected: Text


class Numeric(_Spec):
    r"""The last number of the answer (inside the last `\boxed{}` when there is one) is within the tolerance.

    Passes when |got - expected| <= max(absolute_tolerance, relative_tolerance * |expected|).
    """

    type: Literal["numeric"]
    expected: float
    absolute_tolerance: float = Field(default=1e-6, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)


class Regex(_Spec):
    """Python regular expression; searched for, or matched against the whole answer with `full`."""

    type: Literal["regex"]
    pattern: Text
    full: bool = False
    ignore_case: bool = False

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ValueError(f"not a regular expression: {exc}") from exc
        return pattern


class Choice(_Spec):
    """The first of `options` that the answer mentions as a whole word is `expected`."""

    type: Literal["choice"]
    options: tuple[Text, ...] = Field(min_length=2)
    expected: Text

    @model_validator(mode="after")
    def _expected_is_an_option(self) -> Choice:
        if self.expected not in self.options:
            raise ValueError(f"expected {self.expected!r} is not among options {', '.join(self.options)}")
        if len({option.casefold() for option in self.options}) != len(self.options):
            raise ValueError("options must differ in more than their case")
        return self


class Contains(_Spec):
    """The answer contains `expected`, or any of them when it is a list."""

    type: Literal["contains"]
    expected: Text | Annotated[tuple[Text, ...], Field(min_length=1)]
    ignore_case: bool = True
    whole_word: bool = False

    @property
    def alternatives(self) -> tuple[str, ...]:
        return (self.expected,) if isinstance(self.expected, str) else self.expected


class JsonField(_Spec):
    """The first JSON object in the answer has `expected` at the dotted `path`; text is compared normalized."""

    type: Literal["json"]
    path: Text
    expected: JsonValue


Checker = Annotated[
    Exact | Normalized | Numeric | Regex | Choice | Contains | JsonField,
    Field(discriminator="type"),
]
