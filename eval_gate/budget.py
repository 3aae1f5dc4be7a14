"""What a run may spend before it stops asking."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Tokens and wall-clock time of one run, both arms together.

    Attributes:
        max_tokens: prompt and answer tokens; None is without limit. Requests that are under way when it is reached
            still finish, so it is exceeded by at most `concurrency` answers.
        max_wall_s: seconds from the start of the run; None is without limit.
    """

    max_tokens: int | None = None
    max_wall_s: float | None = None
    spent_tokens: int = 0
    _started: float = field(default_factory=time.monotonic)

    def spend(self, prompt_tokens: int | None, completion_tokens: int | None, limit: int) -> None:
        """Counts one exchange; an answer whose length the server does not say counts as its limit."""
        self.spent_tokens += (prompt_tokens or 0) + (limit if completion_tokens is None else completion_tokens)

    def exhausted(self) -> str | None:
        """What has run out, in words; None while there is something left."""
        if self.max_tokens is not None and self.spent_tokens >= self.max_tokens:
            return f"--max-tokens {self.max_tokens} was reached"
        if self.max_wall_s is not None and time.monotonic() - self._started >= self.max_wall_s:
            return f"--max-wall {self.max_wall_s:g} s was reached"
        return None
