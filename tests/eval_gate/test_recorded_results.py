"""`compare`, `plan`, `aa` and `report` on the command line."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.cli import main
from eval_gate.policy import GatePolicy
from eval_gate.run import ArmConfig, GateConfig, run_gate

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eval-gate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Iterable[dict[str, Any]]], Path]:
    def to(name: str, records: Iterable[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return to


Write = Callable[[str, Iterable[dict[str, Any]]], Path]


def rows(count: int, wrong: Callable[[int], bool] = lambda i: False, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "passed": not wrong(i), **fields} for i in range(count)]


def test_results_of_any_program_are_judged_as_a_run_is(call: Call, write: Write) -> None:
    a, b = write("a.jsonl", rows(300)), write("b.jsonl", rows(300, lambda i: i % 5 == 0))
    code, out, _ = call("compare", a, b, "--json")
    verdict = json.loads(out)
    assert (code, verdict["outcome"], verdict["overall"]["only_training"]) == (1, "BLOCK", 60)
    assert call("compare", a, a)[0] == 0


def test_recorded_results_are_labelled_as_unproven(call: Call, write: Write) -> None:
    path = write("a.jsonl", rows(300))
    _, out, _ = call("compare", path, path)
    assert "unproven arms allowed" in " ".join(out.split())


def test_suites_and_clusters_come_with_the_results_and_every_suite_must_pass(call: Call, write: Write) -> None:
    easy, hard = rows(300, suite="easy"), [{**row, "id": "h" + row["id"], "suite": "hard"} for row in rows(300)]
    lost = [{**row, "passed": index % 4 != 0} for index, row in enumerate(hard)]
    code, out, _ = call("compare", write("a.jsonl", easy + hard), write("b.jsonl", easy + lost), "--json")
    suites = {suite["suite"]: suite for suite in json.loads(out)["suites"]}
    assert code == 1
    assert (suites["easy"]["outcome"], suites["hard"]["outcome"]) == ("PASS", "BLOCK")
    assert suites["hard"]["block_level"] == pytest.approx(0.025)
    one = {"cluster": "c"}
    path = write("c.jsonl", [{**row, **one} for row in rows(300)])
    assert call("compare", path, path)[0] == 2


def test_chance_in_one_of_many_suites_does_not_block(call: Call, write: Write) -> None:
    a = [{**row, "id": f"{suite}{row['id']}", "suite": suite} for suite in "abcdefghij" for row in rows(100)]
    b = [{**row, "passed": not (row["suite"] == "a" and int(row["id"][2:]) < 11)} for row in a]
    alone = [row for row in a if row["suite"] == "a"], [row for row in b if row["suite"] == "a"]
    assert call("compare", write("a.jsonl", alone[0]), write("b.jsonl", alone[1]))[0] == 1
    assert call("compare", write("a.jsonl", a), write("b.jsonl", b))[0] == 2


def test_a_relative_margin_is_a_share_of_the_training_pass_rate(call: Call, write: Write) -> None:
    a, b = write("a.jsonl", rows(1000, lambda i: i >= 400)), write("b.jsonl", rows(1000, lambda i: i >= 400 or i < 24))
    assert call("compare", a, b, "--margin", "0.04")[0] == 0
    code, out, _ = call("compare", a, b, "--margin", "0.04", "--margin-kind", "relative", "--json")
    verdict = json.loads(out)
    assert code == 1
    assert verdict["overall"]["margin"] == pytest.approx(0.016)
    assert "4% of the training pass rate (1.6 points)" in verdict["reasons"][0]


def test_repeats_make_a_fixed_set_claim_possible(call: Call, write: Write) -> None:
    path = write("a.jsonl", [{**row, "sample": k} for row in rows(100) for k in range(2)])
    code, out, _ = call("compare", path, path, "--mode", "fixed-set", "--json")
    assert (code, json.loads(out)["policy"]["repeats"]) == (0, 2)
    code, _, errors = call("compare", write("b.jsonl", rows(10)), path)
    assert (code, errors.count("\n")) == (3, 1)
    assert "expected as many in both" in errors


def test_a_query_of_one_file_only_is_never_dropped(call: Call, write: Write) -> None:
    code, out, _ = call("compare", write("a.jsonl", rows(100)), write("b.jsonl", rows(90)), "--json")
    assert (code, json.loads(out)["serving"]["unscored"]) == (4, {"missing": 10})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "got list, expected a JSON object"),
        ('{"passed": true}', "id None"),
        ('{"id": "a", "passed": 1}', "passed 1, expected true, false or null"),
        ('{"id": "q0", "passed": true}', "sample 0 of 'q0' is already on line 1"),
        ('{"id": "a", "passed": true, "sample": -1}', "sample -1"),
        ('{"id": "a", "passed": true, "suite": 3}', "suite 3, expected a string"),
        ('{"record": "sample", "role": "judge", "query_id": "a"}', "role 'judge'"),
    ],
)
def test_a_faulty_line_is_named(call: Call, write: Write, line: str, message: str) -> None:
    good, bad = write("a.jsonl", rows(3)), write("b.jsonl", rows(3))
    bad.write_text(bad.read_text() + line + "\n")
    code, _, errors = call("compare", good, bad)
    assert (code, errors.count("\n")) == (3, 1)
    assert f"{bad}:4" in errors
    assert message in errors


def test_files_that_disagree_about_a_suite_are_refused(call: Call, write: Write) -> None:
    code, _, errors = call("compare", write("a.jsonl", rows(9, suite="x")), write("b.jsonl", rows(9, suite="y")))
    assert code == 3
    assert "query 'q0': suite 'x'" in errors


def test_several_looks_stop_in_seeded_order_and_leave_later_queries_out(call: Call, write: Write) -> None:
    a, b = write("a.jsonl", rows(800)), write("b.jsonl", rows(800, lambda i: i % 4 == 0))
    code, out, _ = call("compare", a, b, "--looks", "4", "--spending", "pocock", "--json")
    verdict = json.loads(out)
    assert (code, verdict["looks"][-1]["look"], verdict["overall"]["n"]) == (1, 1, 200)
    # The file's first 200 lines are right in both: its order must not decide.
    b = write("c.jsonl", rows(800, lambda i: i >= 200))
    code, out, _ = call("compare", a, b, "--looks", "4", "--json", "--seed", "3")
    verdict = json.loads(out)
    assert (code, verdict["looks"][0]["outcome"]) == (1, "BLOCK")
    assert 0.6 < verdict["overall"]["gap"] < 0.9
    code, _, errors = call("compare", a, b, "--looks", "4", "--rule", "point")
    assert (code, "looks of more than 1 need --rule ci" in errors) == (3, True)


def test_plan_gives_the_published_sizes(call: Call) -> None:
    _, out, _ = call("plan", "--margin", "0.02", "--discordance", "0.1", "--tokens-per-sample", "100", "--json")
    (only,) = json.loads(out)["plans"]
    assert (only["queries"], only["requests"], only["tokens"]) == (1546, 3092, 309_200)
    _, out, _ = call("plan", "--margin", "0.02", "--looks", "4", "--json")
    (only,) = json.loads(out)["plans"]
    assert only["expected_queries"] < 1546 < only["queries"]


def test_plan_weighs_repeats_by_a_pilot(call: Call, write: Write) -> None:
    common = {"record": "sample", "key": "k", "request": {}, "prompt_tokens": 10, "completion_tokens": 5}
    pilot = write(
        "pilot.jsonl",
        [
            {**common, "query_id": f"q{i}", "role": role, "sample": k, "passed": (i * 7 + k * 3 + shift) % 10 < 6}
            for i in range(200)
            for k in range(4)
            for shift, role in ((0, "training"), (1, "serving"))
        ],
    )
    _, out, _ = call("plan", "--pilot", pilot, "--json")
    found = json.loads(out)
    assert [plan["repeats"] for plan in found["plans"]] == [1, 2, 4, 8]
    assert [plan["queries"] for plan in found["plans"]] == sorted((p["queries"] for p in found["plans"]), reverse=True)
    assert found["plans"][0]["tokens"] == found["plans"][0]["requests"] * 15
    code, _, errors = call(
        "plan", "--pilot", write("half.jsonl", [{**common, "query_id": "q", "role": "serving", "sample": 0}])
    )
    assert code == 3
    assert "samples of the training arm" in errors


def test_plan_of_a_relative_margin_is_that_of_its_points_for_the_weighted_difference(call: Call) -> None:
    relative = ("plan", "--margin-kind", "relative", "--margin", "0.05", "--json")
    code, out, _ = call(*relative, "--pass-rate", "0.4", "--discordance", "0.1")
    found = json.loads(out)
    # 0.95 a - b over 35% of 1|1, 5% of 1|0 and 5% of 0|1, whose mean is -0.02.
    variance = 0.05**2 * 0.35 + 0.95**2 * 0.05 + 0.05 - 0.02**2
    assert found["variances"]["default"]["between"] == pytest.approx(variance)
    assert (code, found["plans"][0]["queries"]) == (0, math.ceil(2.486475**2 * variance / 0.02**2))
    points = json.loads(call("plan", "--margin", "0.02", "--json")[1])["plans"][0]["queries"]
    assert abs(found["plans"][0]["queries"] / points - 1) < 0.1
    code, _, errors = call(*relative)
    assert (code, errors.count("\n"), "--pass-rate" in errors) == (3, 1, True)
    assert "--pass-rate 0.99" in call(*relative, "--pass-rate", "0.99")[2]
    assert "less than the margin of 0.02" in call(*relative, "--pass-rate", "0.4", "--expected-gap", "0.03")[2]


def test_plan_of_several_suites_asks_each_to_pass_more_surely(call: Call) -> None:
    alone = json.loads(call("plan", "--margin", "0.02", "--json")[1])["plans"][0]
    found = json.loads(call("plan", "--margin", "0.02", "--suites", "4", "--looks", "3", "--json")[1])
    (plan,) = found["plans"]
    assert found["suite_power"] == pytest.approx(0.95)
    assert len(set(plan["suites"].values())) == 1
    assert plan["queries"] == sum(plan["suites"].values()) > 4 * alone["queries"]
    assert plan["expected_queries"] < plan["queries"]


def test_plan_takes_each_suite_of_a_pilot_by_its_own_variance(call: Call, write: Write) -> None:
    common = {"record": "sample", "key": "k", "request": {}, "sample": 0, "prompt_tokens": 10, "completion_tokens": 5}
    pilot = write(
        "pilot.jsonl",
        [
            {**common, "query_id": f"{suite}{i}", "suite": suite, "role": role, "passed": i % every >= wrong}
            for suite, every in (("calm", 50), ("noisy", 5))
            for i in range(200)
            for wrong, role in ((0, "training"), (1, "serving"))
        ],
    )
    options = ("--pilot", pilot, "--margin", "0.3", "--expected-gap", "0.2")
    code, out, _ = call("plan", *options, "--json")
    (plan,) = json.loads(out)["plans"]
    assert code == 0
    assert plan["suites"]["noisy"] > 2 * plan["suites"]["calm"]
    shown = " ".join(call("plan", *options)[1].split())
    assert f"calm {plan['suites']['calm']}, noisy {plan['suites']['noisy']}" in shown
    assert "2 suites, each planned for 0.9" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--margin", "0"), "--margin"),
        (("--power", "1"), "--power"),
        (("--expected-gap", "0.05"), "--expected-gap"),
        (("--discordance", "2"), "--discordance"),
        (("--pilot", "/none.jsonl"), "/none.jsonl"),
    ],
)
def test_plans_that_cannot_be_made_say_why(call: Call, options: tuple[str, ...], message: str) -> None:
    code, _, errors = call("plan", *options)
    assert (code, errors.count("\n")) == (3, 1)
    assert message in errors


def test_an_arm_against_itself_shows_its_noise(call: Call, start_server: Callable[[], Any], tmp_path: Path) -> None:
    server = start_server()
    seen: dict[str, int] = {}

    def answer(prompt: str) -> str:
        seen[prompt] = seen.get(prompt, 0) + 1
        number = int(prompt.split()[0])
        if seen[prompt] > 1 and number % 10 == 0:
            return "wrong"
        return f"{number}." if seen[prompt] > 1 and number % 10 == 1 else f"{number}"

    server.answer = answer
    path = tmp_path / "q.jsonl"
    lines = [{"id": f"q{i}", "prompt": f"{i} ?", "checker": {"type": "numeric", "expected": i}} for i in range(100)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = call("aa", "--arm", server.url, "--queries", path, "--out", tmp_path / "aa", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["queries"], found["grades_differ"], found["texts_differ"]) == (100, 10, 20)
    assert found["gap"] == pytest.approx(0.10)
    assert sorted(found["differing"], key=lambda name: int(name[1:])) == [f"q{i}" for i in range(0, 100, 10)]
    assert len(server.prompts) == 200
    # What lies there is not a verdict on a release.
    assert {item.name for item in (tmp_path / "aa").iterdir()} >= {"noise.json", "results.jsonl"}
    assert not (tmp_path / "aa" / "verdict.json").exists()


def test_report_gives_every_form_of_a_verdict(call: Call, write: Write, tmp_path: Path) -> None:
    a, b = write("a.jsonl", rows(300)), write("b.jsonl", rows(300, lambda i: i % 5 == 0))
    assert call("compare", a, b, "--out", tmp_path / "out")[0] == 1
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert json.loads(call("report", tmp_path / "out", "--json")[1]) == verdict
    assert "BLOCK" in call("report", tmp_path / "out")[1]
    assert call("report", tmp_path / "out", "--format", "markdown")[1].startswith("## BLOCK")
    assert call("report", tmp_path / "out", "--format", "html")[1] == (tmp_path / "out" / "report.html").read_text()
    code, _, _ = call("report", tmp_path / "out" / "verdict.json", "--format", "junit", "--out", tmp_path / "j.xml")
    assert code == 0
    assert ET.parse(tmp_path / "j.xml").getroot().tag == "testsuites"
    code, _, errors = call("report", tmp_path)
    assert (code, errors.count("\n")) == (3, 1)
    (tmp_path / "verdict.json").write_text("{}")
    assert "not a verdict" in call("report", tmp_path)[2]


def test_a_runs_own_results_are_compared_to_the_same_numbers(
    call: Call, start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    one, two = start_server(), start_server()
    one.report, two.report = engine_report("bf16"), engine_report("fp4")
    one.answer = lambda prompt: prompt
    two.answer = lambda prompt: "no" if int(prompt) % 9 == 0 else prompt
    path = tmp_path / "q.jsonl"
    lines = [{"id": f"q{i}", "prompt": f"{i}", "checker": {"type": "numeric", "expected": i}} for i in range(90)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = GateConfig(ArmConfig(one.url), ArmConfig(two.url), str(path), tmp_path / "out", GatePolicy(margin=0.02))
    ran = run_gate(config).verdict
    results = tmp_path / "out" / "results.jsonl"
    _, out, _ = call("compare", results, results, "--margin", "0.02", "--json")
    again = json.loads(out)
    assert (again["outcome"], again["overall"]) == (ran.outcome, ran.overall.model_dump())
    assert again["serving_evidence"]["report"]["mode"] == "fp4"
    assert len(again["flipped"]) == 10


def test_a_run_that_stopped_at_a_look_is_compared_by_its_own_looks_or_not_at_all(
    call: Call, start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    one, two = start_server(), start_server()
    one.report, two.report = engine_report("bf16"), engine_report("fp4")
    one.answer = lambda prompt: prompt
    two.answer = lambda prompt: "no" if int(prompt) % 3 == 0 else prompt
    path = tmp_path / "q.jsonl"
    lines = [
        {
            "id": f"q{i}",
            "suite": f"s{i % 2}",
            "cluster": f"c{i // 4}",
            "prompt": f"{i}",
            "checker": {"type": "numeric", "expected": i},
        }
        for i in range(400)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy = GatePolicy(looks=4, spending="pocock", sample_seed=5, max_queries=320)
    ran = run_gate(GateConfig(ArmConfig(one.url), ArmConfig(two.url), str(path), tmp_path / "out", policy)).verdict
    assert len(ran.looks) < 4
    results = tmp_path / "out" / "results.jsonl"
    code, _, errors = call("compare", results, results)
    assert (code, errors.count("\n")) == (3, 1)
    assert "its run planned 320" in errors
    options = ("--queries", path, "--looks", "4", "--spending", "pocock", "--seed", "5", "--max-queries", "320")
    again = json.loads(call("compare", results, results, *options, "--json")[1])
    assert again["looks"] == json.loads(ran.model_dump_json())["looks"]
    assert (again["outcome"], again["overall"]) == (ran.outcome, ran.overall.model_dump())


def test_results_of_a_run_keep_suites_and_clusters_without_the_query_file(
    call: Call, start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    server = start_server()
    path = tmp_path / "q.jsonl"
    lines = [
        {
            "id": f"q{i}",
            "suite": f"s{i % 2}",
            "kind": "sums",
            "cluster": f"c{i // 4}",
            "prompt": f"{i}",
            "checker": {"type": "numeric", "expected": i},
        }
        for i in range(80)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy = GatePolicy(allow_unproven=True, margin=0.2)
    ran = run_gate(GateConfig(ArmConfig(server.url), ArmConfig(server.url), str(path), tmp_path / "out", policy))
    again = json.loads(call("compare", ran.paths.results, ran.paths.results, "--margin", "0.2", "--json")[1])
    assert [suite["suite"] for suite in again["suites"]] == ["s0", "s1"]
    assert list(again["kinds"]) == ["sums"]
    assert "by cluster" in again["method"]
    assert again["overall"] == ran.verdict.overall.model_dump()
