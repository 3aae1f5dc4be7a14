"""MkDocs hook: the pages in their order, each under its own heading, and no page left out.

A page that is not named here comes last, under `Further pages`; a name without a page is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("index", "faq"),
    "Serve": (
        "serving",
        "models",
        "checkpoints",
        "hints",
        "refit",
        "policies",
        "remote-engines",
        "operations",
        "security",
    ),
    "Gate": ("gate-queries", "gate-statistics", "verdict", "attribute", "gate-in-a-pipeline"),
    "Train": ("trainers", "syndrome-hints", "mismatch", "rl-example"),
    "Deploy": ("deployment", "load-tests", "upgrading-sglang"),
    "Inside": ("architecture", "kernels", "engine-speed", "server-speed", "sample-recipes", "benchmarks"),
}


def pages(directory: Path) -> list[dict[str, list[str]]]:
    """The nav of the pages in a directory.

    Raises:
        FileNotFoundError: a page is named and not there.
    """
    there = {path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.md")}
    named = {name for names in SECTIONS.values() for name in names}
    if missing := named - there:
        raise FileNotFoundError(
            f"tools/docs_nav.py names {', '.join(sorted(missing))}; there is no such page in {directory}"
        )
    nav = [{title: [f"{name}.md" for name in names]} for title, names in SECTIONS.items()]
    if further := sorted(there - named):
        nav.append({"Further pages": [f"{name}.md" for name in further]})
    return nav


def on_config(config: Any) -> Any:
    config.nav = pages(Path(config.docs_dir))
    return config
