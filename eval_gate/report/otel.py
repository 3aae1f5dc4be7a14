"""Grades and verdict as OpenTelemetry events `gen_ai.evaluation.result`, in a file of OTLP JSON lines.

Names: https://github.com/open-telemetry/semantic-conventions-genai (docs/gen-ai/gen-ai-events.md), and `eval_gate.` for
what has none there. A collector reads the file with its OTLP JSON file receiver.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from eval_gate.arms.records import ErrorClass, SampleRecord
from eval_gate.report.text import clipped
from eval_gate.verdict import Verdict
from trace_serve.errors import EXIT_INFRASTRUCTURE, ConfigError

EVENT = "gen_ai.evaluation.result"
NAME = "gen_ai.evaluation.name"
SCORE_VALUE = "gen_ai.evaluation.score.value"
SCORE_LABEL = "gen_ai.evaluation.score.label"
EXPLANATION = "gen_ai.evaluation.explanation"
RESPONSE_ID = "gen_ai.response.id"
ERROR_TYPE = "error.type"

GATE = "eval_gate.verdict"
"""Evaluation name of the event of the whole gate: its score is the gap, its label the outcome."""

JUDGE = "judge"
UNNAMED = "grade"

_BATCH = 512
_MAX_EXPLANATION = 2000
_PACKAGES = ("opentelemetry.sdk._logs", "opentelemetry.exporter.otlp.json.file")


def check_installed() -> None:
    """Are the packages of the extra there?

    Raises:
        ConfigError: naming the extra.
    """
    for package in _PACKAGES:
        try:
            found = find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"--otel: {package} is missing; install trace-serve[otel]", field="otel")


def write_otel(verdict: Verdict, samples: Iterable[SampleRecord], path: Path) -> None:
    """Writes one event for each sample and checker, and one for the gate; the file is whole or not there.

    Args:
        samples: of both arms.

    Raises:
        ConfigError: the packages are missing, or the file cannot be written.
    """
    check_installed()
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.json.file._log_exporter import FileLogExporter
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk._logs.export import LogRecordExportResult
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    version = verdict.tools.get("trace-serve")
    resource = Resource.create({"service.name": "eval-gate", **({"service.version": version} if version else {})})
    scope = InstrumentationScope("eval_gate", version)
    moment = round(verdict.created.timestamp() * 1e9)

    def record(attributes: dict[str, Any]) -> ReadableLogRecord:
        event = LogRecord(
            timestamp=moment,
            observed_timestamp=moment,
            severity_number=SeverityNumber.INFO,
            attributes=attributes,
            event_name=EVENT,
        )
        return ReadableLogRecord(event, resource, scope)

    events = (record(attributes) for attributes in evaluations(verdict, samples))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as handle:
            try:
                exporter = FileLogExporter(stream=handle)
                while batch := list(islice(events, _BATCH)):
                    if exporter.export(batch) is not LogRecordExportResult.SUCCESS:
                        raise ConfigError(
                            f"--otel {path}: cannot be written, or an event has no OTLP form", field="otel"
                        )
                handle.close()
                Path(handle.name).replace(path)
            except BaseException:
                Path(handle.name).unlink(missing_ok=True)
                raise
    except OSError as exc:
        raise ConfigError(f"--otel {path}: cannot be written: {exc.strerror}", field="otel") from exc


def evaluations(verdict: Verdict, samples: Iterable[SampleRecord]) -> Iterator[dict[str, Any]]:
    """Attributes of every event, the gate's first."""
    yield _gate(verdict)
    for sample in samples:
        common = _common(sample)
        for found in _grades(sample):
            yield {name: value for name, value in (common | found).items() if value is not None}


def _gate(verdict: Verdict) -> dict[str, Any]:
    found = verdict.overall
    attributes = {
        NAME: GATE,
        SCORE_VALUE: found.gap,
        SCORE_LABEL: str(verdict.outcome),
        EXPLANATION: clipped("; ".join((*verdict.reasons, *verdict.labels)), _MAX_EXPLANATION),
        ERROR_TYPE: verdict.cause if verdict.exit_code == EXIT_INFRASTRUCTURE else None,
        "eval_gate.gap.lower": found.lower,
        "eval_gate.gap.upper": found.upper,
        "eval_gate.margin": found.margin,
        "eval_gate.policy.name": verdict.policy_name,
        "eval_gate.policy.version": verdict.policy_version,
        "eval_gate.recipe_id": verdict.recipe_id,
        **{f"eval_gate.digest.{name}": value for name, value in verdict.subjects.model_dump().items()},
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _common(sample: SampleRecord) -> dict[str, Any]:
    response = sample.response.get("id") if isinstance(sample.response, dict) else None
    return {
        RESPONSE_ID: response if isinstance(response, str) else None,
        "eval_gate.arm": str(sample.role),
        "eval_gate.query.id": sample.query_id,
        "eval_gate.sample": sample.sample,
        "eval_gate.suite": sample.suite,
        "eval_gate.kind": sample.kind,
    }


def _grades(sample: SampleRecord) -> list[dict[str, Any]]:
    """The program's grade, and the judge's where one was asked."""
    program = sample.checker or UNNAMED
    failure = sample.failure
    extracted = None if sample.extracted is None else f"extracted {sample.extracted!r}"
    if failure is not None and failure.kind is ErrorClass.JUDGE:
        return [_score(program, True, extracted), _error(JUDGE, failure.kind, failure.message)]
    if failure is not None or sample.passed is None:
        kind, message = (failure.kind, failure.message) if failure else (ErrorClass.MISSING, "no grade")
        return [_error(program, kind, message)]
    if sample.judgement is not None:
        return [_score(program, True, extracted), _score(JUDGE, sample.judgement.passed, sample.judgement.text)]
    return [_score(program, sample.passed, extracted)]


def _score(name: str, passed: bool, explanation: str | None) -> dict[str, Any]:
    label = "pass" if passed else "fail"
    said = None if explanation is None else clipped(explanation, _MAX_EXPLANATION)
    return {NAME: name, SCORE_VALUE: float(passed), SCORE_LABEL: label, EXPLANATION: said}


def _error(name: str, kind: ErrorClass, message: str) -> dict[str, Any]:
    return {NAME: name, ERROR_TYPE: str(kind), EXPLANATION: clipped(message, _MAX_EXPLANATION)}
