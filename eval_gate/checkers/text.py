"""What part of a model's text is its answer: reasoning removed, boxes and numbers found, text normalized."""

from __future__ import annotations

import re
import unicodedata

_CLOSED_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)
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
    r"""Content of the last complete `\boxed{...}`, with nested braces; None when there is none."""
    found = None
    start = text.find(r"\boxed{")
    while start != -1:
        begin = start + len(r"\boxed{")
        depth, position = 1, begin
        while position < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        if depth == 0:
            found = text[begin : position - 1]
        start = text.find(r"\boxed{", begin)
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
