"""Looking at the data several times: which queries belong to a look, and runs that stop early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.looks import schedule
from eval_gate.policy import GatePolicy
from eval_gate.queries import Query
from eval_gate.run import ArmConfig, GateConfig, run_gate
from eval_gate.stats.rule import Outcome
from trace_serve.errors import ConfigError


def queries(count: int, **fields: Callable[[int], str]) -> list[Query]:
    return [
        Query.model_validate(
            {"id": f"q{i}", "prompt": str(i), "checker": {"type": "exact", "expected": "x"}}
            | {name: value(i) for name, value in fields.items()}
        )
        for i in range(count)
    ]


def test_looks_split_every_suite_evenly_and_keep_every_query() -> None:
    given = queries(90, suite=lambda i: "small" if i % 3 == 0 else "large")
    parts = schedule(given, 3)
    assert sorted(query.id for part in parts for query in part) == sorted(query.id for query in given)
    for part in parts:
        assert [sum(query.suite == suite for query in part) for suite in ("small", "large")] == [10, 20]


def test_a_cluster_is_never_split_between_looks() -> None:
    parts = schedule(queries(100, cluster=lambda i: f"c{i % 7}"), 4)
    homes = [{query.cluster for query in part} for part in parts]
    assert sum(len(home) for home in homes) == 7


def test_a_suite_with_fewer_queries_than_looks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="suite tiny has 2 independent queries") as caught:
        schedule(queries(42, suite=lambda i: "tiny" if i < 2 else "rest"), 3)
    assert caught.value.field == "looks"


@pytest.mark.parametrize("changes", [{"rule": "point"}, {"mode": "fixed-set", "repeats": 2}])
def test_looks_need_a_rule_and_a_mode_that_allow_them(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="looks of more than 1 need"):
        GatePolicy.build(looks=2, **changes)


class Run:
    """Two servers and 200 queries; `wrong` says which of them the serving arm misses."""

    def __init__(self, start: Callable[[], Any], report: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
        self.training, self.serving = start(), start()
        self.training.report, self.serving.report = report("bf16"), report("fp4")
        self.tmp_path = tmp_path
        lines = [
            {"id": f"q{i}", "prompt": f"{i} ?", "max_tokens": 9, "checker": {"type": "numeric", "expected": i}}
            for i in range(200)
        ]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.wrong: Callable[[int], bool] = lambda number: False
        self.training.answer = lambda prompt: prompt.split()[0]
        self.serving.answer = lambda prompt: "none" if self.wrong(int(prompt.split()[0])) else prompt.split()[0]

    def verdict(self, **policy: Any) -> Any:
        config = GateConfig(
            ArmConfig(self.training.url),
            ArmConfig(self.serving.url),
            str(self.tmp_path / "q.jsonl"),
            self.tmp_path / "out",
            GatePolicy(**policy),
        )
        return run_gate(config).verdict


@pytest.fixture
def gate(start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path) -> Run:
    return Run(start_server, engine_report, tmp_path)


def test_a_clear_loss_stops_both_arms_after_the_first_look(gate: Run) -> None:
    gate.wrong = lambda number: number % 2 == 0
    verdict = gate.verdict(looks=4, spending="pocock")
    assert (verdict.outcome, verdict.exit_code) == (Outcome.BLOCK, 1)
    assert [(look.look, look.queries, look.planned, look.outcome) for look in verdict.looks] == [
        (1, 50, 200, Outcome.BLOCK)
    ]
    assert len(gate.training.prompts) == len(gate.serving.prompts) == 50
    assert verdict.serving.unscored == {}
    assert any("stopped at look 1 of 4, after 50 of 200 queries" in label for label in verdict.labels)


def test_equal_arms_pass_before_the_end(gate: Run) -> None:
    verdict = gate.verdict(looks=2, spending="pocock")
    assert verdict.outcome is Outcome.PASS
    assert [look.outcome for look in verdict.looks] == [Outcome.PASS]
    assert verdict.overall.n == 100


def test_an_unclear_case_uses_every_look_at_less_than_alpha_each(gate: Run) -> None:
    gate.wrong = lambda number: number % 20 == 0
    verdict = gate.verdict(looks=4)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert [look.queries for look in verdict.looks] == [50, 100, 150, 200]
    levels = [look.suites[0].level for look in verdict.looks]
    assert levels == sorted(levels)
    assert levels[-1] < 0.05
    assert len(gate.serving.prompts) == 200
    assert not any("stopped" in label for label in verdict.labels)


def test_lasting_errors_in_a_look_count_against_it(gate: Run) -> None:
    for number in range(200):
        gate.serving.faults[f"{number} ?"] = [400]
    verdict = gate.verdict(looks=4)
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "errors")
    assert verdict.serving.unscored == {"http_4xx": 200}


def test_a_refused_serving_arm_is_asked_nothing(gate: Run, engine_report: Callable[..., dict[str, Any]]) -> None:
    gate.serving.report = engine_report("bf16")
    assert gate.verdict(looks=4).cause == "unproven"
    assert gate.serving.prompts == gate.training.prompts == []
