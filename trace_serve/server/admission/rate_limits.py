"""Requests and tokens a minute of each key, and the headers that tell a client how much is left."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from limits import RateLimitItemPerMinute
from limits.strategies import FixedWindowRateLimiter

from trace_serve.server.admission.rate_windows import WindowStorage
from trace_serve.server.errors import ApiError
from trace_serve.server.keys.access import Caller

_REQUESTS = "requests"
_TOKENS = "tokens"


class RateLimited(ApiError):
    """429 with the limit's headers."""

    def __init__(self, message: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self._headers = headers

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **self._headers}


class RateLimits:
    """Windows of a minute that begin with a key's first request; a refused request counts for nothing.

    Tokens are reserved when a request comes in (the estimate of its prompt and all it may sample) and charged when it
    ends (what it used). A request that ends without telling its usage is charged what it reserved.

    Args:
        requests_per_minute: of a key without a limit of its own; None does not limit it.
        tokens_per_minute: prompt and completion tokens, likewise.
    """

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._limiter = FixedWindowRateLimiter(WindowStorage())
        self._reserved: Counter[str] = Counter()

    def reserve(self, caller: Caller, tokens: int) -> Reservation:
        """Counts a request, or refuses it.

        Args:
            caller: whose request it is.
            tokens: prompt and completion tokens that it may use.

        Raises:
            ApiError: 429 while a limit is used up; 400 when the request alone is larger than the limit of tokens, since
                no wait would help.
        """
        per_minute = caller.limits.requests_per_minute or self._requests_per_minute
        token_limit = caller.limits.tokens_per_minute or self._tokens_per_minute
        requests = None if per_minute is None else RateLimitItemPerMinute(per_minute)
        budget = None if token_limit is None else RateLimitItemPerMinute(token_limit)
        reservation = Reservation(self, caller.name, requests, budget, tokens)
        if budget is not None:
            if tokens > budget.amount:
                raise ApiError(
                    400,
                    f"max_tokens: this request may use {tokens} tokens, expected at most {budget.amount}, all that its "
                    "key may use in a minute; send a smaller max_tokens or a shorter prompt",
                    kind="invalid_request_error",
                    param="max_tokens",
                    code="request_exceeds_limit",
                )
            if not self._limiter.test(budget, _TOKENS, caller.name, cost=tokens + self._reserved[caller.name]):
                raise self._refusal(reservation, budget, _TOKENS)
        if requests is not None and not self._limiter.test(requests, _REQUESTS, caller.name):
            raise self._refusal(reservation, requests, _REQUESTS)
        if requests is not None:
            self._limiter.hit(requests, _REQUESTS, caller.name)
        if budget is not None:
            self._reserved[caller.name] += tokens
            reservation.held = True
        return reservation

    def headers(self, reservation: Reservation) -> dict[str, str]:
        """`x-ratelimit-*` as OpenAI names them, for the limits that apply."""
        found: dict[str, str] = {}
        for item, kind in ((reservation.requests, _REQUESTS), (reservation.budget, _TOKENS)):
            if item is not None:
                remaining, wait_s = self._left(reservation.name, item, kind)
                found[f"x-ratelimit-limit-{kind}"] = str(item.amount)
                found[f"x-ratelimit-remaining-{kind}"] = str(remaining)
                found[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(wait_s)}s"
        return found

    def settle(self, reservation: Reservation, used: int) -> None:
        """Gives the reserved tokens back and charges those that were used."""
        name = reservation.name
        self._reserved[name] -= reservation.tokens
        if self._reserved[name] <= 0:
            del self._reserved[name]
        if reservation.budget is not None and used > 0:
            self._limiter.hit(reservation.budget, _TOKENS, name, cost=used)

    def _left(self, name: str, item: RateLimitItemPerMinute, kind: str) -> tuple[int, float]:
        stats = self._limiter.get_window_stats(item, kind, name)
        held = self._reserved[name] if kind == _TOKENS else 0
        return max(0, stats.remaining - held), max(0.0, stats.reset_time - time.time())

    def _refusal(self, reservation: Reservation, item: RateLimitItemPerMinute, kind: str) -> RateLimited:
        remaining, wait_s = self._left(reservation.name, item, kind)
        wanted = f", {reservation.tokens} wanted" if kind == _TOKENS else ""
        return RateLimited(
            f"this key may use {item.amount} {kind} a minute and has {remaining} left{wanted}; retry later",
            max(1.0, wait_s),
            self.headers(reservation),
        )


class Reservation:
    """What one request has taken of its key's limits; settled once, however often `settle` is called."""

    def __init__(
        self,
        limits: RateLimits,
        name: str,
        requests: RateLimitItemPerMinute | None,
        budget: RateLimitItemPerMinute | None,
        tokens: int,
    ) -> None:
        self.name = name
        self.requests = requests
        self.budget = budget
        self.tokens = tokens
        self.held = False
        self._limits = limits

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` headers as things stand now."""
        return self._limits.headers(self)

    def settle(self, usage: dict[str, Any] | None, *, sent: bool) -> None:
        """Charges what the request used.

        Args:
            usage: the engine's usage object, when it came.
            sent: whether the request reached the engine; one that did not costs no tokens.
        """
        if not self.held:
            return
        self.held = False
        if usage is not None:
            used = int(usage.get("prompt_tokens") or 0) + int(usage.get("completion_tokens") or 0)
        else:
            used = self.tokens if sent else 0
        self._limits.settle(self, used)
