"""The OpenAPI document: put together from the request models that validate and the answers that the routes give.

FastAPI derives a document from function signatures; the routes here read their bodies themselves, so that a bad request
is answered in OpenAI's error shape. A test holds the document's paths against the application's.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from trace_serve.server.openapi.errors import RESPONSES
from trace_serve.server.openapi.paths import paths
from trace_serve.server.schemas import answers as answers
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest
from trace_serve.server.tokenize import TokenizeRequest

_REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest)
_ANSWERS: tuple[type[BaseModel], ...] = (
    answers.ErrorAnswer,
    answers.ChatCompletion,
    answers.TextCompletion,
    answers.ChatChunk,
    answers.TextChunk,
    answers.ModelList,
    answers.ModelEntry,
    answers.Tokens,
    answers.Rollout,
    answers.Report,
    answers.Live,
    answers.Ready,
)

_ABOUT = """\
Serves FP4 policies over OpenAI's API, with rounding hints and rollout records for trainers.

Every number has a documented range, and unknown fields are refused: a bad request is a 400 whose error names the field,
before any header of a stream. A null means the default. Errors have one shape on every route. A stream ends with
`data: [DONE]`, or with an error event when it was cut; it is never ended as if it were complete.
"""


def document(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        version: of the server.
    """
    content = copy.deepcopy(_document())
    content["info"]["version"] = version
    return content


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    modes: list[tuple[type[BaseModel], Literal["validation"]]] = [(m, "validation") for m in (*_REQUESTS, *_ANSWERS)]
    _, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "trace-serve", "description": _ABOUT, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}],
        "paths": paths(),
        "components": {
            "schemas": schemas["$defs"],
            "responses": RESPONSES,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an API key of the server; a server without keys takes any request",
                }
            },
        },
    }
