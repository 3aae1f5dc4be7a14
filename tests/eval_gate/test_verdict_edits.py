"""No edit of a signed verdict or of a file that it speaks of goes unnoticed, and the first fault is named."""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from signed_world import World, build, write_envelope, wrong

from eval_gate.keys import generate_key
from eval_gate.signing import CHECKS, sign_verdict, verify_verdict
from eval_gate.verdict import Verdict
from eval_gate.verification import check_subjects
from trace_serve.errors import EXIT_CONFIG, TraceServeError, VerdictRefused

many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def world(make_verdict: Callable[..., Verdict], tmp_path: Path) -> World:
    return build(tmp_path / "world", make_verdict(match=120, lost=2))


def refusal(world: World, path: Path) -> str:
    """Name of the check that refuses an envelope."""
    with pytest.raises(VerdictRefused) as caught:
        verify_verdict(path, world.public_key)
    assert caught.value.field is not None
    assert "\n" not in str(caught.value)
    return caught.value.field.partition(".")[0]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a JSON value but the value itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in [(*path, key), *places(item, (*path, key))]]


def edited(data: st.DataObject, original: dict[str, Any]) -> dict[str, Any]:
    """The value with one key or element changed, added, removed or renamed somewhere."""
    value = copy.deepcopy(original)
    *parents, last = data.draw(st.sampled_from(places(value)))
    holder: Any = value
    for key in parents:
        holder = holder[key]
    edit = data.draw(st.sampled_from(["change", "add", "remove", "rename"]))
    scalar = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=6)
    other = data.draw(scalar)
    if edit == "change":
        holder[last] = other
    elif edit == "remove":
        del holder[last]
    elif isinstance(holder, list):
        holder.insert(last, other)
    else:
        name = data.draw(st.text(max_size=6).filter(lambda name: name not in holder))
        holder[name] = other if edit == "add" else holder.pop(last)
    assume(json.dumps(value, sort_keys=True) != json.dumps(original, sort_keys=True))
    return value


@many
@given(data=st.data())
def test_every_edit_of_the_statement_is_refused_by_its_signature(data: st.DataObject, world: World) -> None:
    envelope = json.loads(world.envelope.read_bytes())
    payload = json.dumps(edited(data, world.statement()), sort_keys=True, separators=(",", ":")).encode()
    changed = {**envelope, "payload": base64.b64encode(payload).decode()}
    assert refusal(world, write_envelope(world.root / "edited.json", changed)) == "signature"


@many
@given(data=st.data())
def test_every_edit_of_the_envelope_is_refused(data: st.DataObject, world: World) -> None:
    changed = edited(data, json.loads(world.envelope.read_bytes()))
    assert refusal(world, write_envelope(world.root / "edited.json", changed)) in CHECKS


@settings(many, max_examples=40)
@given(
    indent=st.none() | st.integers(0, 4), separators=st.sampled_from([(",", ":"), (", ", ": ")]), order=st.booleans()
)
def test_the_same_content_in_other_white_space_or_order_is_refused(
    world: World, indent: int | None, separators: tuple[str, str], order: bool
) -> None:
    def reencoded(value: Any) -> bytes:
        if isinstance(value, dict):
            value = dict(sorted(value.items(), reverse=order))
        return json.dumps(value, indent=indent, separators=separators).encode()

    envelope = json.loads(world.envelope.read_bytes())
    outside = reencoded(envelope)
    path = world.root / "edited.json"
    path.write_bytes(outside)
    assert refusal(world, path) == "envelope"
    payload = reencoded(world.statement())
    assume(payload != base64.b64decode(envelope["payload"]))
    changed = {**envelope, "payload": base64.b64encode(payload).decode()}
    assert refusal(world, write_envelope(path, changed)) == "signature"


@settings(many, max_examples=40)
@given(moment=st.datetimes(datetime(2000, 1, 1), datetime(2090, 1, 1)), name=st.sampled_from(["expires", "created"]))
def test_a_moved_date_is_refused(world: World, moment: datetime, name: str) -> None:
    statement = world.statement()
    statement["predicate"][name] = moment.isoformat() + "Z"
    envelope = json.loads(world.envelope.read_bytes())
    changed = {**envelope, "payload": base64.b64encode(json.dumps(statement).encode()).decode()}
    assert refusal(world, write_envelope(world.root / "edited.json", changed)) == "signature"


@many
@given(data=st.data())
def test_another_subject_digest_is_refused_even_under_a_good_signature(data: st.DataObject, world: World) -> None:
    statement = world.statement()
    subject = data.draw(st.sampled_from(statement["subject"]))
    place = data.draw(st.integers(0, 63))
    digest = subject["digest"]["sha256"]
    digit = data.draw(st.sampled_from("0123456789abcdef").filter(lambda digit: digit != digest[place]))
    subject["digest"]["sha256"] = digest[:place] + digit + digest[place + 1 :]
    assert refusal(world, world.resign(statement)) == "subject"


