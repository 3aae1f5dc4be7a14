"""The settings a release is judged under; their digest is a subject of the signed verdict."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trace_serve.errors import ConfigError


class GatePolicy(BaseModel):
    """Everything that decides between PASS, BLOCK and INCONCLUSIVE.

    Attributes:
        margin: largest acceptable loss of pass rate, as a share (0.05 = 5 points).
        margin_kind: `absolute`: points of pass rate; `relative`: a share of the training arm's pass rate.
        alpha: one-sided error rate of PASS, and of BLOCK.
        rule: `ci` decides by confidence bounds; `point` compares the measured gap with the margin.
        mode: `population`: a claim about queries like these; `fixed-set`: about exactly these, needs repeats >= 2.
        repeats: samples of each query and arm.
        looks: how often the data are looked at, in equal parts of the queries; more than one can stop early.
        spending: bounds of those looks: `obf` (O'Brien-Fleming: strict early, lenient last) or `pocock` (constant).
        temperature: sampling temperature; 0 is greedy.
        api: route that both arms are asked on: `chat`, or `completions` without a chat template.
        record_tokens: ask both arms for token ids and log-probabilities too; not every server takes such requests.
        judge: served name of the model that judges, where checkers have a judge.
        redaction: what redacted the queries before both arms, with its version; None leaves them as they are.
        max_queries: size of the seeded random subsample; None takes every query.
        sample_seed: seed of that subsample and of the order.
        error_cap: largest share of samples without a grade.
        degenerate_cap: largest excess of the serving arm's share of degenerate answers.
        truncation_cap: largest excess of the serving arm's share of answers cut at the token limit.
        baseline_floor: smallest pass rate of the training arm with which a comparison means anything.
        allow_unproven: judge arms that do not prove what they run; labelled in every report.
        valid_days: a verdict expires this many days after it was made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    margin: float = Field(default=0.05, gt=0, lt=1)
    margin_kind: Literal["absolute", "relative"] = "absolute"
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    rule: Literal["ci", "point"] = "ci"
    mode: Literal["population", "fixed-set"] = "population"
    repeats: int = Field(default=1, ge=1, le=64)
    looks: int = Field(default=1, ge=1, le=20)
    spending: Literal["obf", "pocock"] = "obf"
    temperature: float = Field(default=0.0, ge=0, le=2)
    api: Literal["chat", "completions"] = "chat"
    record_tokens: bool = False
    judge: str | None = None
    redaction: str | None = None
    max_queries: int | None = Field(default=None, ge=1)
    sample_seed: int = 0
    error_cap: float = Field(default=0.02, ge=0, lt=1)
    degenerate_cap: float = Field(default=0.05, ge=0, lt=1)
    truncation_cap: float = Field(default=0.10, ge=0, lt=1)
    baseline_floor: float = Field(default=0.20, ge=0, lt=1)
    allow_unproven: bool = False
    valid_days: float = Field(default=30.0, gt=0, le=3650)

    @model_validator(mode="after")
    def _fixed_set_needs_repeats(self) -> GatePolicy:
        if self.mode == "fixed-set" and self.repeats < 2:
            raise ValueError("mode fixed-set needs repeats of at least 2; raise --repeats or use --mode population")
        return self

    @model_validator(mode="after")
    def _looks_need_an_error_rate(self) -> GatePolicy:
        if self.looks > 1 and self.rule == "point":
            raise ValueError("looks of more than 1 need --rule ci; the plain rule has no error rate to spend")
        if self.looks > 1 and self.mode == "fixed-set":
            raise ValueError(
                "looks of more than 1 need --mode population; a fixed set is judged when all of it was seen"
            )
        return self

    @property
    def canonical(self) -> bytes:
        """The settings as JSON with sorted keys and no white space: the bytes of `gate-policy.json`."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """`sha256:` of the canonical bytes."""
        return "sha256:" + hashlib.sha256(self.canonical).hexdigest()

    @classmethod
    def build(cls, **values: object) -> GatePolicy:
        """Validates settings that came from a user.

        Raises:
            ConfigError: a setting is out of range; `field` names it.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            fault = exc.errors(include_url=False)[0]
            name = ".".join(str(part) for part in fault["loc"]) or "mode"
            message = fault["msg"].removeprefix("Value error, ")
            got = f" (got {fault['input']!r})" if fault["loc"] else ""
            raise ConfigError(f"--{name.replace('_', '-')}: {message}{got}", field=name) from exc
