"""One arm: sample, drop what is too old or says nothing, update, refit, write a line; again."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from learner import Learner
from objective import advantages, is_fresh
from rollouts import Sample, Sampler


@dataclass(frozen=True)
class Options:
    """How long and how wide.

    Attributes:
        steps, prompts, group, tokens: updates; prompts of each; answers to each prompt; limit of an answer.
        layers, learning_rate: as `Learner`.
        lag: batches that are sampled ahead, while the trainer is still busy with an older one.
        max_version_diff: answers of weights older than this many updates are dropped.
        seed: of the prompts.
    """

    steps: int = 16
    prompts: int = 4
    group: int = 6
    tokens: int = 32
    layers: int = 15
    learning_rate: float = 5e-5
    lag: int = 0
    max_version_diff: int = 3
    seed: int = 0


class Problem(Protocol):
    """A prompt whose answers a program grades."""

    @property
    def prompt(self) -> str: ...

    def reward(self, answer: str, ended: bool) -> float: ...


class Arm:
    """One arm of the comparison, as lines of JSON.

    Args:
        path: file of the lines, written anew.
        learner: fresh.
        sampler: of an engine that serves this arm alone.
        problems: of each step.
        held_out: asked greedily before the first update and after the last.
    """

    def __init__(
        self,
        path: Path,
        learner: Learner,
        sampler: Sampler,
        options: Options,
        problems: Callable[[int], Sequence[Problem]],
        held_out: Sequence[Problem],
    ) -> None:
        self._path, self._learner, self._sampler, self._options = path, learner, sampler, options
        self._problems, self._held_out = problems, held_out

    def run(self, progress: Callable[[dict[str, Any]], None]) -> None:
        """All steps; `progress` is told each line that is written."""
        steps = self._options.steps
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._sampler.refit(self._learner.tensors, 0)
        before = self._ask_held_out()
        ahead: deque[Future[list[Sample]]] = deque()
        with ThreadPoolExecutor(1) as pool, self._path.open("w", encoding="utf-8") as file:
            for step in range(steps):
                for asked in range(step + len(ahead), min(step + self._options.lag + 1, steps)):
                    ahead.append(pool.submit(self._answers, asked))
                begin = time.monotonic()
                samples = ahead.popleft().result()
                sampled = time.monotonic()
                row = {"step": step, **self._learn(step, samples)}
                learned = time.monotonic()
                # Answers that are being sampled end under the weights that began them.
                wait(ahead)
                self._sampler.refit(self._learner.tensors, step + 1)
                times = (sampled - begin, learned - sampled, time.monotonic() - learned)
                row["seconds"] = dict(zip(("sample", "train", "refit"), times, strict=True))
                if step == 0:
                    row["held_out_before"] = before
                if step + 1 == steps:
                    row["held_out_after"] = self._ask_held_out()
                file.write(json.dumps(row) + "\n")
                file.flush()
                progress(row)

    def _answers(self, step: int) -> list[Sample]:
        return self._sampler.sample([each.prompt for each in self._problems(step) for _ in range(self._options.group)])

    def _learn(self, step: int, samples: Sequence[Sample]) -> dict[str, Any]:
        group, updates = self._options.group, step
        kept: list[Sample] = []
        advantage: list[float] = []
        rewards: list[float] = []
        stale = dropped = 0
        for index, problem in enumerate(self._problems(step)):
            mine = samples[index * group : (index + 1) * group]
            fresh = [each for each in mine if is_fresh(each.sampled_by, updates, self._options.max_version_diff)]
            rewards += [problem.reward(each.text, each.ended) for each in mine]
            stale += len(mine) - len(fresh)
            found = advantages(np.array([problem.reward(each.text, each.ended) for each in fresh]))
            if found is None:
                dropped += 1
                continue
            kept += fresh
            advantage += found.tolist()
        row: dict[str, Any] = {
            "reward": sum(rewards) / len(rewards),
            "tokens": sum(len(each.places) for each in samples),
            "version_diff": updates - min(each.sampled_by for each in samples),
            "stale": stale,
            "dropped_groups": dropped,
            "answer": samples[0].text,
        }
        if not kept:
            return row
        update = asdict(self._learner.update(kept, advantage))
        return {**row, "trained_tokens": sum(len(each.places) for each in kept), **update.pop("mismatch"), **update}

    def _ask_held_out(self) -> float:
        answers = self._sampler.sample([each.prompt for each in self._held_out], temperature=0.0)
        pairs = zip(self._held_out, answers, strict=True)
        return sum(problem.reward(each.text, each.ended) for problem, each in pairs) / len(answers)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of an arm so far; none before it has begun."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def is_complete(path: Path) -> bool:
    """Whether an arm has its last line."""
    rows = read_metrics(path)
    return bool(rows) and "held_out_after" in rows[-1]
