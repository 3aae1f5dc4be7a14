"""The parts of the GRPO example that need no engine: objective, task, command line and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run
import torch
from loop import Options
from objective import advantages, is_fresh, mismatch, policy_loss
from report import page, summary
from task import Problem, held_out_problems, training_problems

from trace_serve.errors import ConfigError
from trace_serve.policy.manifest import Policy


def test_advantages_have_mean_zero_and_unit_variance_and_keep_the_order() -> None:
    found = advantages(np.array([0.0, 0.5, 0.5, 1.0]))
    assert found is not None
    np.testing.assert_allclose(found, np.array([-1.0, 0.0, 0.0, 1.0]) * np.sqrt(2))


@pytest.mark.parametrize("rewards", [[], [0.5], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3]])
def test_a_group_without_differences_has_no_advantages(rewards: list[float]) -> None:
    assert advantages(np.array(rewards)) is None


def test_the_loss_has_the_gradient_of_weighted_log_probabilities_and_weights_end_at_the_clip() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -4.0, -0.2, -1.0])
    advantage = torch.tensor([1.0, 1.0, -2.0, -1.0])
    policy_loss(logp, rollout, advantage, clip=5.0).backward()
    ratio = (logp.detach() - rollout).exp()
    assert ratio[1] > 5
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -ratio.clamp(max=5.0) * advantage / 4)


def test_mismatch_counts_ratios_outside_both_bounds() -> None:
    found = mismatch(torch.tensor([0.0, 2.0, -2.0, 0.1]), torch.zeros(4))
    assert found["clipped"] == 0.5
    assert found["abs_delta"] == pytest.approx(4.1 / 4)
    assert found["ratio_max"] == pytest.approx(np.exp(2))
    assert found["k3"] == pytest.approx(np.mean([np.exp(d) - 1 - d for d in (0, 2, -2, 0.1)]), rel=1e-5)


@pytest.mark.parametrize(("sampled_by", "fresh"), [(7, True), (5, True), (4, False)])
def test_weights_learn_from_answers_of_at_most_the_given_age(sampled_by: int, fresh: bool) -> None:
    assert is_fresh(sampled_by, updates=7, max_version_diff=2) is fresh


@pytest.mark.parametrize(
    ("answer", "ended", "reward"),
    [
        ("The sea is blue in summer.", True, 1.0),
        ('He said: "The sea is Blue!"', True, 1.0),
        ("The sea is blue in summer", True, 0.5),
        ("The sea is blue in summer.", False, 0.5),
        ("The sea is bluest in summer.", True, 0.5),
        ("Blue sea.", True, 0.5),
        ("", True, 0.0),
    ],
)
def test_half_the_reward_is_for_the_word_and_half_for_a_sentence(answer: str, ended: bool, reward: float) -> None:
    assert Problem("the sea", "blue").reward(answer, ended) == reward


def test_problems_of_a_step_are_reproducible_and_never_held_out() -> None:
    shown = [problem for step in range(50) for problem in training_problems(0, 8, step)]
    assert shown == [problem for step in range(50) for problem in training_problems(0, 8, step)]
    assert shown != [problem for step in range(50) for problem in training_problems(1, 8, step)]
    held_out = held_out_problems()
    assert len(held_out) == len(set(held_out)) == 36
    assert not {each.topic for each in shown} & {each.topic for each in held_out}
    assert not {each.word for each in shown} & {each.word for each in held_out}


def line(step: int, reward: float, **more: Any) -> dict[str, Any]:
    learned = {"abs_delta": 0.5, "k3": 0.1, "ratio_max": 4.0, "clipped": 0.25, "loss": 0.1, "grad_norm": 2.0}
    return {"step": step, "reward": reward, "trained_tokens": 10, **learned, **more}


def test_the_summary_weighs_steps_by_their_tokens_and_passes_over_steps_without_an_update() -> None:
    rows = [line(0, 0.2, held_out_before=0.3), line(1, 0.4, k3=0.4, trained_tokens=30), {"step": 2, "reward": 0.6}]
    found = summary([*rows, line(3, 0.8, ratio_max=9.0, held_out_after=0.7, trained_tokens=0)])
    assert found["k3"] == pytest.approx((0.1 * 10 + 0.4 * 30) / 40)
    assert found["largest ratio"] == 9.0
    assert (found["reward, first quarter"], found["last quarter"]) == (0.2, 0.8)
    assert (found["held out, before"], found["after"]) == (0.3, 0.7)


def test_complete_arms_are_drawn_without_an_engine_and_other_options_are_refused(
    fp4_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arm in ("qat", "trace"):
        rows = [line(0, 0.2, held_out_before=0.3), {"step": 1, "reward": 0.4, "held_out_after": 0.5}]
        (tmp_path / f"{arm}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--out", str(tmp_path), "--policy", str(fp4_policy.path)]
    monkeypatch.setattr(run, "EngineProcess", None)
    run.run(run.arguments(words))
    text = (tmp_path / "index.html").read_text("utf-8")
    assert text.count("<svg") == 7
    assert "vanilla QAT" in text
    assert "http" not in text
    with pytest.raises(ConfigError, match="--learning-rate"):
        run.run(run.arguments([*words, "--learning-rate", "0.1"]))


def test_an_arm_that_never_learned_leaves_charts_out() -> None:
    text = page({"trace": [{"step": 0, "reward": 0.0}]}, {"steps": 1}, "a<b@1")
    assert text.count("<svg") == 1
    assert "a&lt;b@1" in text


def test_every_option_of_the_loop_is_on_the_command_line() -> None:
    given = run.arguments(["--steps", "3", "--learning-rate", "1e-3", "--max-version-diff", "0"])
    assert (given.steps, given.learning_rate, given.max_version_diff) == (3, 1e-3, 0)
    assert given.group == Options().group
