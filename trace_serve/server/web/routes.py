"""Serves the pages and the OpenAPI document, under a policy that lets a browser run nothing but what is in them."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files

import orjson
from fastapi import APIRouter
from fastapi.responses import Response

from trace_serve.server.openapi.document import document

PAGES = {"/": "try.html", "/docs": "docs.html"}


def content_policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own scripts and styles by digest, and requests to this server."""
    scripts = " ".join(_digests(page, "script"))
    styles = " ".join(_digests(page, "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def web_router(*, pages: bool) -> APIRouter:
    """The routes.

    Args:
        pages: whether the two pages are served; the document always is.
    """
    router = APIRouter()
    body = orjson.dumps(document(version("trace-serve")))

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(body, media_type="application/json")

    if pages:
        for path, name in PAGES.items():
            router.get(path, include_in_schema=False)(_page(name))
    return router


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    text = (files(__package__) / name).read_text("utf-8")
    headers = {
        "content-security-policy": content_policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page() -> Response:
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    return page


def _digests(page: str, element: str) -> list[str]:
    bodies = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies]
