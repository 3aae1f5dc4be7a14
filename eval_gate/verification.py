"""Holds the files that a verdict speaks of against the digests it was signed with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval_gate.signing import authorize
from eval_gate.suites.named import open_all
from eval_gate.verdict import Verdict
from trace_serve.errors import VerdictRefused
from trace_serve.policy.digest import digest_bytes, digest_directory, digest_file
from trace_serve.policy.manifest import load_policy


@dataclass(frozen=True)
class SubjectFiles:
    """Where the subjects of a verdict lie; None and () are not checked.

    Attributes:
        policy: the serving directory, which the verdict must also authorise.
        training: the directory of the training artifact.
        queries: the query file, or all suites and files of the run in its order.
        gate_policy: `gate-policy.json` of the run.
        results: `results.jsonl` of the run.
    """

    policy: Path | None = None
    training: Path | None = None
    queries: tuple[str, ...] = ()
    gate_policy: Path | None = None
    results: Path | None = None


def check_subjects(verdict: Verdict, files: SubjectFiles) -> Iterator[str]:
    """Checks serving directory, training artifact, queries, gate policy and results, in this order.

    Yields:
        one line for each subject that is what was judged.

    Raises:
        VerdictRefused: with the first that is not; `field` is its name among the statement's subjects, and for the
            serving directory also what `signing.authorize` refuses.
        ConfigError: a file or directory cannot be read.
    """
    subjects = verdict.subjects
    if files.policy is not None:
        _compare("serving", files.policy, digest_directory(files.policy), subjects.serving)
        policy = load_policy(files.policy)
        authorize(
            verdict,
            policy_digest=policy.digest,
            recipe_id=policy.recipe_id,
            policy_name=policy.name,
            policy_version=policy.version,
        )
        yield f"authorises {files.policy}"
    if files.training is not None:
        _compare("training", files.training, digest_directory(files.training), subjects.training)
        yield f"training artifact {files.training}"
    if files.queries:
        _compare("queries", " + ".join(files.queries), _queries_digest(files.queries), subjects.queries)
        yield f"queries {' + '.join(files.queries)}"
    if files.gate_policy is not None:
        _compare_policy(verdict, files.gate_policy)
        yield f"gate policy {files.gate_policy}"
    if files.results is not None:
        _compare("results", files.results, digest_file(files.results), subjects.results)
        yield f"results {files.results}"


def _queries_digest(specs: tuple[str, ...]) -> str:
    if len(specs) == 1 and Path(specs[0]).is_file():
        return digest_file(specs[0])
    return open_all(specs).digest


def _compare_policy(verdict: Verdict, path: Path) -> None:
    digest_file(path)  # names a file that cannot be read
    raw = path.read_bytes()
    try:
        stated = json.loads(raw)
    except ValueError:
        stated = None
    if isinstance(stated, dict):
        judged = verdict.policy.model_dump(mode="json")
        for name in sorted({*stated, *judged}):
            if stated.get(name) != judged.get(name) or (name in stated) != (name in judged):
                raise VerdictRefused(
                    f"gate_policy: {path} has {name} {stated.get(name)!r}, the verdict was judged with "
                    f"{judged.get(name)!r}",
                    field="gate_policy",
                )
    _compare("gate_policy", path, digest_bytes(raw), verdict.subjects.gate_policy)


def _compare(name: str, source: Path | str, found: str, judged: str | None) -> None:
    if judged is None:
        raise VerdictRefused(
            f"{name}: the verdict has no digest of it, so {source} cannot be what was judged", field=name
        )
    if found != judged:
        raise VerdictRefused(
            f"{name}: {source} digests to {found}, the verdict is for {judged}; it was changed, or is another",
            field=name,
        )
