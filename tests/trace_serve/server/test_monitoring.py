"""Dashboard, alerts and runbook against the metrics of a running front-end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from exposition import page, sample_names
from harness import Running

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy/grafana/trace-serve.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
RUNBOOK = ROOT / "docs/operations.md"
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics that an expression reads; one that PromQL does not know raises."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return set(_selected(promql_parser.parse(expression)))


def _selected(node: Any) -> Iterator[str]:
    selector = getattr(node, "vector_selector", node)
    if type(selector).__name__ == "VectorSelector":
        yield selector.name
        return
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    for child in (*children, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from _selected(child)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_by_both() -> set[str]:
    expressions = [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]
    return {name for expression in expressions for name in metrics_in(expression)}


def test_the_names_are_found_in_any_expression() -> None:
    expression = (
        'histogram_quantile(0.9, sum by (le) (rate(a_bucket{x=~"$instance"}[$__rate_interval]))) / on () b > 2'
        " or absent(sglang:c) and topk(3, d) unless -e offset 5m"
    )
    assert metrics_in(expression) == {"a_bucket", "b", "sglang:c", "d", "e"}
    with pytest.raises(ValueError, match="unexpected"):
        metrics_in("rate(a[5m)")


def test_every_metric_that_dashboard_and_alerts_read_is_on_the_page(shared: Running) -> None:
    names = {name for name in read_by_both() if not name.startswith("sglang:")}
    assert len(names) > 30
    assert names - sample_names(page(shared.url)) == set()


def test_every_metric_of_the_front_end_is_in_the_documentation(shared: Running) -> None:
    text = RUNBOOK.read_text("utf-8")
    ours = {name for name in sample_names(page(shared.url)) if name.startswith("trace_serve_")}
    families = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in ours}
    assert len(families) > 30
    assert {name for name in families if f"`{name}" not in text} == set()


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]\w*)", json.dumps(dashboard))) - {"__rate_interval", "__all"}
    assert used <= variables
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0


def test_counters_are_read_as_rates_and_gauges_are_not(shared: Running) -> None:
    expressions = [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]
    for expression in expressions:
        rates = set(re.findall(r"(?:rate|increase)\(([a-z_:]+)", expression))
        counters = {name for name in metrics_in(expression) if name.endswith(("_total", "_bucket"))}
        assert rates == counters, expression


def test_every_alert_names_its_severity_and_what_to_do() -> None:
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text("utf-8"), re.MULTILINE)
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 15
    assert sections == [rule["alert"] for rule in _in_order(rules, sections)]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))


def _in_order(rules: list[dict[str, Any]], sections: list[str]) -> list[dict[str, Any]]:
    assert {rule["alert"] for rule in rules} == set(sections)
    return sorted(rules, key=lambda rule: sections.index(rule["alert"]))


def test_labels_in_a_summary_are_labels_that_the_expression_keeps() -> None:
    for rule in alerts():
        grouped = re.search(r"sum by \(([^)]*)\)", rule["expr"])
        wanted = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if grouped is not None:
            assert wanted <= set(re.split(r",\s*", grouped[1])), rule["alert"]
