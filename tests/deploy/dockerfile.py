"""Reads a Dockerfile far enough to check it and to run its steps without Docker."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword, the flags before its arguments, and the arguments as written."""

    keyword: str
    flags: tuple[str, ...]
    arguments: str


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]

    def environment(self) -> dict[str, str]:
        """Every ENV of the stage."""
        words = (word for each in self.of("ENV") for word in shlex.split(each.arguments))
        return {name: value for name, _, value in (word.partition("=") for word in words)}


@dataclass(frozen=True)
class Dockerfile:
    """The stages by name, and the defaults of the ARGs before the first."""

    defaults: dict[str, str]
    stages: dict[str, Stage]


def parse(path: Path) -> Dockerfile:
    """Reads a Dockerfile whose stages are all named.

    Raises:
        ValueError: a FROM has no name.
    """
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    defaults: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        words = rest.strip().split(" ")
        flags = []
        while words and words[0].startswith("--"):
            flags.append(words.pop(0))
            while words and not words[0]:
                words.pop(0)
        arguments = " ".join(words)
        if keyword == "FROM":
            base, _, name = arguments.partition(" AS ")
            if not name:
                raise ValueError(f"{path}: FROM {arguments}: the stage has no name")
            current = stages[name] = Stage(name, base)
        elif current is None:
            name, _, default = arguments.partition("=")
            defaults[name] = default
        else:
            current.instructions.append(Instruction(keyword, tuple(flags), arguments))
    return Dockerfile(defaults, stages)
