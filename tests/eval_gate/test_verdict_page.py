"""docs/verdict.md says what the code does: fields, checks, messages, and its commands for other tools."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from signed_world import World, build, wrong
from typer.main import get_command

from eval_gate.commands.app import app
from eval_gate.flips import MAX_FLIPS_BYTES, MAX_TEXT_CHARS
from eval_gate.signing import CHECKS, PAYLOAD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE, envelope_digest, verify_verdict
from eval_gate.verdict import Subjects, Verdict
from eval_gate.verification import check_subjects
from trace_serve.errors import VerdictRefused
from trace_serve.policy.digest import digest_file

PAGE = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")
FILES = ("serving", "training", "queries", "gate_policy", "results")


@pytest.fixture
def world(make_verdict: Callable[..., Verdict], tmp_path: Path) -> World:
    return build(tmp_path / "world", make_verdict(tokens=True))


def models(kind: Any, seen: dict[type[BaseModel], None]) -> Iterator[type[BaseModel]]:
    """A model and all that its fields hold."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
        seen[kind] = None
        yield kind
        for field in kind.model_fields.values():
            yield from models(field.annotation, seen)
    for inner in get_args(kind):
        yield from models(inner, seen)


@pytest.mark.parametrize("model", list(models(Verdict, {})))
def test_every_field_of_the_predicate_is_named_with_its_object(model: type[BaseModel]) -> None:
    if model is Verdict:
        described = PAGE[PAGE.index("**Verdict**") : PAGE.index("| object | fields |")]
    else:
        (described,) = (line for line in PAGE.splitlines() if line.startswith(f"| **{model.__name__}** |"))
    named = set(re.findall(r"`([a-z0-9_]+)`", described))
    assert set(model.model_fields) - named == set()


def test_types_subjects_and_limits_are_those_of_the_code() -> None:
    for text in (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        assert f'"{text}"' in PAGE
    table = PAGE[PAGE.index("| subject |") : PAGE.index("The digest of a directory")]
    assert re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE) == list(Subjects.model_fields)
    assert f"{MAX_TEXT_CHARS:,} characters" in PAGE
    assert f"{MAX_FLIPS_BYTES >> 20} MiB" in PAGE


def messages() -> dict[str, list[re.Pattern[str]]]:
    """Messages of each check of the page, in its order; checks of files have `file ` before their name."""
    found: dict[str, list[re.Pattern[str]]] = {}
    section = PAGE[PAGE.index("## What verify checks") : PAGE.index("## Other tools")]
    for line in section.splitlines():
        row = re.fullmatch(r"\| `(\w+)` \| (.*) \|", line)
        if row is not None:
            name = row[1] if row[1] not in found else f"file {row[1]}"
            texts = re.findall(r"`([^`]+)`", row[2])
            found[name] = [re.compile(re.escape(text).replace("…", ".+").replace("FIELD", r"[\w.]+")) for text in texts]
    return found


def test_the_checks_of_the_page_are_those_of_the_code_in_their_order() -> None:
    names = [name.removeprefix("file ") for name in messages()]
    assert names == [*CHECKS, *FILES]


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_refuses_with_a_message_of_the_page(world: World, check: str) -> None:
    path = wrong(world, check)
    if check == "public_key":
        world.public_key.write_text("no key")
    with pytest.raises(VerdictRefused) as caught:
        verify_verdict(path, world.public_key)
    assert any(pattern.fullmatch(str(caught.value)) for pattern in messages()[check]), str(caught.value)


@pytest.mark.parametrize("subject", FILES)
def test_each_file_is_refused_with_the_message_of_the_page(world: World, subject: str) -> None:
    directories = {"serving": "policy", "training": "model"}
    if subject in directories:
        (world.root / directories[subject] / "more").write_text("x")
    elif subject == "gate_policy":
        other = world.verdict.policy.model_copy(update={"alpha": 0.1})
        (world.root / "gate-policy.json").write_bytes(other.canonical)
    else:
        (world.root / f"{subject}.jsonl").write_text("x\n")
    with pytest.raises(VerdictRefused) as caught:
        list(check_subjects(world.verdict, world.files))
    names = messages()
    (pattern,) = names[f"file {subject}" if f"file {subject}" in names else subject]
    assert pattern.fullmatch(str(caught.value)), str(caught.value)


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def test_the_commands_for_openssl_verify_an_envelope_and_refuse_an_edited_one(world: World, tmp_path: Path) -> None:
    (script,) = blocks("sh")
    place = tmp_path / "elsewhere"
    (place / "gate").mkdir(parents=True)
    (place / "gate.pub").write_bytes(world.public_key.read_bytes())
    for name in ("verdict.dsse.json", "results.jsonl", "gate-policy.json"):
        (place / "gate" / name).write_bytes((world.root / name).read_bytes())
    done = subprocess.run(["bash", "-ec", script], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    statement = json.loads((place / "statement.json").read_bytes())
    assert statement == world.statement()
    assert envelope_digest(world.verdict) == digest_file(place / "statement.json")
    digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    for name in ("results", "gate_policy"):
        assert digests[name] in done.stdout
    envelope = json.loads((place / "gate" / "verdict.dsse.json").read_bytes())
    envelope["payload"] = ("B" if envelope["payload"][0] == "A" else "A") + envelope["payload"][1:]
    (place / "gate" / "verdict.dsse.json").write_text(json.dumps(envelope))
    assert subprocess.run(["bash", "-ec", script], cwd=place, capture_output=True, timeout=60).returncode != 0


def test_the_digest_of_a_directory_is_computed_as_the_page_shows(world: World) -> None:
    (program,) = blocks("python")
    command = [sys.executable, "-c", program, str(world.root / "policy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert world.verdict.subjects.serving == "sha256:" + done.stdout.strip()


def test_the_commands_of_the_page_exist() -> None:
    commands = get_command(app).commands
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    for line in lines:
        program, name, *words = line.split()
        assert program == ".venv/bin/eval-gate"
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    assert len(lines) == 2
