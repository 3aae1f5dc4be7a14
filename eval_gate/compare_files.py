"""The verdict on results that were recorded before."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from eval_gate.arms.records import Role
from eval_gate.decide import decide, judge
from eval_gate.looks import shuffled
from eval_gate.pairing import ArmResults, ItemSet
from eval_gate.policy import GatePolicy
from eval_gate.recorded import check_covered, check_whole, common_queries, read_arm, without_collection
from eval_gate.suites.named import open_queries
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


def compare_files(training: Path, serving: Path, policy: GatePolicy, queries: str | None = None) -> Verdict:
    """The verdict on two files of recorded results; `policy.repeats` is taken from the files.

    With several looks the queries are taken in the seeded order of a run, and those after the look that decides do not
    count: without that, more looks would mean more chances to err. With `queries`, seed and `max_queries` of a run, its
    looks are those of the run.

    Recorded results show what was answered, not what answered, so unproven arms are allowed and labelled; such a
    verdict is not signed.

    Raises:
        ConfigError: a file cannot be used or is a part of a run without `queries`, or the arms have different
            numbers of samples a query.
    """
    with without_collection():
        return _compared(training, serving, policy, queries)


def _compared(training: Path, serving: Path, policy: GatePolicy, queries: str | None) -> Verdict:
    one, two = read_arm(training, Role.TRAINING), read_arm(serving, Role.SERVING)
    if one.repeats != two.repeats:
        raise ConfigError(
            f"{training} has {one.repeats} samples a query, {serving} has {two.repeats}; expected as many in both",
            field="repeats",
        )
    items: ItemSet
    if queries is None:
        check_whole((one, two))
        found = common_queries(one, two)
        # A file's order may be anything, its easy queries first for one.
        items = replace(found, queries=shuffled(found.queries, policy.sample_seed)[: policy.max_queries])
    else:
        whole = open_queries(queries)
        check_covered(whole, (one, two))
        items = whole.sample(policy.max_queries, policy.sample_seed)
    policy = GatePolicy.build(**policy.model_dump() | {"repeats": one.repeats, "allow_unproven": True})
    arms = ArmResults(one.evidence, one.samples), ArmResults(two.evidence, two.samples)
    looked = next(
        (look for look in range(1, policy.looks) if judge(policy, items, *arms, looked=look).final), policy.looks
    )
    digest = "sha256:" + hashlib.sha256(f"{one.digest} {two.digest}".encode()).hexdigest()
    return decide(policy, items, *arms, results_digest=digest, looked=looked)
