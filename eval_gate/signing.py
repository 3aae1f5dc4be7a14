"""Signs verdicts and decides what a signed verdict authorises.

A verdict travels as the predicate of an in-toto Statement v1 inside a DSSE envelope with one Ed25519 signature
(https://github.com/in-toto/attestation, https://github.com/secure-systems-lab/dsse); docs/verdict.md describes every
field. Keys are in `eval_gate.keys`; nothing here uses a network.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SecureSystemsError
from securesystemslib.signer import CryptoSigner, SSlibKey

from eval_gate.arms.records import write_atomic
from eval_gate.keys import load_private_key, load_public_key
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError, VerdictRefused

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://trace-serve.dev/eval-gate/verdict/v1"
MAX_ENVELOPE_BYTES = 64 << 20
CLOCK_SKEW = timedelta(minutes=5)

_ENVELOPE_KEYS = {"payload", "payloadType", "signatures"}
_SIGNATURE_KEYS = {"keyid", "sig"}

CHECKS = (
    "envelope",
    "signatures",
    "public_key",
    "signature",
    "payloadType",
    "payload",
    "predicateType",
    "predicate",
    "subject",
    "gate_policy",
    "expires",
    "created",
)
"""What `verify_verdict` checks, in this order; the `field` of a refusal begins with the name of the failed check."""


def sign_verdict(verdict: Verdict, private_key: Path, out: Path) -> None:
    """Writes the signed verdict to `out`.

    Args:
        private_key: a PEM file, or `env:NAME`; see `eval_gate.keys`.

    Raises:
        ConfigError: the key cannot be used, or the verdict is larger than a verifier reads.
    """
    signer = CryptoSigner(load_private_key(private_key))
    envelope = Envelope(_payload(verdict), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    data = _canonical(envelope)
    if len(data) > MAX_ENVELOPE_BYTES:
        raise ConfigError(f"{out}: {len(data)} bytes, nobody would verify more than {MAX_ENVELOPE_BYTES}", field="key")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, data)


def verify_verdict(envelope_path: Path, public_key_path: Path, *, now: datetime | None = None) -> Verdict:
    """Returns the verdict of an envelope that was signed by this key and is in force.

    The file must be byte for byte what `sign_verdict` writes, so that no edit of it goes unnoticed.

    Raises:
        VerdictRefused: with the first of `CHECKS` that fails.
    """
    envelope = _read_envelope(envelope_path)
    key = SSlibKey.from_crypto(load_public_key(public_key_path))
    try:
        envelope.verify([key], 1)
    except (SecureSystemsError, ValueError) as exc:
        (signer,) = envelope.signatures
        raise VerdictRefused(
            f"{envelope_path}: bad signature: signed by {signer[:12]!r}, expected {key.keyid[:12]!r} over this payload",
            field="signature",
        ) from exc
    if envelope.payload_type != PAYLOAD_TYPE:
        raise VerdictRefused(
            f"{envelope_path}: payload type {envelope.payload_type!r}, expected {PAYLOAD_TYPE!r}", field="payloadType"
        )
    verdict = _read_statement(envelope.payload, envelope_path)
    _check_dates(verdict, now or datetime.now(UTC), str(envelope_path))
    return verdict


def authorize(
    verdict: Verdict,
    *,
    policy_digest: str,
    recipe_id: str,
    policy_name: str,
    policy_version: str | None = None,
    now: datetime | None = None,
) -> None:
    """Does this verdict allow this policy to be served?

    Raises:
        VerdictRefused: the outcome is not PASS, it judged another policy, recipe, name or version, or is not in force.
    """
    if verdict.outcome is not Outcome.PASS:
        raise VerdictRefused(f"the verdict is {verdict.outcome}, expected PASS: {verdict.reasons[0]}", field="outcome")
    expected = [
        ("policy digest", verdict.subjects.serving, policy_digest),
        ("recipe_id", verdict.recipe_id, recipe_id),
        ("policy name", verdict.policy_name, policy_name),
    ]
    if policy_version is not None:
        expected.append(("policy version", verdict.policy_version, policy_version))
    for name, judged, wanted in expected:
        if judged != wanted:
            raise VerdictRefused(
                f"the verdict is for {name} {judged}, this policy has {wanted}; run the gate on this policy", field=name
            )
    _check_dates(verdict, now or datetime.now(UTC), "the verdict")


def envelope_digest(verdict: Verdict) -> str:
    """SHA-256 of the signed payload: a verdict's id, the same whoever signs it."""
    return "sha256:" + hashlib.sha256(_payload(verdict)).hexdigest()


