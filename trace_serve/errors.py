"""Every error that trace-serve and eval-gate raise on purpose.

    TraceServeError          exit code 4
    ├── ConfigError          exit code 3: what the user gave cannot be used
    │   ├── RecipeError      a numeric choice is unknown or contradicts another
    │   ├── PolicyError      a policy directory is incomplete, altered or of another kind
    │   ├── PatchError       the installed SGLang is not the pinned one, or was edited by somebody else
    │   ├── QueryError       a query file has a bad record (the line is named)
    │   ├── HintFormatError  a hint file is not version 1, or is damaged
    │   └── ShapeError       a tensor argument has the wrong shape, dtype or layout
    ├── VerdictRefused       exit code 3: a verdict does not authorise this policy
    └── EngineError          exit code 4: the engine did not start, died, or answered nonsense
        └── SeamError        a place in SGLang that the patch layer relies on is not what it was

A message is one line that says what was got, what was expected and what to change. `field` names the flag, key or
argument at fault when there is one.
"""

from __future__ import annotations

EXIT_PASS = 0
EXIT_BLOCK = 1
EXIT_INCONCLUSIVE = 2
EXIT_CONFIG = 3
EXIT_INFRASTRUCTURE = 4
EXIT_INTERRUPTED = 130


class TraceServeError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one line: what was got, what was expected, what to change.
        field: the flag, key or argument at fault.
    """

    exit_code = EXIT_INFRASTRUCTURE

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(TraceServeError):
    exit_code = EXIT_CONFIG


class RecipeError(ConfigError):
    pass


class PolicyError(ConfigError):
    pass


class PatchError(ConfigError):
    pass


class QueryError(ConfigError):
    pass


class HintFormatError(ConfigError):
    pass


class ShapeError(ConfigError):
    pass


class VerdictRefused(TraceServeError):
    exit_code = EXIT_CONFIG


class EngineError(TraceServeError):
    exit_code = EXIT_INFRASTRUCTURE


class SeamError(EngineError):
    pass
