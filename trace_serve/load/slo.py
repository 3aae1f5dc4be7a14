"""What a run has to meet: limits for one request, whose share of arrivals is goodput, and limits for the whole run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trace_serve.errors import ConfigError
from trace_serve.load.exchange import Exchange, Outcome
from trace_serve.load.plan import config_error

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_LATENCIES = ("ttft", "tpot", "itl", "e2e")


def _quantile(name: str) -> str:
    if name != "mean" and _QUANTILE.fullmatch(name) is None:
        raise ValueError("expected mean or a percentile such as p50, p99 or p99.9")
    return name


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Quantiles = dict[Annotated[str, AfterValidator(_quantile)], Milliseconds]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RequestLimits(_Part):
    """A request is good when it succeeded and exceeds none of these; an answer of one token has no TPOT to exceed."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class RunLimits(_Part):
    """Shares are of all measured arrivals, dropped ones included. `ttft_ms = {p99 = 500}` limits a percentile.

    Attributes:
        max_error_share: of failed, refused and unfinished requests.
        min_tokens_per_s: completion tokens a second.
        min_requests: fewer answered requests make the run invalid.
    """

    min_goodput: Share | None = None
    max_error_share: Share = 0.0
    max_dropped_share: Share = 0.0
    min_tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    min_requests: Annotated[int, Field(ge=1)] = 1
    ttft_ms: Quantiles = Field(default={})
    tpot_ms: Quantiles = Field(default={})
    itl_ms: Quantiles = Field(default={})
    e2e_ms: Quantiles = Field(default={})


class Slo(_Part):
    """One SLO file.

    Attributes:
        measured_from: TTFT and end-to-end latency count from the scheduled send (default; in a closed loop both are the
            same) or from the actual one.
    """

    measured_from: Literal["scheduled", "sent"] = "scheduled"
    request: RequestLimits = RequestLimits()
    run: RunLimits = RunLimits()

    def metric(self, latency: str) -> str:
        """The histogram of `ttft`, `tpot`, `itl` or `e2e`."""
        return f"{latency}_{self.measured_from}" if latency in ("ttft", "e2e") else latency

    def is_good(self, exchange: Exchange) -> bool:
        if exchange.outcome is not Outcome.OK:
            return False
        for latency in ("ttft", "tpot", "e2e"):
            limit = getattr(self.request, f"{latency}_ms")
            seconds = exchange.latency(self.metric(latency))
            if limit is not None and seconds is not None and seconds * 1000 > limit:
                return False
        return True

    def percentile_limits(self) -> list[tuple[str, str, float]]:
        """(latency, quantile name, milliseconds) of every limit on a percentile."""
        return [
            (latency, name, limit)
            for latency in _LATENCIES
            for name, limit in getattr(self.run, f"{latency}_ms").items()
        ]


def percent(name: str) -> float:
    """The number in `p99.9`."""
    return float(name.removeprefix("p"))


def load_slo(path: Path | None) -> Slo:
    """Reads an SLO file; None is the default, under which no request may fail or be dropped.

    Raises:
        ConfigError: unreadable, or a field is unknown or out of range; it is named.
    """
    if path is None:
        return Slo()
    try:
        text = path.read_text("utf-8")
        given: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return Slo.model_validate(given)
    except ValidationError as exc:
        raise config_error(exc, f"{path}: ") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--slo: {path} cannot be read: {exc}", field="slo") from exc
