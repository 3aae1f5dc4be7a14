"""Whole runs of the gate against two real HTTP servers, through the command line where it matters."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.arms.records import Role, SampleRecord, read_results
from eval_gate.cli import main
from eval_gate.keys import generate_key
from eval_gate.policy import GatePolicy
from eval_gate.run import ArmConfig, GateConfig, GateResult, run_gate
from eval_gate.signing import verify_verdict
from eval_gate.stats.rule import Outcome
from eval_gate.tally import Progress
from trace_serve.errors import ConfigError

Reports = Callable[..., dict[str, Any]]
Call = Callable[..., tuple[int, str, str]]


class Arms:
    """Two servers with the same served name: A answers right, B answers as the test says."""

    def __init__(self, start: Callable[[], Any], report: Reports, tmp_path: Path) -> None:
        self.training, self.serving = start(), start()
        self.training.report, self.serving.report = report("bf16"), report("fp4")
        self.training.answer = lambda prompt: f"It is {prompt.split()[0]}."
        self.serving.answer = self.training.answer
        self.queries = tmp_path / "q.jsonl"
        self.tmp_path = tmp_path
        self.write_queries(80)

    def write_queries(self, count: int) -> None:
        lines = [
            {
                "id": f"q{i}",
                "prompt": f"{i} is which number?",
                "max_tokens": 9,
                "checker": {"type": "numeric", "expected": i},
            }
            for i in range(count)
        ]
        self.queries.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def config(self, out: str = "out", **changes: Any) -> GateConfig:
        values: dict[str, Any] = {
            "training": ArmConfig(self.training.url),
            "serving": ArmConfig(self.serving.url),
            "queries": str(self.queries),
            "out": self.tmp_path / out,
            "timeout_s": 5.0,
        }
        return GateConfig(**(values | changes))

    def cli(self, *extra: str) -> list[str]:
        return [
            *("run", "--training", self.training.url),
            *("--serving", self.serving.url, "--queries", str(self.queries)),
            *("--out", str(self.tmp_path / "out"), *extra),
        ]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eval-gate", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def arms(start_server: Callable[[], Any], engine_report: Reports, tmp_path: Path) -> Arms:
    return Arms(start_server, engine_report, tmp_path)


def samples(result: GateResult, role: Role) -> list[SampleRecord]:
    records = read_results(result.paths.results)
    return [record for record in records if isinstance(record, SampleRecord) and record.role is role]


def test_equal_arms_pass_and_everything_is_written(arms: Arms, tmp_path: Path) -> None:
    generate_key(tmp_path / "k.pem", tmp_path / "k.pub")
    seen: list[Progress] = []
    result = run_gate(arms.config(key=tmp_path / "k.pem"), seen.append)
    assert (result.verdict.outcome, result.verdict.exit_code) == (Outcome.PASS, 0)
    assert result.paths.envelope is not None
    assert verify_verdict(result.paths.envelope, tmp_path / "k.pub") == result.verdict
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("results.jsonl", "verdict.json", "verdict.dsse.json", "report.html", "summary.md", "junit.xml"),
        "gate-policy.json",
    }
    digest = hashlib.sha256(result.paths.gate_policy.read_bytes()).hexdigest()
    assert result.verdict.subjects.gate_policy == f"sha256:{digest}"
    assert len(samples(result, Role.TRAINING)) == len(samples(result, Role.SERVING)) == 80
    assert samples(result, Role.SERVING)[0].request["temperature"] == 0.0
    assert seen[-1].done == seen[-1].total == 80
    assert seen[-1].gap == 0.0


def test_a_worse_serving_arm_blocks(arms: Arms) -> None:
    arms.serving.answer = lambda prompt: "no idea" if int(prompt.split()[0]) % 3 == 0 else prompt.split()[0]
    verdict = run_gate(arms.config()).verdict
    assert verdict.outcome is Outcome.BLOCK
    assert len(verdict.flipped) == 27
    assert verdict.subjects.serving == arms.serving.report["policy_digest"]


def test_repeats_are_sampled_for_every_query(arms: Arms) -> None:
    arms.write_queries(60)
    result = run_gate(arms.config(policy=GatePolicy(repeats=3, mode="fixed-set")))
    assert len(samples(result, Role.SERVING)) == 180
    assert "normal interval" in result.verdict.method


def test_passing_faults_do_not_change_the_verdict_and_lasting_ones_are_inconclusive(arms: Arms) -> None:
    for number in range(5):
        arms.serving.faults[f"{number} is which number?"] = [503]
    result = run_gate(arms.config())
    assert result.verdict.outcome is Outcome.PASS
    assert result.verdict.serving.attempts == 85
    for number in range(5):
        arms.serving.faults[f"{number} is which number?"] = [400]
    verdict = run_gate(arms.config("out2")).verdict
    assert (verdict.outcome, verdict.cause, verdict.exit_code) == (Outcome.INCONCLUSIVE, "errors", 2)


def test_an_unproven_serving_arm_is_not_even_sampled(arms: Arms, engine_report: Reports) -> None:
    arms.serving.report = engine_report("bf16")
    verdict = run_gate(arms.config()).verdict
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "unproven")
    assert arms.serving.prompts == []


def test_foreign_endpoints_need_to_be_allowed(arms: Arms) -> None:
    arms.training.report = arms.serving.report = None
    assert run_gate(arms.config()).verdict.cause == "unproven"
    verdict = run_gate(arms.config("out2", policy=GatePolicy(allow_unproven=True))).verdict
    assert verdict.outcome is Outcome.PASS
    assert verdict.subjects.serving is None


def test_a_different_chat_template_shows_in_the_prompt_tokens(arms: Arms) -> None:
    arms.serving.extra_prompt_tokens = -1
    arms.serving.answer = lambda prompt: "no"
    verdict = run_gate(arms.config()).verdict
    assert (verdict.outcome, verdict.cause) == (Outcome.INCONCLUSIVE, "confounded")


def test_reused_answers_belong_to_the_artifact_and_the_role(arms: Arms, engine_report: Reports) -> None:
    first = run_gate(arms.config())
    arms.serving.answer = lambda prompt: "no"
    arms.serving.report = engine_report("fp4", policy_digest="sha256:" + "e" * 64)
    for server in (arms.training, arms.serving):
        server.prompts.clear()
    second = run_gate(arms.config("out2", reuse=(first.paths.results,)))
    assert arms.training.prompts == []
    assert len(arms.serving.prompts) == 80
    assert second.verdict.outcome is Outcome.BLOCK
    assert second.verdict.training.passed == 80


def test_answers_of_an_unidentified_endpoint_are_never_taken_from_another_run(arms: Arms) -> None:
    arms.training.report = arms.serving.report = None
    policy = GatePolicy(allow_unproven=True)
    first = run_gate(arms.config(policy=policy))
    arms.training.prompts.clear()
    run_gate(arms.config("out2", policy=policy, reuse=(first.paths.results,)))
    assert len(arms.training.prompts) == 80


def test_an_interrupted_run_leaves_no_verdict_and_is_resumed(arms: Arms, tmp_path: Path) -> None:
    arms.training.delay_s = arms.serving.delay_s = 0.1
    command = [sys.executable, "-m", "eval_gate.cli", *arms.cli("--concurrency", "4")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    results = tmp_path / "out" / "results.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not results.exists() or results.read_text().count("\n") < 10):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert (
        errors.strip().splitlines()[-1]
        == "interrupted: no verdict; the results so far are kept, continue with --resume"
    )
    assert not (tmp_path / "out" / "verdict.json").exists()
    with results.open("a") as handle:
        handle.write('{"record": "sample", "cut off')
    arms.training.delay_s = arms.serving.delay_s = 0.0
    with pytest.raises(ConfigError, match="add --resume"):
        run_gate(arms.config())
    before = len(arms.training.prompts)
    result = run_gate(arms.config(resume=True))
    assert result.verdict.outcome is Outcome.PASS
    assert len(arms.training.prompts) - before < 80
    assert len(samples(result, Role.TRAINING)) == 80


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--queries", "no-such-suite"), "no-such-suite: no such file, and no suite of that name; suites are support"),
        (("--margin", "0"), "--margin"),
        (("--margin", "five"), "--margin"),
        (("--rule", "vibes"), "--rule"),
        (("--key", "/nonexistent.pem"), "--key /nonexistent.pem: cannot be read"),
        (("--training-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE: not set"),
        (("--serving", "/nonexistent"), "--serving '/nonexistent': neither a URL"),
        (("--serving", "http://user:secret@host/"), "carries a password"),
        (("--reuse", "/nonexistent.jsonl"), "/nonexistent.jsonl: cannot be read"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_input_is_one_line_exit_code_3_and_writes_nothing(
    arms: Arms, tmp_path: Path, call: Call, extra: tuple[str, ...], message: str
) -> None:
    code, _, errors = call(*arms.cli(*extra))
    assert code == 3
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert "secret@" not in errors
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert arms.training.prompts == []


def test_an_unreachable_arm_is_infrastructure(arms: Arms, call: Call) -> None:
    code, _, errors = call(*arms.cli("--serving", "http://127.0.0.1:9"))
    assert code == 4
    assert "is the server running" in errors


def test_the_commands_work_together(arms: Arms, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_KEY", "k")
    key, envelope = tmp_path / "gate.pem", tmp_path / "out" / "verdict.dsse.json"
    assert call("keygen", str(key))[0] == 0
    code, out, _ = call(*arms.cli("--key", str(key), "--json", "--serving-key-env", "GATE_KEY"))
    assert (code, json.loads(out)["outcome"]) == (0, "PASS")
    assert arms.serving.authorizations[-1] == "Bearer k"
    code, out, _ = call("verify", str(envelope), "--public-key", f"{key}.pub")
    assert code == 0
    assert out.startswith("signature valid: PASS")
    files = ["--queries", str(arms.queries), "--gate-policy", str(envelope.with_name("gate-policy.json"))]
    files += ["--results", str(envelope.with_name("results.jsonl"))]
    code, out, _ = call("verify", str(envelope), "--public-key", f"{key}.pub", *files)
    assert (code, [line.split()[0] for line in out.splitlines()[-3:]]) == (0, ["queries", "gate", "results"])
    arms.queries.write_text(arms.queries.read_text() + "\n")
    code, _, errors = call("verify", str(envelope), "--public-key", f"{key}.pub", *files)
    assert (code, errors.startswith("error: queries: "), errors.count("\n")) == (3, True, 1)
    envelope.write_text("{}")
    code, _, errors = call("verify", str(envelope), "--public-key", f"{key}.pub")
    assert (code, errors.count("\n")) == (3, 1)
