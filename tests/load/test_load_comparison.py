"""Two arms in interleaved blocks, on arms whose true ratio is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_load_totals import exchange, report, totals

from trace_serve.load.bootstrap import ratio
from trace_serve.load.compare import Arm, Comparison, compare
from trace_serve.load.exchange import Labels
from trace_serve.load.files import write_report
from trace_serve.load.plan import LoadPlan, make_plan
from trace_serve.load.render_many import comparison_html
from trace_serve.load.report import LoadReport

A, B = Arm(name="bf16", host="http://a"), Arm(name="fp4", host="http://b", changes={"hints": "on"})


def mean(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.mean(axis=-1))


def rounds(true: float, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Blocks whose machine noise differs by round, and whose queries differ by arrival, as in real runs."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        queries = generator.lognormal(0, 0.5, 60)
        a, b = (queries * generator.lognormal(0, 0.1) * generator.lognormal(0, 0.1, 60) for _ in range(2))
        made.append((a, b * true))
    return made


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    found = [ratio("x", rounds(1.3, 6, seed), mean, seed=0) for seed in range(25)]
    assert sum(each.low <= 1.3 <= each.high for each in found if each.low and each.high) >= 20
    assert all(each.low and each.high and each.low < each.ratio < each.high for each in found)


def test_one_round_has_a_ratio_and_no_interval() -> None:
    only = ratio("x", rounds(2.0, 1, 0), mean, seed=0)
    assert (only.low, only.high) == (None, None)
    assert only.ratio == pytest.approx(2.0, rel=0.5)


class Blocks:
    """Runs no server: arm B takes twice as long to its first token."""

    def __init__(self, digests: tuple[str, ...] = ("sha256:b",)) -> None:
        self.order: list[str] = []
        self.seeds: list[int] = []
        self._digests = digests

    def __call__(self, arm: Arm, plan: LoadPlan, directory: Path) -> LoadReport:
        self.order.append(arm.name)
        self.seeds.append(plan.seed)
        assert plan.hints == ("on" if arm is B else "off")
        digest = self._digests[len(self.order) % len(self._digests)] if arm is B else "sha256:a"
        late = 0.2 if arm is B else 0.0
        made = totals(
            [
                exchange(index, first_s=index / 10 + 0.201 + late, end_s=index / 10 + 1.201 + late,
                         labels=Labels(digest=digest))
                for index in range(20, 40)
            ]
        )  # fmt: skip
        directory.mkdir()
        concluded = report(made)
        write_report(directory, concluded, made.rows)
        return concluded


def compared(tmp_path: Path, blocks: Blocks) -> Comparison:
    plan = make_plan({"arrivals": "constant", "rate": 10, "seed": 7})
    return compare(A, B, plan, 4, tmp_path, blocks)


def test_arms_take_turns_and_share_the_seed_of_a_round(tmp_path: Path) -> None:
    blocks = Blocks()
    compared(tmp_path, blocks)
    assert blocks.order == ["bf16", "fp4", "fp4", "bf16", "bf16", "fp4", "fp4", "bf16"]
    assert blocks.seeds == [7, 7, 8, 8, 9, 9, 10, 10]


def test_ratios_are_of_the_second_arm_over_the_first(tmp_path: Path) -> None:
    result = compared(tmp_path, Blocks())
    ratios = {each.name: each for each in result.ratios}
    assert ratios["TTFT mean ms"].ratio == pytest.approx(2.0, rel=1e-3)
    assert ratios["TPOT mean ms"].ratio == pytest.approx(1.0, rel=1e-3)
    assert result.pairs == 80
    assert result.exit_code == 0
    assert "TTFT p50 ms" in comparison_html(result)


def test_an_arm_of_two_versions_makes_a_comparison_invalid(tmp_path: Path) -> None:
    result = compared(tmp_path, Blocks(digests=("sha256:b", "sha256:c")))
    assert result.exit_code == 2
    assert any("fp4: more than one version answered" in reason for reason in result.invalid)
