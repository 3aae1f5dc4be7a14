"""The options of one load test: their one home, for `trace-serve load` and for plain locust."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from trace_serve.errors import ConfigError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")


def parse_seconds(given: Any) -> Any:
    """Seconds of "1500ms", "30s", "2m", "1h" or a number; anything else is returned for pydantic to refuse."""
    found = _DURATION.fullmatch(given.strip()) if isinstance(given, str) else None
    return given if found is None else float(found[1]) * _UNITS[found[2]]


Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
Interval = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

Arrivals = Literal["closed", "constant", "poisson", "trace"]
WorkloadName = Literal["chat", "shared-prefix", "long-context", "request-log", "mooncake"]


class LoadPlan(BaseModel):
    """One load test against one server. A field is the flag of the same name, `_` written as `-`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arrivals: Arrivals = Field(
        "closed", description="closed: users that wait for their answer; the others send by a schedule made in advance"
    )
    rate: Positive | None = Field(None, description="arrivals a second, for constant and poisson")
    users: Count = Field(1, description="users of the closed loop")
    duration: Interval = Field(30.0, description="measured time, after the warm-up: 30s, 2m")
    warmup: Seconds = Field(0.0, description="time before that; what arrives in it is sent but not measured")
    drain: Seconds = Field(60.0, description="how long unfinished answers are waited for at the end")
    max_in_flight: Count = Field(512, description="an arrival above this many open requests is dropped, never queued")
    seed: int = Field(0, ge=0, description="of arrival times, order of queries and who leaves or reads slowly")

    workload: WorkloadName = Field("chat", description="what is asked")
    queries: str = Field("support", description="chat: a shipped suite's name, or a JSONL file of gate queries")
    trace: Path | None = Field(None, description="request log or mooncake trace to replay")
    speed: Positive = Field(1.0, description="replays a trace this many times faster")
    length_scale: Positive = Field(1.0, description="mooncake: multiplies input and output lengths")
    prefix_groups: Count = Field(4, description="shared-prefix: number of different prefixes")
    prefix_words: Count = Field(200, description="shared-prefix: words of each prefix")
    prompt_words: Count = Field(1000, description="long-context: words of each prompt, none shared")
    max_tokens: int = Field(0, ge=0, description="limit of every answer; 0 leaves each query's own")
    ignore_eos: bool = Field(False, description="answers run to their limit (SGLang's field)")
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False, description="of sampling")
    model: str = Field("", description="model name to send; default none")
    timeout: Interval = Field(600.0, description="time without a byte after which a request has failed")

    hints: Literal["off", "on", "fetch"] = Field(
        "off", description="on asks for rounding hints; fetch also gets the hint file of every answer"
    )
    disconnect_share: Share = Field(0.0, description="share of clients that leave before their answer ends")
    disconnect_after: Seconds = Field(0.5, description="time after which they leave, from the send")
    slow_share: Share = Field(0.0, description="share of clients that read slowly; not in the latencies")
    slow_bytes_per_s: Count = Field(2000, description="how fast those read")
    swap_url: str = Field("", description="admin API of the server; policies are activated in turn under load")
    swap_policies: str = Field("", description="labels to activate in turn, separated by commas")
    swap_every: Interval = Field(20.0, description="time between activations")

    slo: Path | None = Field(None, description="TOML or JSON file of what must be met; default no failed request")
    max_lag: Interval = Field(0.1, description="p99 of sent minus scheduled above which a run is invalid")
    keep_requests: int = Field(100_000, ge=0, description="requests that are kept one by one for requests.csv")

    @model_validator(mode="after")
    def _consistent(self) -> LoadPlan:
        if self.arrivals in ("constant", "poisson") and self.rate is None:
            raise ValueError(f"rate: got none, --arrivals {self.arrivals} needs arrivals a second, e.g. --rate 4")
        replayed = self.workload in ("request-log", "mooncake")
        if replayed and self.trace is None:
            raise ValueError(f"trace: got none, --workload {self.workload} needs the file to replay")
        if self.arrivals == "trace" and not replayed:
            raise ValueError("arrivals: got trace, expected it with --workload request-log or mooncake")
        if bool(self.swap_url) != bool(self.swap_policies):
            raise ValueError("swap_url: expected it together with --swap-policies")
        if self.disconnect_share + self.slow_share > 1:
            raise ValueError("disconnect_share: with slow_share it is above 1")
        return self

    @property
    def total_s(self) -> float:
        """Warm-up and measured time."""
        return self.warmup + self.duration

    @property
    def is_open(self) -> bool:
        return self.arrivals != "closed"

    @property
    def digest(self) -> str:
        """Equal for workers that will do the same."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def make_plan(given: dict[str, Any]) -> LoadPlan:
    """A checked plan.

    Raises:
        ConfigError: naming the flag.
    """
    try:
        return LoadPlan.model_validate(given)
    except ValidationError as exc:
        raise config_error(exc, "--") from None


def config_error(exc: ValidationError, prefix: str) -> ConfigError:
    """The first fault of a model as one line; `prefix` stands before the field's name."""
    first = exc.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if not name:
        name, _, message = message.partition(": ")
    shown = name.replace("_", "-") if prefix == "--" else name
    got = "" if isinstance(first["input"], dict) else f"got {first['input']!r}: "
    return ConfigError(f"{prefix}{shown}: {got}{message}", field=name)
