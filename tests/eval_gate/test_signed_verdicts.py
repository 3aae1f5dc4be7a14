"""A signed verdict authorises exactly what was judged, and any edit of it is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from eval_gate.keys import generate_key, load_private_key
from eval_gate.signing import PAYLOAD_TYPE, authorize, sign_verdict, verify_verdict
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError, VerdictRefused


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "key.pem", tmp_path / "key.pub"
    generate_key(*paths)
    return paths


@pytest.fixture
def envelope(verdict: Verdict, keys: tuple[Path, Path], tmp_path: Path) -> Path:
    out = tmp_path / "verdict.dsse.json"
    sign_verdict(verdict, keys[0], out)
    return out


def test_a_signed_verdict_comes_back_whole(verdict: Verdict, envelope: Path, keys: tuple[Path, Path]) -> None:
    assert verify_verdict(envelope, keys[1]) == verdict


def test_the_statement_names_its_subjects_and_form(verdict: Verdict, envelope: Path) -> None:
    statement = json.loads(Envelope.from_dict(json.loads(envelope.read_text())).payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {entry["name"]: "sha256:" + entry["digest"]["sha256"] for entry in statement["subject"]}
    assert digests == verdict.subjects.model_dump()
    assert set(digests) == {"serving", "training", "queries", "gate_policy", "results"}


def test_the_private_key_is_for_its_owner_and_never_overwritten(keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    assert private.stat().st_mode & 0o777 == 0o600
    before = private.read_bytes()
    for pair in ((private, tmp_path / "new.pub"), (tmp_path / "new.pem", public)):
        with pytest.raises(ConfigError, match="never overwritten"):
            generate_key(*pair)
    assert private.read_bytes() == before
    assert not (tmp_path / "new.pub").exists()
    assert not (tmp_path / "new.pem").exists()


def test_another_key_is_refused(envelope: Path, tmp_path: Path) -> None:
    generate_key(tmp_path / "other.pem", tmp_path / "other.pub")
    with pytest.raises(VerdictRefused, match="bad signature"):
        verify_verdict(envelope, tmp_path / "other.pub")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_changed_byte_is_refused(data: st.DataObject, envelope: Path, keys: tuple[Path, Path]) -> None:
    raw = bytearray(envelope.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    edited = envelope.with_name("edited.json")
    edited.write_bytes(raw)
    with pytest.raises(VerdictRefused):
        verify_verdict(edited, keys[1])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_insertion_and_cut_is_refused(data: st.DataObject, envelope: Path, keys: tuple[Path, Path]) -> None:
    raw = envelope.read_bytes()
    place = data.draw(st.integers(0, len(raw)))
    inserted = data.draw(st.sampled_from([b" ", b"\n", b",", b"=", b"A"]))
    edited = envelope.with_name("edited.json")
    for changed in (raw[:place] + inserted + raw[place:], raw[:place] + raw[place + 1 :]):
        if changed == raw:
            continue
        edited.write_bytes(changed)
        with pytest.raises(VerdictRefused):
            verify_verdict(edited, keys[1])


def resign(payload: Any, keys: tuple[Path, Path], out: Path, payload_type: str = PAYLOAD_TYPE) -> None:
    envelope = Envelope(json.dumps(payload).encode(), payload_type, {})
    envelope.sign(CryptoSigner(load_private_key(keys[0])))
    out.write_bytes((json.dumps(envelope.to_dict(), sort_keys=True, separators=(",", ":")) + "\n").encode())


def statement_of(path: Path) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(Envelope.from_dict(json.loads(path.read_text())).payload)
    return statement


def test_a_good_signature_over_something_else_is_refused(envelope: Path, keys: tuple[Path, Path]) -> None:
    good = statement_of(envelope)
    other = envelope.with_name("other.json")
    cases: list[tuple[Any, str, str]] = [
        (good, "text/plain", "payload type"),
        (good | {"predicateType": "https://in-toto.io/attestation/test-result/v0.1"}, PAYLOAD_TYPE, "predicate"),
        (good | {"_type": "https://in-toto.io/Statement/v0.1"}, PAYLOAD_TYPE, "Statement/v0.1"),
        (good | {"predicate": good["predicate"] | {"schema_version": 2}}, PAYLOAD_TYPE, "schema_version"),
        (good | {"predicate": good["predicate"] | {"note": "x"}}, PAYLOAD_TYPE, "note"),
        (good | {"subject": good["subject"][1:]}, PAYLOAD_TYPE, "subjects"),
        ([], PAYLOAD_TYPE, "not an in-toto statement"),
    ]
    for payload, payload_type, message in cases:
        resign(payload, keys, other, payload_type)
        with pytest.raises(VerdictRefused, match=message):
            verify_verdict(other, keys[1])
    resign(good, keys, other)
    verify_verdict(other, keys[1])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b'{"payload": 5}', b"\xff\xfe", b"[" * 5000])
def test_a_file_that_is_no_envelope_is_refused(tmp_path: Path, keys: tuple[Path, Path], content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(VerdictRefused, match="not a DSSE envelope"):
        verify_verdict(path, keys[1])


def test_missing_files_and_wrong_keys_are_refused(envelope: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(VerdictRefused, match="cannot be read"):
        verify_verdict(tmp_path / "absent.json", keys[1])
    with pytest.raises(VerdictRefused, match="public key"):
        verify_verdict(envelope, keys[0])
    with pytest.raises(ConfigError, match="not an unencrypted PEM private key"):
        load_private_key(keys[1])


def test_keys_may_stand_in_the_environment(
    verdict: Verdict, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATE_PRIVATE", keys[0].read_text())
    monkeypatch.setenv("GATE_PUBLIC", keys[1].read_text())
    sign_verdict(verdict, Path("env:GATE_PRIVATE"), tmp_path / "v.json")
    assert verify_verdict(tmp_path / "v.json", Path("env:GATE_PUBLIC")) == verdict
    with pytest.raises(ConfigError, match="--key env:NOT_SET: cannot be read: the variable is not set"):
        load_private_key(Path("env:NOT_SET"))


def test_a_verdict_that_nobody_would_read_is_not_signed(
    verdict: Verdict, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval_gate.signing.MAX_ENVELOPE_BYTES", 1000)
    with pytest.raises(ConfigError, match="nobody would verify more than 1000"):
        sign_verdict(verdict, keys[0], tmp_path / "v.json")
    assert not (tmp_path / "v.json").exists()


def test_an_expired_or_future_verdict_is_refused(verdict: Verdict, envelope: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(VerdictRefused, match="expired"):
        verify_verdict(envelope, keys[1], now=verdict.expires)
    with pytest.raises(VerdictRefused, match="future"):
        verify_verdict(envelope, keys[1], now=verdict.created - timedelta(hours=1))


def test_only_a_pass_for_exactly_this_policy_authorises(verdict: Verdict) -> None:
    judged = {
        "policy_digest": verdict.subjects.serving,
        "recipe_id": verdict.recipe_id,
        "policy_name": verdict.policy_name,
        "policy_version": verdict.policy_version,
    }
    authorize(verdict, **judged)  # type: ignore[arg-type]
    for name in judged:
        with pytest.raises(VerdictRefused, match="this policy has other"):
            authorize(verdict, **(judged | {name: "other"}))  # type: ignore[arg-type]
    for outcome in (Outcome.BLOCK, Outcome.INCONCLUSIVE):
        with pytest.raises(VerdictRefused, match="expected PASS"):
            authorize(verdict.model_copy(update={"outcome": outcome}), **judged)  # type: ignore[arg-type]
    with pytest.raises(VerdictRefused, match="expired"):
        authorize(verdict, **judged, now=datetime.now(UTC) + timedelta(days=400))  # type: ignore[arg-type]


def test_a_verdict_that_names_no_serving_artifact_authorises_nothing(
    make_verdict: Callable[..., Verdict],
) -> None:
    verdict = make_verdict(serving_digest=None)
    with pytest.raises(VerdictRefused, match="policy digest None"):
        authorize(verdict, policy_digest="sha256:" + "0" * 64, recipe_id=verdict.recipe_id or "", policy_name="demo")
