"""Which files a policy may consist of: data that is parsed, never code or pickles that are run."""

from __future__ import annotations

from pathlib import Path

from trace_serve.errors import PolicyError
from trace_serve.policy.digest import list_files

SUFFIXES = frozenset({".jinja", ".json", ".md", ".model", ".safetensors", ".tiktoken", ".txt"})
"""Weights, configuration, tokenizers, chat templates and texts about the model."""
TEXTS = ("license", "notice", "readme")
"""Names of texts that may come without a suffix."""


def check_contents(directory: Path) -> None:
    """Refuses what no part of a policy is, so that nothing rides along under its digest and verdict.

    Raises:
        PolicyError: a file of another kind (code, a pickle, an archive), a symlink, a special or a hidden file.
    """
    for path in list_files(directory):
        if path.suffix.lower() in SUFFIXES or (not path.suffix and path.name.lower().startswith(TEXTS)):
            continue
        name = path.relative_to(directory).as_posix()
        raise PolicyError(
            f"{directory}: {name} is not a file that a policy consists of ({', '.join(sorted(SUFFIXES))}, licence and "
            "notice); code and pickles are never served, remove it and build the policy again",
            field=name,
        )
