"""The OpenAPI document describes every route, and what it promises of requests is what is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import DIGEST, RECIPE, Running

from trace_serve.server.app import create_app
from trace_serve.server.authorization import Authorization
from trace_serve.server.openapi.document import document
from trace_serve.server.openapi.examples import CHAT, COMPLETION, TOKENIZE
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest, parse_body, parse_request
from trace_serve.server.tokenize import TokenizeRequest
from trace_serve.settings import Settings

PAGES = {"/", "/docs", "/openapi.json"}


def routes(router: Any) -> set[tuple[str, str]]:
    """Method and path of everything that an application serves."""
    found = set()
    for route in router.routes:
        if hasattr(route, "methods"):
            found |= {(method.lower(), route.path) for method in route.methods if method != "HEAD"}
        elif hasattr(route, "original_router"):
            found |= routes(route.original_router)
    return found


def test_the_document_has_every_route_and_no_other(tmp_path: Path) -> None:
    policy = Authorization(tmp_path, "p", "1", RECIPE, DIGEST, "rollout")
    app = create_app(Settings(), policy, lambda _: pytest.fail("no engine is needed"))
    served = {(method, path) for method, path in routes(app) if path not in PAGES}
    described = {
        (method, path)
        for path, item in document("1")["paths"].items()
        for method in item
        if method in ("get", "post", "put", "delete", "patch")
    }
    assert served == described


def test_every_reference_of_the_document_has_a_target() -> None:
    content = document("1")
    pending: list[Any] = [content]
    seen = 0
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                found: Any = content
                for part in reference.removeprefix("#/").split("/"):
                    found = found[part]
                seen += 1
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    assert seen > 50


def test_every_operation_is_named_once_and_says_how_it_fails() -> None:
    operations = [
        item[method]
        for item in document("1")["paths"].values()
        for method in ("get", "post", "delete")
        if method in item
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    for operation in operations:
        assert operation["summary"]
        if operation.get("security") is None:
            assert "401" in operation["responses"], operation["operationId"]


@pytest.mark.parametrize("name", sorted(CHAT))
def test_examples_of_chat_requests_are_accepted(name: str) -> None:
    parse_request(ChatRequest, CHAT[name]["value"])


def test_examples_of_other_requests_are_accepted() -> None:
    for example in COMPLETION.values():
        parse_request(CompletionRequest, example["value"])
    for example in TOKENIZE.values():
        parse_body(TokenizeRequest, example["value"])


def test_every_number_that_a_client_can_send_has_a_range() -> None:
    unbounded = []
    schemas = document("1")["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "HintRequest", "ToolCall"):
        pending = [(f"{name}.{field}", schema) for field, schema in schemas[name]["properties"].items()]
        while pending:
            path, schema = pending.pop()
            if schema.get("type") in ("integer", "number"):
                lower = schema.keys() & {"minimum", "exclusiveMinimum"}
                upper = schema.keys() & {"maximum", "exclusiveMaximum"}
                if not (lower and upper):
                    unbounded.append(path)
            pending += [(path, part) for word in ("anyOf", "oneOf") for part in schema.get(word, ())]
            for word in ("items", "additionalProperties"):
                if isinstance(schema.get(word), dict):
                    pending.append((path, schema[word]))
    assert unbounded == []


def test_the_document_is_served_without_a_key_and_names_no_other_host(shared: Running) -> None:
    answer = httpx.get(shared.url + "/openapi.json")
    assert answer.json()["info"]["title"] == "trace-serve"
    assert "http://" not in answer.text
    assert "https://" not in answer.text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_may_run_only_what_is_in_them(shared: Running, path: str) -> None:
    answer = httpx.get(shared.url + path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "//" not in answer.text.replace("://", "//") or "http" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
