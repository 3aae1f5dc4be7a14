"""The grades of a run as OpenTelemetry events, read back from the file as a collector would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto_json.logs.v1.logs import LogsData
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes

from eval_gate.arms.records import ErrorClass, Failure, Judgement, Role, SampleRecord
from eval_gate.commands.report import Format, report
from eval_gate.report import otel
from eval_gate.run import ArmConfig, GateConfig, run_gate
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


def events(path: Path) -> list[dict[str, Any]]:
    """Attributes of every record, after each line was read by the protocol's own types."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        assert LogsData.from_json(line).resource_logs
        for resource in json.loads(line)["resourceLogs"]:
            named = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
            assert named["service.name"] == {"stringValue": "eval-gate"}
            for record in (record for scope in resource["scopeLogs"] for record in scope["logRecords"]):
                assert record["eventName"] == "gen_ai.evaluation.result"
                assert int(record["timeUnixNano"]) > 1_700_000_000 * 10**9
                found.append({one["key"]: next(iter(one["value"].values())) for one in record["attributes"]})
    return found


def sample(**changes: Any) -> SampleRecord:
    values = {"key": "k", "query_id": "q1", "role": Role.SERVING, "sample": 0, "request": {}, "checker": "exact"}
    return SampleRecord(**(values | {"text": "no", "passed": False, "attempts": 1} | changes))


def test_the_names_are_those_of_the_convention() -> None:
    assert otel.NAME == gen_ai_attributes.GEN_AI_EVALUATION_NAME
    assert otel.SCORE_VALUE == gen_ai_attributes.GEN_AI_EVALUATION_SCORE_VALUE
    assert otel.SCORE_LABEL == gen_ai_attributes.GEN_AI_EVALUATION_SCORE_LABEL
    assert otel.EXPLANATION == gen_ai_attributes.GEN_AI_EVALUATION_EXPLANATION
    assert otel.RESPONSE_ID == gen_ai_attributes.GEN_AI_RESPONSE_ID
    assert otel.ERROR_TYPE == error_attributes.ERROR_TYPE


