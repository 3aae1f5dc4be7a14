"""A task whose reward a program can check and a small model can learn: one sentence that contains a given word."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TOPIC_LIST = (
    "the sea|a dog|winter|bread|a train|the moon|music|a garden|school|rain|a friend|the city|coffee|a book|the forest|"
    "a river|summer|a bicycle|the kitchen|a bridge|snow|a market|the library|a bird|tea|a mountain|the night|a boat"
)
_WORD_LIST = (
    "blue|small|always|green|fast|old|happy|water|light|never|warm|quiet|home|under|golden|strong|new|slow|bright|early|"
    "cold|young|far|sweet|open|red|soft|again"
)
_TOPICS, _WORDS = _TOPIC_LIST.split("|"), _WORD_LIST.split("|")
_HELD_OUT = 6
"""Topics, and words, at the end of each list that training never shows."""
MIN_WORDS = 5


@dataclass(frozen=True)
class Problem:
    """One prompt."""

    topic: str
    word: str

    @property
    def prompt(self) -> str:
        return f'Write one sentence about {self.topic}. Use the word "{self.word}".'

    def reward(self, answer: str, ended: bool) -> float:
        """Half for the word, half for a sentence: five words or more, a full stop, and an end before the limit."""
        says = re.search(rf"\b{self.word}\b", answer, re.IGNORECASE) is not None
        closes = re.search(r"[.!?][\"”']?$", answer.strip()) is not None
        return 0.5 * says + 0.5 * (ended and closes and len(answer.split()) >= MIN_WORDS)


def training_problems(seed: int, count: int, step: int) -> list[Problem]:
    """`count` problems of one step; the same arguments give the same ones."""
    chance = random.Random(f"{seed}/{step}")
    topics, words = _TOPICS[:-_HELD_OUT], _WORDS[:-_HELD_OUT]
    return [Problem(chance.choice(topics), chance.choice(words)) for _ in range(count)]


def held_out_problems() -> list[Problem]:
    """36 problems whose topics and words training never shows."""
    return [Problem(topic, word) for topic in _TOPICS[-_HELD_OUT:] for word in _WORDS[-_HELD_OUT:]]
