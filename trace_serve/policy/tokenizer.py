"""Digests of what turns a conversation into token ids: the tokenizer's files and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trace_serve.errors import PolicyError
from trace_serve.policy.digest import digest_bytes, digest_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
CHAT_TEMPLATE_FILE = "chat_template.jinja"


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        PolicyError: unreadable, not JSON, or not an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise PolicyError(f"{path}: cannot be read ({exc.strerror})", field=path.name) from exc
    except ValueError as exc:
        raise PolicyError(f"{path}: not JSON: {exc}", field=path.name) from exc
    if not isinstance(raw, dict):
        raise PolicyError(f"{path}: got {type(raw).__name__}, expected a JSON object", field=path.name)
    return raw


def tokenizer_digest(directory: Path | str) -> str:
    """The digest of a directory's tokenizer files, chat template excluded.

    `tokenizer_config.json` counts without its `chat_template` key, so that a template kept there or in its own file
    gives the same tokenizer digest.

    Raises:
        PolicyError: no tokenizer file, or a bad `tokenizer_config.json`.
    """
    root = Path(directory)
    rows = []
    for name in TOKENIZER_FILES:
        path = root / name
        if not path.is_file():
            continue
        if name == "tokenizer_config.json":
            config = read_json_object(path)
            config.pop("chat_template", None)
            digest = digest_bytes(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
        else:
            digest = digest_file(path)
        rows.append([name, digest])
    if not rows:
        raise PolicyError(f"{root}: no tokenizer file, expected one of {', '.join(TOKENIZER_FILES)}", field="tokenizer")
    return digest_bytes(json.dumps(rows, separators=(",", ":")).encode())


def chat_template_digest(directory: Path | str) -> str:
    """The digest of the chat template's text: `chat_template.jinja`, else the key in `tokenizer_config.json`.

    A directory without a template has the digest of the empty string.

    Raises:
        PolicyError: a bad `tokenizer_config.json`, or a template of an unknown form.
    """
    root = Path(directory)
    path = root / CHAT_TEMPLATE_FILE
    if path.is_file():
        return digest_file(path)
    config = root / "tokenizer_config.json"
    template = read_json_object(config).get("chat_template") if config.is_file() else None
    if template is None:
        return digest_bytes(b"")
    if isinstance(template, str):
        return digest_bytes(template.encode())
    if isinstance(template, list):
        return digest_bytes(json.dumps(template, sort_keys=True, separators=(",", ":")).encode())
    raise PolicyError(
        f"{config}: chat_template is {type(template).__name__}, expected a string or a list", field="chat_template"
    )