def test_a_run_writes_an_event_a_sample_and_one_for_the_gate(
    start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    training, serving = start_server(), start_server()
    training.report, serving.report = engine_report("bf16"), engine_report("fp4")
    training.answer = lambda prompt: prompt.split()[0]
    serving.answer = lambda prompt: {
        "id": f"cmpl-{prompt.split()[0]}",
        "choices": [{"message": {"content": "7"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1},
    }
    checker = {"type": "numeric"}
    lines = [
        {"id": f"q{i}", "kind": "k", "suite": "s", "prompt": f"{i} is?", "checker": checker | {"expected": i}}
        for i in range(60)
    ]
    queries = tmp_path / "q.jsonl"
    queries.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    config = GateConfig(
        ArmConfig(training.url), ArmConfig(serving.url), str(queries), out, otel=tmp_path / "deep" / "events.jsonl"
    )
    verdict = run_gate(config).verdict
    gate, *grades = events(tmp_path / "deep" / "events.jsonl")
    assert gate["gen_ai.evaluation.name"] == "eval_gate.verdict"
    assert gate["gen_ai.evaluation.score.label"] == "BLOCK"
    assert gate["gen_ai.evaluation.score.value"] == verdict.overall.gap
    assert verdict.reasons[0] in gate["gen_ai.evaluation.explanation"]
    assert gate["eval_gate.digest.results"] == verdict.subjects.results
    assert len(grades) == 120
    assert {grade["gen_ai.evaluation.name"] for grade in grades} == {"numeric"}
    (seven,) = (g for g in grades if g["eval_gate.query.id"] == "q7" and g["eval_gate.arm"] == "serving")
    assert seven == {
        "gen_ai.evaluation.name": "numeric",
        "gen_ai.evaluation.score.value": 1.0,
        "gen_ai.evaluation.score.label": "pass",
        "gen_ai.evaluation.explanation": "extracted '7'",
        "gen_ai.response.id": "cmpl-7",
        "eval_gate.arm": "serving",
        "eval_gate.query.id": "q7",
        "eval_gate.sample": "0",
        "eval_gate.suite": "s",
        "eval_gate.kind": "k",
    }
    labels = Counter((g["eval_gate.arm"], g["gen_ai.evaluation.score.label"]) for g in grades)
    assert labels == {("training", "pass"): 60, ("serving", "pass"): 1, ("serving", "fail"): 59}
    report(out, Format.OTEL, tmp_path / "again.jsonl")
    assert events(tmp_path / "again.jsonl") == [gate, *grades]
    (out / "results.jsonl").write_text((out / "results.jsonl").read_text() + "\n")
    with pytest.raises(ConfigError, match="not the results of this verdict"):
        report(out, Format.OTEL, tmp_path / "third.jsonl")
    assert not (tmp_path / "third.jsonl").exists()


def test_a_judge_is_an_evaluation_of_its_own(verdict: Verdict, tmp_path: Path) -> None:
    judgement = Judgement(key="j", passed=False, text="too short")
    pending = Failure(kind=ErrorClass.JUDGE, message="judge: no answer")
    otel.write_otel(
        verdict,
        [sample(judgement=judgement), sample(passed=None, failure=pending), sample(extracted="no")],
        tmp_path / "o.jsonl",
    )
    found = [
        tuple(event.get(name) for name in (otel.NAME, otel.SCORE_LABEL, otel.EXPLANATION, otel.ERROR_TYPE))
        for event in events(tmp_path / "o.jsonl")[1:]
    ]
    assert found == [
        ("exact", "pass", None, None),
        ("judge", "fail", "too short", None),
        ("exact", "pass", None, None),
        ("judge", None, "judge: no answer", "judge"),
        ("exact", "fail", "extracted 'no'", None),
    ]


def test_a_sample_without_a_grade_has_an_error_and_no_score(verdict: Verdict, tmp_path: Path) -> None:
    failure = Failure(kind=ErrorClass.TIMEOUT, message="no complete answer in 5 s")
    otel.write_otel(verdict, [sample(text=None, passed=None, failure=failure, checker=None)], tmp_path / "o.jsonl")
    (_, event) = events(tmp_path / "o.jsonl")
    assert event[otel.ERROR_TYPE] == "timeout"
    assert event[otel.NAME] == "grade"
    assert event[otel.EXPLANATION] == "no complete answer in 5 s"
    assert otel.SCORE_VALUE not in event
    assert otel.SCORE_LABEL not in event


def test_many_samples_are_several_lines_and_hostile_text_stays_text(verdict: Verdict, tmp_path: Path) -> None:
    hostile = 'line\nbreak "quote" \x1b[31m \u2028 \U0001f600' + "x" * 5000
    samples = [sample(query_id=f"q{i}", extracted=hostile) for i in range(1500)]
    otel.write_otel(verdict, samples, tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_text().count("\n") == 3
    found = events(tmp_path / "o.jsonl")
    assert len(found) == 1501
    assert found[1][otel.EXPLANATION].startswith("extracted 'line\\nbreak")
    assert len(found[1][otel.EXPLANATION]) == 2000


def test_a_file_that_cannot_be_written_leaves_nothing(verdict: Verdict, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        otel.write_otel(verdict, [], tmp_path / "taken" / "o.jsonl")
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        otel.write_otel(verdict, [], tmp_path / "directory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "taken"]


def test_without_the_extra_a_run_ends_before_anything_is_asked_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"id": "a", "prompt": "p", "checker": {"type": "exact", "expected": "x"}}\n')
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; "
        f"sys.argv = ['eval-gate', 'run', '--training', 'http://127.0.0.1:9', '--serving', 'http://127.0.0.1:9', "
        f"'--queries', {str(tmp_path / 'q.jsonl')!r}, '--out', {str(tmp_path / 'out')!r}, "
        f"'--otel', {str(tmp_path / 'o.jsonl')!r}]; from eval_gate.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "install trace-serve[otel]" in done.stderr
    assert not (tmp_path / "out").exists()
