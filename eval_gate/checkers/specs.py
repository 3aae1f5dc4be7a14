"""The graders a query may name: one pydantic model each, told apart by `type`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

Text = Annotated[str, Field(min_length=1, max_length=20_000)]
Source = Annotated[str, Field(min_length=1, max_length=200_000)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def shown(self) -> str:
        """What the checker looks for, as readers of a report see it."""
        expected: Any = getattr(self, "expected", None)
        if isinstance(expected, float):
            return f"{expected:.12g}"
        return expected if isinstance(expected, str) else json.dumps(expected)


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

    @property
    def shown(self) -> str:
        return f"/{self.pattern}/"


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


class Prefix(_Spec):
    """The answer, without surrounding white space, starts with `expected`, or with any of them when it is a list."""

    type: Literal["prefix"]
    expected: Text | Annotated[tuple[Text, ...], Field(min_length=1)]

    @property
    def alternatives(self) -> tuple[str, ...]:
        return (self.expected,) if isinstance(self.expected, str) else self.expected


class JsonField(_Spec):
    """The first JSON object in the answer has `expected` at the dotted `path`; text is compared normalized."""

    type: Literal["json"]
    path: Text
    expected: JsonValue


class Math(_Spec):
    r"""Mathematically equal to `expected`, a LaTeX or plain expression.

    The last `\boxed{}` after the reasoning counts, else the last expression found. Needs the extra `gate-math`.
    """

    type: Literal["math"]
    expected: Text


class JsonSchema(_Spec):
    """The first JSON value of the answer is valid under `schema` (draft 2020-12). Needs the extra `gate-json`."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]

    @property
    def shown(self) -> str:
        return json.dumps(self.json_schema)


class UnitTests(_Spec):
    """The last Python code block of the answer, then `tests`, run without an exception in a process of their own.

    Attributes:
        tests: Python statements that raise when the answer is wrong, such as `assert f(2) == 4`.
        cpu_s: seconds of processor time; an answer that uses more is wrong.
        memory_mb: address space of the process in MiB.
    """

    type: Literal["code"]
    tests: Source
    cpu_s: int = Field(default=5, ge=1, le=600)
    memory_mb: int = Field(default=1024, ge=64, le=65_536)

    @property
    def shown(self) -> str:
        return self.tests


class PythonFunction(_Spec):
    """`module:function`, called with the answer and `options`; returns a bool, or a pair (bool, text that counted)."""

    type: Literal["python"]
    function: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=300)]
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def shown(self) -> str:
        expected = self.options.get("expected")
        return expected if isinstance(expected, str) else f"{self.function} {json.dumps(self.options)}"


class Judge(_Spec):
    """A language model says whether the answer meets `rubric`; only ever beside a checker that is a program.

    Attributes:
        rubric: what a right answer must fulfil.
        reference: an example of a right answer.
    """

    type: Literal["judge"]
    rubric: Text
    reference: Text | None = None

    @property
    def shown(self) -> str:
        return self.reference or self.rubric


Program = Annotated[
    Exact
    | Normalized
    | Numeric
    | Regex
    | Choice
    | Contains
    | Prefix
    | JsonField
    | Math
    | JsonSchema
    | UnitTests
    | PythonFunction,
    Field(discriminator="type"),
]
"""A checker that needs no model."""


class Judged(_Spec):
    """The answer passes `checker`, and then the judge too; when it fails `checker`, the judge is not asked."""

    type: Literal["judged"]
    checker: Program
    judge: Judge

    @property
    def shown(self) -> str:
        return f"{self.checker.shown}; judged by: {self.judge.shown}"


Checker = Annotated[
    Exact
    | Normalized
    | Numeric
    | Regex
    | Choice
    | Contains
    | Prefix
    | JsonField
    | Math
    | JsonSchema
    | UnitTests
    | PythonFunction
    | Judged,
    Field(discriminator="type"),
]


def program_of(checker: Checker) -> Program:
    """The part of a checker that needs no model."""
    return checker.checker if isinstance(checker, Judged) else checker
