"""Writes the shipped query sets: `python -m eval_gate.suites.generate --seed 20261 [--out DIR]`.

`support.jsonl` is what a release is judged on; `support-dev.jsonl` has other items made from the other half of the
material and is for choosing a recipe, so that a recipe is never chosen on the queries it is judged by.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from eval_gate.suites import material

DEFAULT_SEED = 20261
COUNTS = {"routing": 100, "extraction": 84, "arithmetic": 92, "facts": 40, "sentiment": 84}
"""Queries of each kind in one set, 400 in all: at 4 % discordant pairs and a margin of 5 points the gate passes a loss
below about 3.3; with 240 it would have to be below 2.9."""

T = TypeVar("T")
Query = dict[str, Any]
Turn = tuple[str, str]


def half(items: tuple[T, ...], which: int) -> list[T]:
    """Every second item, starting at `which` (0 = shipped, 1 = development)."""
    return list(items[which::2])


def chat(turns: tuple[Turn, ...], question: str, system: str | None = None) -> list[dict[str, str]]:
    """Few-shot examples as earlier turns of the conversation, then the question.

    The examples of one kind never change, so an engine with a prefix cache computes them once.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*messages, {"role": "user", "content": question}]


def routing(rng: random.Random, which: int) -> Iterator[Query]:
    teams = list(material.ROUTING)
    products = half(material.PRODUCTS, which)
    tickets = {
        team: [text.format(p=p) for text in half(texts, which) for p in products]
        for team, texts in material.ROUTING.items()
    }
    for texts in tickets.values():
        rng.shuffle(texts)
    for index in range(COUNTS["routing"]):
        team = teams[index % len(teams)]
        yield {
            "messages": chat(
                material.ROUTING_SHOTS,
                tickets[team].pop(),
                "Name the team for the ticket: billing, shipping, technical or account.",
            ),
            "max_tokens": 8,
            "checker": {"type": "choice", "options": teams, "expected": team},
        }


def _ticket(rng: random.Random, which: int) -> dict[str, str]:
    first = rng.choice(half(material.FIRST_NAMES, which))
    last = rng.choice(half(material.LAST_NAMES, which))
    return {
        "product": rng.choice(half(material.PRODUCTS, which)),
        "order": "".join(rng.choices("ABCDEFGHJKLMNPRSTUVWXYZ", k=2)) + f"-{rng.randint(1000, 9999)}",
        "email": f"{first}.{last}@{rng.choice(material.DOMAINS)}",
        "amount": f"{rng.randint(5, 180)}.{rng.randint(10, 99)}",
        "date": f"{rng.choice(half(material.MONTHS, which))} {rng.randint(1, 28)}",
    }


TICKETS = (
    "Order {order} from {date}: the {product} cost ${amount}. Reply to {email}.",
    "I am {email}. On {date} I paid ${amount} for the {product}, order {order}.",
    "The {product} of order {order} is late. I paid ${amount} on {date}. My address is {email}.",
    "Bought a {product} on {date} for ${amount}. Contact: {email}. Order: {order}.",
)
FIELDS = {"order": "order number", "email": "e-mail address", "amount": "amount paid", "date": "date"}


def extraction(rng: random.Random, which: int) -> Iterator[Query]:
    fields = list(FIELDS)
    seen: set[tuple[str, str]] = set()
    index = 0
    while index < COUNTS["extraction"]:
        field = fields[index % len(fields)]
        facts, example = _ticket(rng, which), _ticket(rng, which)
        if (field, facts[field]) in seen:
            continue
        seen.add((field, facts[field]))
        text, shot = rng.sample(TICKETS, 2)
        as_json = index % 6 == 5
        if as_json:
            ask = f'Give the {FIELDS[field]} of this ticket as JSON with the key "{field}".\nTicket: '
            answer = json.dumps({field: example[field]})
        else:
            ask = f"What is the {FIELDS[field]} in this ticket?\nTicket: "
            answer = example[field]
        yield {
            "messages": chat(((ask + shot.format(**example), answer),), ask + text.format(**facts)),
            "max_tokens": 24,
            "checker": _extraction_checker(field, facts[field], as_json),
        }
        index += 1


