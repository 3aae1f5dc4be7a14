"""Decides whether a policy may be served, before any engine starts. Fails closed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from eval_gate import signing
from trace_serve.errors import ConfigError, EngineError, VerdictRefused
from trace_serve.policy.digest import digest_bytes, digest_directory
from trace_serve.policy.manifest import Policy, load_policy
from trace_serve.recipe import Recipe
from trace_serve.settings import Mode


@dataclass(frozen=True)
class Authorization:
    """A policy that may be served.

    Attributes:
        path: the policy directory.
        name, version: from its manifest.
        recipe: the numeric choices it is served under.
        digest: of the directory as it is on disk now, recomputed.
        mode: `rollout` or `production`.
        verdict_id: the verdict that let it in; None in rollout mode.
        hints: whether clients may ask for rounding hints.
        verdict_expires: until when the verdict holds; None in rollout mode.
        interchange_id: the same for two policies whose weights one running engine can exchange: architecture, recipe,
            tokenizer, chat template and sampling defaults. Empty when unknown: then they are not exchanged.
    """

    path: Path
    name: str
    version: str
    recipe: Recipe
    digest: str
    mode: Mode
    verdict_id: str | None = None
    hints: bool = False
    verdict_expires: datetime | None = None
    interchange_id: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    def summary(self) -> dict[str, Any]:
        """What `/trace/report` adds to the engine's report."""
        policy = {"name": self.name, "version": self.version, "digest": self.digest}
        return {"policy": policy, "verdict_id": self.verdict_id, "serving_mode": self.mode}

    def describe(self, gauge: Gauge) -> None:
        verdict = self.verdict_id or ""
        gauge.labels(self.name, self.version, self.digest, self.recipe.recipe_id, verdict, self.mode).set(1)

    def check_report(self, report: dict[str, Any]) -> None:
        """Compares what the engine says it loaded with what was authorised.

        Raises:
            EngineError: another recipe or other files.
        """
        expected = {"recipe_id": self.recipe.recipe_id, "policy_digest": self.digest}
        for key, value in expected.items():
            if report.get(key) != value:
                raise EngineError(f"the engine reports {key} {report.get(key)!r}, expected {value!r}; it is not served")


def authorize_policy(
    path: Path,
    *,
    mode: Mode,
    verdict: Path | None = None,
    public_key: Path | None = None,
    hints: bool = False,
    digest: Callable[[Path], str] = digest_directory,
) -> Authorization:
    """Reads a policy, recomputes its digest and, in production mode, checks the signed verdict against both.

    Args:
        path: the policy directory.
        mode: `rollout` needs no verdict; `production` does.
        verdict: signed verdict; default `<path>.verdict.dsse.json`.
        public_key: pinned key that the signature must verify against; required in production mode.
        hints: whether clients may ask for rounding hints.
        digest: computes the digest of the directory.

    Raises:
        PolicyError: the directory is incomplete or altered.
        ConfigError: production mode without a public key.
        VerdictRefused: no verdict, or it does not authorise exactly this policy; the reason is in the message.
    """
    policy = load_policy(path)
    found = digest(path)
    verdict_id = expires = None
    if mode == "production":
        verdict_id, expires = _verify(policy, found, verdict, public_key)
    return Authorization(
        path=path,
        name=policy.name,
        version=policy.version,
        recipe=policy.recipe,
        digest=found,
        mode=mode,
        verdict_id=verdict_id,
        hints=hints,
        verdict_expires=expires,
        interchange_id=_interchange_id(policy),
    )


def default_verdict_path(path: Path) -> Path:
    absolute = path.resolve()
    return absolute.with_name(absolute.name + ".verdict.dsse.json")


def _verify(policy: Policy, digest: str, verdict: Path | None, public_key: Path | None) -> tuple[str, datetime]:
    if public_key is None:
        raise ConfigError(
            "--public-key: missing, expected the pinned key that verdicts are signed with; "
            "or serve with --mode rollout, which needs no verdict",
            field="public_key",
        )
    envelope = verdict or default_verdict_path(policy.path)
    if not envelope.is_file():
        raise VerdictRefused(
            f"{envelope}: no signed verdict there; run `eval-gate run` with a signing key, or name one with --verdict",
            field="verdict",
        )
    checked = signing.verify_verdict(envelope, public_key)
    signing.authorize(
        checked,
        policy_digest=digest,
        recipe_id=policy.recipe_id,
        policy_name=policy.name,
        policy_version=policy.version,
    )
    return signing.envelope_digest(checked), checked.expires


_NAMING_KEYS = ("_name_or_path", "transformers_version")
"""Keys of config.json that do not say what the model computes."""


def _interchange_id(policy: Policy) -> str:
    config = {key: value for key, value in policy.model_config.items() if key not in _NAMING_KEYS}
    sampling = policy.path / "generation_config.json"
    parts = {
        "config": config,
        "recipe_id": policy.recipe_id,
        "tokenizer": policy.tokenizer_digest,
        "chat_template": policy.chat_template_digest,
        "sampling": digest_bytes(sampling.read_bytes()) if sampling.is_file() else None,
    }
    return digest_bytes(json.dumps(parts, sort_keys=True).encode())
