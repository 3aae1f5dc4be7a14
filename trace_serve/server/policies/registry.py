"""A directory of policies: what is in it, and whether each may be served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_gate import signing
from trace_serve.errors import ConfigError, PolicyError, TraceServeError
from trace_serve.policy.manifest import MANIFEST_FILE, Policy, load_policy, parse_manifest
from trace_serve.policy.tokenizer import read_json_object
from trace_serve.server.authorization import Authorization, authorize_policy, default_verdict_path
from trace_serve.server.policies.digests import DigestCache
from trace_serve.settings import Mode


@dataclass(frozen=True)
class Entry:
    """One policy directory of a registry.

    Attributes:
        directory: where it is.
        name, version: from its manifest; the directory's name and nothing when that cannot be read.
        policy: the checked policy; None when it cannot be used.
        fault: why it cannot be used.
    """

    directory: Path
    name: str
    version: str
    policy: Policy | None
    fault: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


class Registry:
    """Policies in the sub-directories of one directory, each with its signed verdict beside it.

    Every method reads files and blocks; call them from a thread.

    Args:
        root: the directory. Hidden sub-directories, and those without a policy.json, are not policies.
        mode: `production` demands a verdict.
        public_key: pinned key that verdicts must verify against.
        hints: whether clients may ask for rounding hints.
        cache: digests of directories.

    Raises:
        ConfigError: `root` is not a directory.
    """

    def __init__(self, root: Path, *, mode: Mode, public_key: Path | None, hints: bool, cache: DigestCache) -> None:
        if not root.is_dir():
            raise ConfigError(f"--registry: {root} is not a directory, expected one of policies", field="registry")
        self.root = root.resolve()
        self._mode: Mode = mode
        self._public_key = public_key
        self._hints = hints
        self._cache = cache

    def entries(self) -> list[Entry]:
        """Every policy, sorted by label; broken ones with the reason."""
        found = []
        for directory in sorted(self.root.iterdir()):
            if directory.name.startswith(".") or not (directory / MANIFEST_FILE).exists():
                continue
            found.append(_read(directory))
        return sorted(found, key=lambda entry: entry.label)

    def find(self, label: str) -> Entry:
        """The policy of a label, `name@version`, or of a name that only one has.

        Raises:
            ConfigError: there is none, or several; `field` is `policy`.
            PolicyError: it cannot be used.
        """
        entries = self.entries()
        named = [each for each in entries if label in (each.label, each.name)]
        if len(named) != 1:
            known = ", ".join(each.label for each in entries) or "none"
            count = "no policy" if not named else f"{len(named)} policies"
            raise ConfigError(f"policy: got {label!r}, which names {count} of: {known}", field="policy")
        if named[0].policy is None:
            raise PolicyError(f"policy {label}: {named[0].fault}", field="policy")
        return named[0]

    def authorize(self, label: str, *, judged: bool = True) -> Authorization:
        """Everything checked again, every byte read: files, digests, signature, verdict, expiry.

        Args:
            label: see `find`.
            judged: False for a policy whose answers reach no client; it needs no verdict.

        Raises:
            ConfigError, PolicyError, VerdictRefused: it may not be served; the reason is in the message.
        """
        entry = self.find(label)
        return authorize_policy(
            entry.directory,
            mode=self._mode if judged else "rollout",
            public_key=self._public_key,
            hints=self._hints and judged,
            digest=self._cache.recompute,
        )

    def describe(self, entry: Entry) -> dict[str, Any]:
        """A row of the listing. The digest is computed if it is not known yet."""
        row: dict[str, Any] = {"policy": entry.label, "directory": entry.directory.name, "fault": entry.fault}
        if entry.policy is None:
            return row
        try:
            digest = self._cache.lookup(entry.directory)
        except PolicyError as exc:
            return {**row, "fault": str(exc)}
        manifest = entry.policy.manifest
        row |= {
            "name": entry.policy.name,
            "version": entry.policy.version,
            "digest": digest,
            "recipe_id": entry.policy.recipe_id,
            "format": manifest.format,
            "base_digest": manifest.base_digest,
            "source_run": manifest.source_run,
        }
        return {**row, "verdict": self._verdict_summary(entry.policy, digest)}

    def verdict(self, label: str) -> dict[str, Any]:
        """The signed verdict of a policy, with whether it lets the policy be served.

        Raises:
            ConfigError, PolicyError: there is no such policy.
        """
        entry = self.find(label)
        assert entry.policy is not None
        summary = self._verdict_summary(entry.policy, self._cache.lookup(entry.directory))
        path = default_verdict_path(entry.directory)
        if self._public_key is None or not path.is_file():
            return {**summary, "verdict": None}
        try:
            return {**summary, "verdict": signing.verify_verdict(path, self._public_key).model_dump(mode="json")}
        except TraceServeError:
            return {**summary, "verdict": None}

    def _verdict_summary(self, policy: Policy, digest: str) -> dict[str, Any]:
        """Id, outcome and expiry of the verdict, and why it does not let the policy be served, if it does not."""
        summary: dict[str, Any] = {"id": None, "outcome": None, "expires": None, "authorizes": False, "reason": None}
        path = default_verdict_path(policy.path)
        if self._public_key is None:
            return {**summary, "reason": "no public key is pinned, so no verdict can be checked"}
        if not path.is_file():
            return {**summary, "reason": "there is no signed verdict"}
        try:
            verdict = signing.verify_verdict(path, self._public_key)
            summary |= {
                "id": signing.envelope_digest(verdict),
                "outcome": str(verdict.outcome),
                "expires": verdict.expires.isoformat(),
            }
            signing.authorize(
                verdict,
                policy_digest=digest,
                recipe_id=policy.recipe_id,
                policy_name=policy.name,
                policy_version=policy.version,
            )
        except TraceServeError as exc:
            return {**summary, "reason": str(exc)}
        return {**summary, "authorizes": True}


def _read(directory: Path) -> Entry:
    name, version = directory.name, ""
    try:
        if directory.is_symlink():
            raise PolicyError(f"{directory}: is a symlink, expected a directory", field="registry")
        manifest = parse_manifest(read_json_object(directory / MANIFEST_FILE), str(directory))
        name, version = manifest.name, manifest.version
        return Entry(directory, name, version, load_policy(directory))
    except TraceServeError as exc:
        return Entry(directory, name, version, None, str(exc))
