"""What pydantic found wrong with a request, in the words of the API's errors."""

from __future__ import annotations

import reprlib

from pydantic_core import ErrorDetails

from trace_serve.server.errors import ApiError, bad_request

_TAG_AT = {"messages": 2, "prompt": 1, "response_format": 1, "tool_choice": 1, "trace_hints": 1}
"""Where the location of an error names the branch of a union, which the client never wrote."""


def named(error: ErrorDetails) -> ApiError:
    """A 400 that names the field, what was got and what was expected."""
    location = list(error["loc"])
    at = _TAG_AT.get(str(location[0])) if location else None
    if at is not None and len(location) > at:
        del location[at]
    location = [part for part in location if part != "[key]"]
    param = str(location[0]) if location else None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] == "extra_forbidden":
        return bad_request(f"{path}: unknown or unsupported field; remove it", param=param, code="unknown_field")
    if error["type"] == "missing":
        return bad_request(f"{path}: missing, expected a value", param=param, code="missing_field")
    message = error["msg"][0].lower() + error["msg"][1:]
    return bad_request(f"{path}: got {shown(error['input'])}, {message}", param=param, code="invalid_value")


def shown(value: object) -> str:
    """A short form of any value."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel = 2
    return short.repr(value)
