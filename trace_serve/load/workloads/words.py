"""Prompts of common words: long prefixes that requests share, and long prompts that share nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_serve.load.plan import LoadPlan
from trace_serve.load.workloads.base import CHAT, Request, Workload

DEFAULT_MAX_TOKENS = 64
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "kid", "body", "back",
]  # fmt: skip


def text(seed: Sequence[int], count: int) -> str:
    """`count` words, equal for equal seeds. Common words are about a token each in the usual vocabularies."""
    chosen = np.random.default_rng(list(seed)).integers(len(WORDS), size=count)
    return " ".join(WORDS[word] for word in chosen)


class SharedPrefix(Workload):
    """`--prefix-groups` system prompts of `--prefix-words` words, each request one and a question of its own."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(plan)
        self._prefixes = [text([plan.seed, 2, group], plan.prefix_words) for group in range(plan.prefix_groups)]

    def request(self, index: int) -> Request:
        own = np.random.default_rng([self._plan.seed, 3, index])
        prefix = self._prefixes[int(own.integers(len(self._prefixes)))]
        question = f"Question {index}: what do {text([self._plan.seed, 4, index], 8)} have in common?"
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
        return self.finish(CHAT, {"messages": messages, "max_tokens": DEFAULT_MAX_TOKENS})


class LongContext(Workload):
    """Prompts of `--prompt-words` words that differ from the first one on, so that no prefix cache helps."""

    def request(self, index: int) -> Request:
        prompt = f"{index}. {text([self._plan.seed, 5, index], self._plan.prompt_words)}\nSummarize this."
        messages = [{"role": "user", "content": prompt}]
        return self.finish(CHAT, {"messages": messages, "max_tokens": DEFAULT_MAX_TOKENS})
