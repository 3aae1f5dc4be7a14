"""What the user names as an arm: a URL, a plain model directory or a policy directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval_gate.arms import engine
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from trace_serve.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class ArmSource:
    """One arm before it is reached.

    Attributes:
        role: training-time or serving-time version.
        directory: what an engine is started from; None for an endpoint.
        endpoint: where to send requests; for a directory, its concurrency and time-outs.
        recipe: what the engine is started with; None is BF16.
        evidence: what is known before anything runs.
    """

    role: Role
    directory: Path | None
    endpoint: Endpoint
    recipe: Recipe | None
    evidence: ArmEvidence

    @asynccontextmanager
    async def open(self, startup_timeout_s: float, log: Path) -> AsyncIterator[Endpoint]:
        """The endpoint, with an engine of our own behind it while the context lasts if this is a directory."""
        if self.directory is None:
            yield self.endpoint
            return
        async with engine.running(
            self.directory, self.recipe, self.evidence.artifact_digest, self.endpoint, startup_timeout_s, log
        ) as endpoint:
            yield endpoint


def resolve(role: Role, spec: str, endpoint: Endpoint) -> ArmSource:
    """Reads what `--training` or `--serving` names.

    A policy directory is BF16 as the training arm and its own recipe as the serving arm; a directory without
    `policy.json` can only be the training arm.

    Raises:
        ConfigError: neither a URL nor a usable directory; `field` is the flag.
    """
    if spec.startswith(("http://", "https://")):
        return ArmSource(role, None, endpoint, None, ArmEvidence(source=_without_userinfo(spec, role)))
    directory = Path(spec)
    if not directory.is_dir():
        raise ConfigError(
            f"--{role} {spec!r}: neither a URL (http://...) nor a directory; give a model, a policy or an endpoint",
            field=role,
        )
    from trace_serve.policy.digest import digest_directory

    if not (directory / "policy.json").exists():
        if role is Role.SERVING:
            raise PolicyError(
                f"--serving {spec!r}: no policy.json there; build a policy with `trace-serve policy build`",
                field=role,
            )
        digest = digest_directory(directory)
        evidence = ArmEvidence(source=spec, artifact_digest=digest, base_digest=digest)
        return ArmSource(role, directory, endpoint, None, evidence)
    from trace_serve.policy.manifest import load_policy

    policy = load_policy(directory)
    serving = role is Role.SERVING
    evidence = ArmEvidence(
        source=spec,
        artifact_digest=policy.digest,
        base_digest=policy.base_digest,
        recipe_id=policy.recipe_id if serving else None,
        policy_name=policy.name,
        policy_version=policy.version,
    )
    return ArmSource(role, directory, endpoint, policy.recipe if serving else None, evidence)


def _without_userinfo(url: str, role: Role) -> str:
    if "@" in url.split("//", 1)[1].split("/", 1)[0]:
        raise ConfigError(
            f"--{role}: the URL carries a password, which would be printed in reports; use --{role}-key-env", field=role
        )
    return url