def _extraction_checker(field: str, expected: str, as_json: bool) -> dict[str, Any]:
    if as_json:
        return {"type": "json", "path": field, "expected": expected}
    if field == "amount":
        return {"type": "numeric", "expected": float(expected)}
    if field == "date":
        return {"type": "normalized", "expected": expected}
    return {"type": "contains", "expected": expected}


def arithmetic(rng: random.Random, which: int) -> Iterator[Query]:
    """Sums, differences and products; `a` has the parity of `which`, so the two sets share no item."""
    seen: set[str] = set()
    operations: tuple[tuple[str, int, int, Callable[[int, int], int]], ...] = (
        ("+", 40, 30, lambda a, b: a + b),
        ("-", 40, 12, lambda a, b: a - b),
        ("*", 9, 9, lambda a, b: a * b),
        ("+", 12, 9, lambda a, b: a + b),
    )
    index = 0
    while index < COUNTS["arithmetic"]:
        sign, top_a, top_b, compute = operations[index % len(operations)]
        a, b = rng.randint(2, top_a), rng.randint(2, top_b)
        key = f"{a} {sign} {b}"
        if a % 2 != which or key in seen or (sign == "-" and b > a):
            continue
        seen.add(key)
        yield {
            "messages": chat(material.ARITHMETIC_SHOTS, f"What is {key}?"),
            "max_tokens": 12,
            "checker": {"type": "numeric", "expected": compute(a, b)},
        }
        index += 1


def facts(rng: random.Random, which: int) -> Iterator[Query]:
    capitals = half(material.CAPITALS, which)
    opposites = half(material.OPPOSITES, which)
    rng.shuffle(capitals)
    rng.shuffle(opposites)
    many = COUNTS["facts"] - len(opposites)
    for country, capital in capitals[:many]:
        yield {
            "messages": chat((), f"What is the capital of {country}?"),
            "max_tokens": 16,
            "checker": {"type": "contains", "expected": capital},
        }
    for word, opposite in opposites:
        yield {
            "messages": chat((), f"What is the opposite of {word}?"),
            "max_tokens": 16,
            "checker": {"type": "contains", "expected": opposite, "whole_word": True},
        }


def sentiment(rng: random.Random, which: int) -> Iterator[Query]:
    products = half(material.PRODUCTS, which)
    labels = {"good": material.POSITIVE, "bad": material.NEGATIVE}
    names = list(labels)
    reviews = {
        name: [text.format(p=p) for text in half(texts, which) for p in products] for name, texts in labels.items()
    }
    for texts in reviews.values():
        rng.shuffle(texts)
    for index in range(COUNTS["sentiment"]):
        name = names[index % len(names)]
        yield {
            "messages": chat(material.SENTIMENT_SHOTS, reviews[name].pop(), "Is the review good or bad?"),
            "max_tokens": 8,
            "checker": {"type": "choice", "options": names, "expected": name},
        }


KINDS: dict[str, Callable[[random.Random, int], Iterator[Query]]] = {
    "routing": routing,
    "extraction": extraction,
    "arithmetic": arithmetic,
    "facts": facts,
    "sentiment": sentiment,
}


def build(suite: str, which: int, seed: int) -> list[Query]:
    """All queries of one set; the same seed gives the same bytes."""
    queries: list[Query] = []
    for kind, make in KINDS.items():
        rng = random.Random(f"{seed}/{which}/{kind}")
        for number, body in enumerate(make(rng, which)):
            queries.append({"id": f"{suite}-{kind}-{number:03d}", "suite": suite, "kind": kind, **body})
    return queries


def dump(queries: list[Query]) -> str:
    return "".join(json.dumps(query, ensure_ascii=False) + "\n" for query in queries)


def main() -> None:
    parser = argparse.ArgumentParser(description="write the shipped query sets")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    for which, suite in enumerate(("support", "support-dev")):
        path = arguments.out / f"{suite}.jsonl"
        path.write_text(dump(build(suite, which, arguments.seed)), encoding="utf-8")
        print(f"{path}: {sum(COUNTS.values())} queries")


if __name__ == "__main__":
    main()
