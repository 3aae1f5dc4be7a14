"""Checks Kubernetes objects strictly and offline: unknown fields are errors, custom resources included."""

from __future__ import annotations

import functools
import json
import re
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


def render(values: dict[str, Any], *, name: str = "mine", namespace: str = "prod") -> list[dict[str, Any]]:
    """The objects that the chart makes of these values.

    Raises:
        helm_python.HelmError: the values break the schema, or a template fails.
    """
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name=name, namespace=namespace)
    return [
        document for path, text in sorted(rendered.items()) if not path.endswith(".txt") for document in documents(text)
    ]


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