def _payload(verdict: Verdict) -> bytes:
    subjects = [
        {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in verdict.subjects.model_dump().items()
        if digest is not None
    ]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": verdict.model_dump(mode="json"),
    }
    return json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _canonical(envelope: Envelope) -> bytes:
    return (json.dumps(envelope.to_dict(), sort_keys=True, separators=(",", ":")) + "\n").encode()


def _read_envelope(path: Path) -> Envelope:
    try:
        if path.stat().st_size > MAX_ENVELOPE_BYTES:
            raise VerdictRefused(f"{path}: larger than {MAX_ENVELOPE_BYTES} bytes, not a verdict", field="envelope")
        raw = path.read_bytes()
    except OSError as exc:
        raise VerdictRefused(f"{path}: cannot be read: {exc.strerror}", field="envelope") from exc
    try:
        content = json.loads(raw)
        # The library takes keys that it does not know, which no signature covers.
        for part, keys in ((content, _ENVELOPE_KEYS), *((one, _SIGNATURE_KEYS) for one in content["signatures"])):
            if part.keys() != keys or not all(isinstance(part[name], str) for name in keys - {"signatures"}):
                raise ValueError(f"expected {sorted(keys)}")
        envelope = Envelope.from_dict(content)
        canonical = _canonical(envelope)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SecureSystemsError) as exc:
        raise VerdictRefused(f"{path}: not a DSSE envelope ({type(exc).__name__})", field="envelope") from exc
    if canonical != raw:
        raise VerdictRefused(f"{path}: edited or re-encoded after it was signed", field="envelope")
    if len(envelope.signatures) != 1:
        raise VerdictRefused(f"{path}: {len(envelope.signatures)} signatures, expected one", field="signatures")
    return envelope


def _read_statement(payload: bytes, path: Path) -> Verdict:
    try:
        statement: Any = json.loads(payload)
        kind, predicate_type = statement["_type"], statement["predicateType"]
        predicate, subjects = statement["predicate"], statement["subject"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise VerdictRefused(f"{path}: the payload is not an in-toto statement", field="payload") from exc
    if kind != STATEMENT_TYPE or predicate_type != PREDICATE_TYPE:
        raise VerdictRefused(
            f"{path}: {kind} with predicate {predicate_type}, expected {STATEMENT_TYPE} with {PREDICATE_TYPE}",
            field="predicateType",
        )
    try:
        verdict = Verdict.model_validate_json(json.dumps(predicate))
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise VerdictRefused(f"{path}: predicate {place}: {fault['msg']}", field=f"predicate.{place}") from exc
    if subjects != json.loads(_payload(verdict))["subject"]:
        raise VerdictRefused(f"{path}: the statement's subjects are not those of its predicate", field="subject")
    if verdict.policy.digest != verdict.subjects.gate_policy:
        raise VerdictRefused(
            f"{path}: the gate policy in the predicate digests to {verdict.policy.digest}, its subject says "
            f"{verdict.subjects.gate_policy}",
            field="gate_policy",
        )
    return verdict


def _check_dates(verdict: Verdict, now: datetime, name: str) -> None:
    if verdict.expired(now):
        raise VerdictRefused(
            f"{name}: expired on {verdict.expires:%Y-%m-%d %H:%M} UTC; run the gate again", field="expires"
        )
    if verdict.created > now + CLOCK_SKEW:
        raise VerdictRefused(f"{name}: made on {verdict.created:%Y-%m-%d %H:%M} UTC, in the future", field="created")
