"""Scores answers with the generator that made the question, by `reasoning-gym` (extra `gate-suites`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from eval_gate.checkers import text
from eval_gate.checkers.outcome import Grade


def score(answer: str, *, task: str, entry: dict[str, Any], threshold: float = 1.0) -> tuple[bool, str | None]:
    r"""Right when the task's own scorer gives the answer at least `threshold`.

    The text inside the last `<answer>` tags, else inside the last `\boxed{}`, else the whole answer is scored.

    Args:
        task: name of the generator.
        entry: the item as generated: `question`, `answer` and `metadata`.
        threshold: smallest score of a right answer, in (0, 1].
    """
    grade = _extract(answer)
    reached = float(_scorer(task).score_answer(answer=grade, entry=entry))
    return Grade(reached >= threshold, grade[:500])


def _extract(answer: str) -> str:
    tagged = answer.rpartition("<answer>")
    if tagged[1]:
        return tagged[2].partition("</answer>")[0].strip()
    boxed = text.last_boxed(answer)
    return answer.strip() if boxed is None else boxed.strip()


@lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)
