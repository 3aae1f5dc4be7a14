"""From everything that was gathered to results, verdict, reports and signature."""

from __future__ import annotations

from collections.abc import Iterable

from eval_gate.arms.records import ArmRecord, Role, SampleRecord, write_atomic, write_results
from eval_gate.config import GateConfig
from eval_gate.decide import decide
from eval_gate.output import GatePaths, GateResult
from eval_gate.pairing import ArmResults
from eval_gate.queries import QuerySet
from eval_gate.report.otel import write_otel
from eval_gate.report.write import write_reports
from eval_gate.signing import sign_verdict


def conclude(
    config: GateConfig,
    queries: QuerySet,
    training: ArmResults,
    serving: ArmResults,
    paths: GatePaths,
    *,
    looked: int | None = None,
) -> GateResult:
    """Writes the final results, decides, and writes verdict, envelope and reports.

    `looked` is the number of looks taken; None is all that the policy plans.
    """
    planned = len(queries.queries)
    records: Iterable[SampleRecord | ArmRecord] = [
        ArmRecord(role=Role.TRAINING, evidence=training.evidence, planned=planned),
        *training.samples,
        ArmRecord(role=Role.SERVING, evidence=serving.evidence, planned=planned),
        *serving.samples,
    ]
    digest = write_results(paths.results, records)
    verdict = decide(config.policy, queries, training, serving, results_digest=digest, looked=looked)
    write_reports(verdict, config.out)
    write_atomic(paths.gate_policy, config.policy.canonical)
    if config.otel is not None:
        write_otel(verdict, (*training.samples, *serving.samples), config.otel)
    if config.key is not None and paths.envelope is not None:
        sign_verdict(verdict, config.key, paths.envelope)
    return GateResult(verdict, paths)