def test_a_signature_of_another_verdict_or_of_another_key_is_refused(world: World) -> None:
    other = world.verdict.model_copy(update={"created": world.verdict.created + timedelta(seconds=1)})
    sign_verdict(other, world.private_key, world.root / "other.json")
    one, two = (json.loads((world.root / name).read_bytes()) for name in ("verdict.dsse.json", "other.json"))
    path = world.root / "edited.json"
    assert refusal(world, write_envelope(path, {**one, "signatures": two["signatures"]})) == "signature"
    generate_key(world.root / "foreign.pem", world.root / "foreign.pub")
    foreign = json.loads(world.resign(world.statement(), key=world.root / "foreign.pem").read_bytes())
    assert refusal(world, write_envelope(path, foreign)) == "signature"
    # Under the name of the right key.
    renamed = [{**foreign["signatures"][0], "keyid": one["signatures"][0]["keyid"]}]
    assert refusal(world, write_envelope(path, {**one, "signatures": renamed})) == "signature"
    both = one["signatures"] + foreign["signatures"]
    assert refusal(world, write_envelope(path, {**one, "signatures": both})) == "signatures"


@pytest.mark.parametrize("check", CHECKS)
def test_the_first_thing_that_fails_is_the_one_that_is_named(world: World, check: str) -> None:
    path = wrong(world, check)
    if CHECKS.index(check) <= CHECKS.index("public_key"):
        world.public_key.write_text("no key")
    assert refusal(world, path) == check


SINGLE_FILES = {"queries": "queries.jsonl", "gate_policy": "gate-policy.json", "results": "results.jsonl"}
DIRECTORIES = {"serving": "policy", "training": "model"}


def damage(data: st.DataObject, world: World, subject: str) -> None:
    """Edits one file of a subject, or adds, removes or renames one."""
    if subject in SINGLE_FILES:
        path, edits = world.root / SINGLE_FILES[subject], ["flip", "append", "cut", "remove"]
    else:
        files = [path for path in (world.root / DIRECTORIES[subject]).iterdir() if path.is_file()]
        path = data.draw(st.sampled_from(sorted(files)))
        edits = ["flip", "append", "cut", "remove", "rename", "add", "link"]
    edit = data.draw(st.sampled_from(edits))
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if edit == "flip":
        raw[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
    elif edit == "append":
        path.write_bytes(raw + b"\n")
    elif edit == "cut":
        path.write_bytes(raw[:place])
    elif edit == "remove":
        path.unlink()
    elif edit == "rename":
        path.rename(path.with_name("other-" + path.name))
    elif edit == "add":
        path.with_name("added.bin").write_bytes(b"x")
    else:
        path.rename(world.root / "elsewhere")
        path.symlink_to(world.root / "elsewhere")


@settings(many, max_examples=120)
@given(data=st.data(), subject=st.sampled_from([*DIRECTORIES, *SINGLE_FILES]))
def test_every_edit_of_a_subject_on_disk_is_refused(data: st.DataObject, world: World, subject: str) -> None:
    damaged = world.copy(world.root.with_name("damaged"))
    try:
        damage(data, damaged, subject)
        with pytest.raises(TraceServeError) as caught:
            list(check_subjects(world.verdict, damaged.files))
    finally:
        shutil.rmtree(damaged.root)
    assert caught.value.exit_code == EXIT_CONFIG
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, VerdictRefused):
        assert caught.value.field == subject


def test_untouched_subjects_are_confirmed_one_by_one(world: World) -> None:
    lines = list(check_subjects(verify_verdict(world.envelope, world.public_key), world.files))
    assert [line.split()[0] for line in lines] == ["authorises", "training", "queries", "gate", "results"]
    assert list(check_subjects(world.verdict, replace(world.files, policy=None, training=None))) == lines[2:]


def test_subjects_are_checked_in_order_and_other_gate_settings_are_named(world: World) -> None:
    order = [*DIRECTORIES, *SINGLE_FILES]
    for name in DIRECTORIES.values():
        (world.root / name / "added.bin").write_bytes(b"x")
    other = world.verdict.policy.model_copy(update={"margin": 0.2})
    (world.root / "gate-policy.json").write_bytes(other.canonical)
    for name in ("queries", "results"):
        (world.root / SINGLE_FILES[name]).write_text("other\n")
    files = world.files
    messages = {}
    for subject, flag in zip(order, ("policy", "training", "queries", "gate_policy", "results"), strict=True):
        with pytest.raises(VerdictRefused) as caught:
            list(check_subjects(world.verdict, files))
        assert caught.value.field == subject
        messages[subject] = str(caught.value)
        files = replace(files, **{flag: () if flag == "queries" else None})
    assert list(check_subjects(world.verdict, files)) == []
    assert messages["gate_policy"].endswith("has margin 0.2, the verdict was judged with 0.05")
    assert "it was changed, or is another" in messages["results"]


def test_a_subject_that_the_verdict_has_no_digest_of_is_never_confirmed(world: World) -> None:
    subjects = world.verdict.subjects.model_copy(update={"training": None})
    verdict = world.verdict.model_copy(update={"subjects": subjects})
    with pytest.raises(VerdictRefused, match="training: the verdict has no digest of it"):
        list(check_subjects(verdict, world.files))
