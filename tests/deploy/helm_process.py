"""Helm's library in a process of its own, since it brings Go's runtime with it: one JSON request and one answer a line.

A request has `chart`, `values` and either `lint` or `name` and `namespace`; an answer has `result`, or `error`.
"""

from __future__ import annotations

import json
import sys

import helm_python


def answer(request: dict[str, object]) -> dict[str, object]:
    try:
        if "lint" in request:
            return {"result": helm_python.lint(request["chart"], request["values"], strict=True)}
        with helm_python.Chart.load(request["chart"]) as chart:
            rendered = chart.render(request["values"], name=request["name"], namespace=request["namespace"])
        return {"result": rendered}
    except helm_python.HelmError as exc:
        return {"error": str(exc)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
