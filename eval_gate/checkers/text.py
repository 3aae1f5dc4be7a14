"""What part of a model's text is its answer: reasoning removed, boxes and numbers found, text normalized."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

_CLOSED_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_ALIASES = {"python": ("py", "python3")}
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+−]?\.\d+")


def strip_reasoning(text: str) -> str:
    """The text without `<think>...</think>`.

    A block that never closes hides everything after it (the answer was cut off inside the reasoning); a closing tag
    without an opening one (the template opened it in the prompt) hides everything before it.
    """
    text = _CLOSED_REASONING.sub("", text)
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    return text.split("<think>", 1)[0].strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` or `\fbox{...}`, nested braces kept; None when there is none."""
    begins: list[int | None] = []
    found: str | None = None
    for match in _BRACE.finditer(text):
        if match.group() == "}":
            begin = begins.pop() if begins else None
            # A box around others closes last, so it replaces what was found inside it.
            if begin is not None:
                found = text[begin : match.start()]
        elif match.group().endswith("{") and not match.group().startswith("\\{"):
            begins.append(match.end() if len(match.group()) > 1 else None)
    return found


def numbers(text: str) -> list[float]:
    """Every decimal number in the text, in order; thousands may be separated by commas."""
    out = []
    for match in _NUMBER.finditer(text):
        before = text[match.start() - 1] if match.start() else " "
        literal = match.group().replace(",", "").replace("−", "-")
        # In "7-3" or "AB-12" the sign is a separator.
        if literal[0] in "+-" and (before.isalnum() or before == ")"):
            literal = literal[1:]
        out.append(float(literal))
    return out


def normalize(text: str) -> str:
    """NFKC, case-folded, punctuation at the ends of words dropped, white space collapsed."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = (word.strip(".,;:!?\"'`*()[]{}<>") for word in folded.split())
    return " ".join(word for word in words if word)


def find_word(needle: str, text: str) -> int:
    """Index of `needle` as whole words in `text` (both already in the same case), or -1."""
    match = re.search(rf"(?<!\w){re.escape(needle)}(?!\w)", text)
    return match.start() if match else -1


def first_json(text: str, opening: str = "{[") -> dict[str, Any] | list[Any] | None:
    """The first JSON object or array (`opening` may leave one out) amid prose or code fences; None without one."""
    decoder = json.JSONDecoder()
    for match in re.finditer(f"[{re.escape(opening)}]", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(value, dict | list):
            return value
    return None


def last_code_block(text: str, language: str) -> str:
    """The last fenced block in `language` or without one; the whole text when it has no fence."""
    names = {"", language, *_ALIASES.get(language, ())}
    blocks = [match["code"] for match in _FENCE.finditer(text) if match["language"].casefold() in names]
    return blocks[-1] if blocks else text
