"""Every command explains itself, and its example is one that it would accept."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command

from eval_gate.commands.app import app

COMMANDS = get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_an_example_whose_options_exist(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    example = re.fullmatch(r"Example: eval-gate (.*)", command.epilog)
    assert example is not None
    first, *words = shlex.split(example[1])
    assert first == name
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    # Parsing runs nothing; it refuses missing arguments and values of the wrong type.
    command.make_context(name, words)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"keygen", "completion"}))
def test_every_command_can_answer_in_json(name: str) -> None:
    assert "--json" in {option for parameter in COMMANDS[name].params for option in parameter.opts}
