"""The site builds strictly and asks no other host, its picture is current, and every command in it exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from eval_gate.commands.app import app as gate_app
from trace_serve import cli as serve_cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
SHELL = {"", "bash", "sh", "shell", "console"}
PROGRAMS = {"trace-serve": serve_cli.app, "eval-gate": gate_app}

sys.path.insert(0, str(ROOT / "tools"))

import docs_nav  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        place = site if name == "index" else site / name
        assert (place / "index.html").is_file(), name
        assert name == "index" or f'href="{name}/"' in front, name


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*?src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]*?rel="(?:stylesheet|preload|preconnect|icon)"[^>]*?href="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]*?href="([^"]+)"[^>]*?rel="(?:stylesheet|preload|preconnect|icon)"', text)
        assert loaded
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page.name


def test_the_navigation_fails_for_a_page_that_is_gone_and_keeps_one_that_is_new(tmp_path: Path) -> None:
    for names in docs_nav.SECTIONS.values():
        for name in names:
            (tmp_path / f"{name}.md").touch()
    (tmp_path / "brand-new.md").touch()
    assert docs_nav.pages(tmp_path)[-1] == {"Further pages": ["brand-new.md"]}
    (tmp_path / "faq.md").unlink()
    with pytest.raises(FileNotFoundError, match="faq"):
        docs_nav.pages(tmp_path)


def test_the_architecture_picture_is_that_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "tools/draw_architecture.py"), "--check"]
    done = subprocess.run(command, timeout=120)
    assert done.returncode == 0, "run `make architecture` and commit docs/architecture.svg"


def blocks(page: Path) -> Iterator[str]:
    """The text of every fenced block that may be shell."""
    for language, text in re.findall(
        r"^```([\w-]*)[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        if language in SHELL:
            yield text


def inline(page: Path) -> Iterator[str]:
    """Inline code that starts with a program of ours and goes on with a word."""
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for text in re.findall(r"`([^`]+)`", prose):
        yield " ".join(text.split())


def command_lines() -> list[tuple[str, str]]:
    """(page, command line) of every line that runs a program of ours or make."""
    found = []
    for page in PAGES:
        lines = [line for text in blocks(page) for line in text.replace("\\\n", " ").splitlines()]
        for line in [*lines, *inline(page)]:
            words = re.sub(r"^\$ ", "", line.strip()).split(" #")[0].strip()
            words = re.sub(r"^([A-Z_]+=\S+ +)+", "", words).removeprefix(".venv/bin/")
            if re.match(r"(trace-serve|eval-gate|make) [\w-]", words):
                found.append((page.name, words))
    return found


def command(program: str) -> Any:
    return typer.main.get_command(PROGRAMS[program])


def resolve(line: str) -> None:
    """Walks a command line down to its command.

    Raises:
        LookupError: a command or an option in it does not exist.
    """
    program, *words = shlex.split(line.replace("'", "").replace('"', ""))
    root = here = command(program)
    options = {option for parameter in here.params for option in (*parameter.opts, *parameter.secondary_opts)}
    while words:
        word = words.pop(0)
        # As in `apply | status | revert`: several commands where one stands, of which the first has been found.
        if word == "|":
            return
        if word.startswith("-") and word != "-":
            name = word.split("=")[0].rstrip(".,;:)")
            if name not in options and name != "--help":
                raise LookupError(f"{program} has no {name}")
        elif hasattr(here, "commands"):
            name = word.rstrip(".,;:)")
            if name not in here.commands:
                raise LookupError(f"{program} has no command {name}")
            # The root of trace-serve holds placeholders, which are loaded when they are called.
            lazy = here is root and program == "trace-serve"
            here = serve_cli._load(name) if lazy else here.commands[name]
            options |= {option for parameter in here.params for option in (*parameter.opts, *parameter.secondary_opts)}


LINES = command_lines()


def test_there_are_commands_to_check() -> None:
    assert {line.split()[0] for _, line in LINES} == {"trace-serve", "eval-gate", "make"}
    assert len(LINES) > 60


@pytest.mark.parametrize(("page", "line"), sorted({pair for pair in LINES if not pair[1].startswith("make")}))
def test_every_command_and_option_in_the_pages_exists(page: str, line: str) -> None:
    resolve(line)


@pytest.mark.parametrize(
    "line",
    ["trace-serve serve --no-such", "trace-serve no-such", "trace-serve policy no-such", "eval-gate run --no-such=1"],
)
def test_what_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(LookupError):
        resolve(line)


def test_every_make_target_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page, line in LINES:
        if line.startswith("make "):
            named = [word for word in shlex.split(line)[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
            assert set(named) <= targets, f"{page}: {line}"
