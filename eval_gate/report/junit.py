"""A verdict as JUnit XML: one test case a suite, so that any pipeline shows what failed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from eval_gate.report import drift
from eval_gate.report import format as fmt
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import FlippedQuery, SuiteResult, Verdict

MAX_IDS = 50


def render_junit(verdict: Verdict) -> str:
    """The `testsuites` document that Jenkins and GitLab read.

    BLOCK is a failure and INCONCLUSIVE an error, so that neither looks like success. A case named `gate` carries the
    outcome of the whole, which may have another cause than a suite's gap.
    """
    said = (*verdict.reasons, *verdict.labels, *drift.sentences(verdict))
    cases = [("gate", verdict.outcome, "\n".join(said), verdict.reasons[0])]
    for suite in verdict.suites:
        found = suite.comparison
        message = f"gap {fmt.points(found.gap)} points, interval {fmt.interval(found.lower, found.upper)}"
        cases.append((f"suite {suite.suite}", suite.outcome, _details(suite, verdict.flipped), message))
    failures = sum(outcome is Outcome.BLOCK for _, outcome, _, _ in cases)
    errors = sum(outcome is Outcome.INCONCLUSIVE for _, outcome, _, _ in cases)
    name = verdict.policy_name or verdict.serving_evidence.source
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": str(errors), "time": "0"}
    root = ET.Element("testsuites", {"name": "eval-gate", **counts})
    group = ET.SubElement(
        root,
        "testsuite",
        {"name": _xml(name), **counts, "skipped": "0", "timestamp": f"{verdict.created:%Y-%m-%dT%H:%M:%S}"},
    )
    properties = ET.SubElement(group, "properties")
    for key, value in _properties(verdict).items():
        ET.SubElement(properties, "property", {"name": key, "value": _xml(value)})
    for title, outcome, details, message in cases:
        case = ET.SubElement(group, "testcase", {"name": _xml(title), "classname": "eval_gate", "time": "0"})
        if outcome is Outcome.PASS:
            ET.SubElement(case, "system-out").text = _xml(details)
        else:
            kind = "failure" if outcome is Outcome.BLOCK else "error"
            ET.SubElement(case, kind, {"message": _xml(message), "type": str(outcome)}).text = _xml(details)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _properties(verdict: Verdict) -> dict[str, str]:
    """What was judged, for a reader who has this file alone."""
    digests = {name: value for name, value in verdict.subjects.model_dump().items() if value is not None}
    facts = {
        "recipe_id": verdict.recipe_id,
        "policy_version": verdict.policy_version,
        "expires": f"{verdict.expires:%Y-%m-%dT%H:%M:%SZ}",
        **{f"digest.{name}": value for name, value in digests.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}


def _details(suite: SuiteResult, flipped: Sequence[FlippedQuery]) -> str:
    found = suite.comparison
    lines = [_numbers(suite)]
    for direction, total in (("lost", found.only_training), ("gained", found.only_serving)):
        ids = [flip.id for flip in flipped if flip.suite == suite.suite and flip.direction == direction][:MAX_IDS]
        if ids:
            more = f" and {total - len(ids)} more" if total > len(ids) else ""
            lines.append(f"{direction}: {', '.join(ids)}{more}")
    return "\n".join(lines)


def _numbers(suite: SuiteResult) -> str:
    found = suite.comparison
    return (
        f"{found.scored} of {found.n} queries scored; training {fmt.percent(found.training_pass_rate)}, serving "
        f"{fmt.percent(found.serving_pass_rate)}; gap {fmt.points(found.gap)} points, interval "
        f"{fmt.interval(found.lower, found.upper)}, margin {fmt.points(found.margin)}; "
        f"{found.only_training} lost, {found.only_serving} gained"
    )


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 has no form for."""
    return "".join(
        char
        if char in "\t\n\r" or " " <= char <= "\ud7ff" or "\ue000" <= char <= "\ufffd" or char >= "\U00010000"
        else "\ufffd"
        for char in text
    )
