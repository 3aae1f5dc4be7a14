"""Checks Kubernetes objects strictly and offline: unknown fields are errors, custom resources included."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/trace-serve"
CUSTOM = {path.stem: path for path in (Path(__file__).parent / "schemas").glob("*.yaml")}
VERSIONS = ("1.31", "1.37")
"""Releases of Kubernetes that every object must fit: the oldest with every field here, and the newest with a schema."""

HELM = importlib.util.find_spec("helm_python") is not None
"""Whether the chart can be rendered: Helm's library has no wheel for arm64."""

_DEFINITIONS = "urn:kubernetes"


def faults(document: dict[str, Any], version: str) -> list[str]:
    """What is wrong with one object; empty when nothing is.

    Raises:
        LookupError: there is no schema for this kind.
    """
    validator = _validator(document["kind"].lower(), document["apiVersion"], version)
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a file with several."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


class RenderRefusedError(Exception):
    """Helm's words: the values break the schema, or a template fails."""


def render(values: dict[str, Any], *, name: str = "mine", namespace: str = "prod") -> list[dict[str, Any]]:
    """The objects that the chart makes of these values.

    Raises:
        RenderRefusedError: Helm does not render them.
    """
    rendered = _helm({"values": values, "name": name, "namespace": namespace})
    return [
        document for path, text in sorted(rendered.items()) if not path.endswith(".txt") for document in documents(text)
    ]


def lint(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of `helm lint --strict`."""
    return list(_helm({"values": values, "lint": True})["messages"])


def _helm(request: dict[str, Any]) -> dict[str, Any]:
    process = _helm_process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"chart": str(CHART), **request}) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    if "error" in answer:
        raise RenderRefusedError(answer["error"])
    return dict(answer["result"])


@functools.cache
def _helm_process() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("helm_process.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        with process:
            process.kill()

    atexit.register(end)
    return process


def _schemas(version: str) -> Any:
    directory = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    return directory / f"v{version}.0-local-strict"


@functools.cache
def _registry(version: str) -> Registry[Any]:
    definitions = json.loads((_schemas(version) / "_definitions.json").read_text("utf-8"))
    resource = Resource(contents=definitions, specification=DRAFT202012)
    # Crawled once here: a registry never changes, so each look-up in an uncrawled one would crawl it anew.
    return Registry().with_resources([(_DEFINITIONS, resource)]).crawl()


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    if kind in CUSTOM:
        text = CUSTOM[kind].read_text("utf-8").replace("#kubernetes/", f"{_DEFINITIONS}#/$defs/")
        return Draft202012Validator(yaml.safe_load(text), registry=_registry(version))
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    path = _schemas(version) / f"{kind}-{group}.json"
    if not path.is_file():
        raise LookupError(f"no schema for {api_version} {kind} of Kubernetes {version}")
    return Draft202012Validator(json.loads(path.read_text("utf-8")), registry=_registry(version))


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping inside an object."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)
