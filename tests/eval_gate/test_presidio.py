"""Redaction by the real Presidio: once, before both arms, by versions that the verdict names, and without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate import presidio
from eval_gate.policy import GatePolicy
from eval_gate.redaction import load_redactor
from eval_gate.run import ArmConfig, GateConfig, run_gate
from trace_serve.errors import ConfigError


def test_patterns_find_addresses_and_cards_but_no_names_and_no_plain_numbers() -> None:
    name, apply = presidio.load("presidio")
    text = "Mail anna.smith@example.com from 10.1.2.3 about card 4111 1111 1111 1111, call +1 212-555-0187."
    assert apply(text) == "Mail <EMAIL_ADDRESS> from <IP_ADDRESS> about card <CREDIT_CARD>, call <PHONE_NUMBER>."
    plain = "Order 123456789 of Anna: what is 17 + 2518?"
    assert apply(plain) == plain
    assert [part.split()[0] for part in name.split(", ")] == [
        *("presidio-analyzer", "presidio-anonymizer", "phonenumbers", "spacy", "patterns")
    ]
    assert name == presidio.load("presidio")[0]


def test_a_spacy_model_finds_names_too_and_is_named_by_its_content(tmp_path: Path) -> None:
    import spacy

    pipeline = spacy.blank("en")
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "PERSON", "pattern": "Jane Roe"}])
    pipeline.to_disk(tmp_path / "model")
    redactor = load_redactor(f"presidio:{tmp_path / 'model'}")
    assert redactor.apply("Jane Roe asks for jane@example.org") == "<PERSON> asks for <EMAIL_ADDRESS>"
    assert ", model sha256:" in redactor.name


def test_what_is_not_installed_is_refused_and_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'en_no_such_model' is no spaCy model that is installed"):
        load_redactor("presidio:en_no_such_model")
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(ConfigError, match=r"install trace-serve\[gate-redact\]"):
        load_redactor("presidio")


def test_no_file_of_a_run_and_no_arm_sees_what_was_redacted(
    start_server: Callable[[], Any], engine_report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    training, serving = start_server(), start_server()
    training.report, serving.report = engine_report("bf16"), engine_report("fp4")
    training.answer = serving.answer = lambda prompt: f"It is {prompt.split()[0]} for {prompt.split()[-1]}"
    lines = [
        {
            "id": f"q{i}",
            "messages": [
                {"role": "system", "content": f"You serve agent{i}@example.com."},
                {"role": "user", "content": f"{i} is what for customer{i}@example.com"},
            ],
            "checker": {"type": "numeric", "expected": i},
        }
        for i in range(40)
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = GateConfig(
        ArmConfig(training.url),
        ArmConfig(serving.url),
        str(tmp_path / "q.jsonl"),
        tmp_path / "out",
        GatePolicy(margin=0.2),
        redact="presidio",
    )
    verdict = run_gate(config).verdict
    assert verdict.policy.redaction == presidio.load("presidio")[0]
    assert sorted(training.prompts) == sorted(serving.prompts)
    assert all(body["messages"][0]["content"] == "You serve <EMAIL_ADDRESS>." for body in serving.bodies)
    assert all(b"@example.com" not in path.read_bytes() for path in (tmp_path / "out").iterdir())
