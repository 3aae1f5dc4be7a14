"""Texts of models and files as every report shows them: no control characters, and cut where it is said."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text on one line, where what a terminal would act on is a visible mark instead."""
    return "".join(char if char.isprintable() else "␤" if char == "\n" else "�" for char in text)


def excerpt(text: str, place: int, limit: int = 160) -> tuple[str, str, str]:
    """One line of at most about `limit` characters around a place: before, in and after the word there."""
    head, token, tail = first_token(text, place)
    before = limit // 3
    shown_head = head if len(head) <= before else "…" + head[-before:]
    shown_token = token if len(token) <= limit // 2 else token[: limit // 2] + "…"
    rest = max(0, limit - len(shown_head) - len(shown_token))
    shown_tail = "" if shown_token != token else tail if len(tail) <= rest else tail[:rest] + "…"
    return one_line(shown_head), one_line(shown_token), one_line(shown_tail)


def first_token(text: str, place: int) -> tuple[str, str, str]:
    """Text before, in and after the token at a place, cut at white space."""
    start = place
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    end = max(place, start)
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[:start], text[start:end], text[end:]


def clipped(text: str, limit: int) -> str:
    """The text, or its beginning and a mark that it goes on."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
