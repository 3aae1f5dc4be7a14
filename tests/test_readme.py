"""What the README says can be typed, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = {"trace-serve": "trace_serve", "eval-gate": "eval_gate.cli"}
SUBCOMMANDS = {"policy", "hints", "patch"}
"""Commands that have commands of their own."""


def command_lines() -> list[str]:
    """Every command line of ours in the README's code blocks, continuation lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    inline = re.findall(r"`\.venv/bin/([^`]+)`", README)
    lines = [line.strip().removeprefix(".venv/bin/") for line in text.splitlines()] + inline
    return [line.split("#")[0].strip() for line in lines if line.split(" ")[0] in MODULES]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_and_option_of_the_readme_exists(line: str) -> None:
    program, *words = line.split()
    command = words[:2] if words[0] in SUBCOMMANDS else words[:1]
    helped = subprocess.run(
        [sys.executable, "-m", MODULES[program], *command, "--help"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb", "PATH": ""},
        timeout=120,
    )
    assert helped.returncode == 0, helped.stderr
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", helped.stdout), f"{line}: no {option} in its help"


def test_there_are_commands_to_check() -> None:
    assert {line.split()[0] for line in command_lines()} == set(MODULES)
    assert len(command_lines()) > 8


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w[\w-]*)|`make (\w[\w-]*)", README, flags=re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_every_link_to_a_file_leads_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{document}: {link}"
