"""Production serves exactly the policy that a signed, passing verdict names, and says why it refuses any other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from signed_policy import Keys, sign, write_policy
from typer.testing import CliRunner

from eval_gate.stats.rule import Outcome
from trace_serve.errors import ConfigError, EngineError, PolicyError, TraceServeError, VerdictRefused
from trace_serve.policy import Policy, load_policy
from trace_serve.server.authorization import authorize_policy, default_verdict_path
from trace_serve.server.cli import serve
from trace_serve.server.process import ServerProcess


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return write_policy(tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def refusal(policy: Policy, keys: Keys, verdict: Path | None = None) -> TraceServeError:
    with pytest.raises(TraceServeError) as caught:
        authorize_policy(policy.path, mode="production", verdict=verdict, public_key=keys.public)
    assert caught.value.exit_code == 3
    return caught.value


def test_a_passing_verdict_beside_the_policy_lets_it_in(policy: Policy, keys: Keys) -> None:
    sign(policy, keys, default_verdict_path(policy.path))
    authorization = authorize_policy(policy.path, mode="production", public_key=keys.public)
    assert authorization.label == "tiny@1"
    assert authorization.digest == policy.digest
    assert authorization.verdict_id is not None
    assert authorization.verdict_id.startswith("sha256:")


def test_the_default_verdict_of_a_relative_path_lies_beside_it(
    policy: Policy, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(policy, keys, policy.path.with_name("policy.verdict.dsse.json"))
    monkeypatch.chdir(policy.path)
    assert authorize_policy(Path(), mode="production", public_key=keys.public).verdict_id


def test_no_verdict_is_a_refusal_in_production_only(policy: Policy, keys: Keys) -> None:
    assert isinstance(refusal(policy, keys), VerdictRefused)
    assert authorize_policy(policy.path, mode="rollout").verdict_id is None


def test_production_needs_a_pinned_key(policy: Policy, keys: Keys) -> None:
    sign(policy, keys, default_verdict_path(policy.path))
    with pytest.raises(ConfigError, match="--public-key"):
        authorize_policy(policy.path, mode="production")


@pytest.mark.parametrize("outcome", [Outcome.BLOCK, Outcome.INCONCLUSIVE])
def test_a_verdict_that_does_not_pass_refuses_with_its_reason(
    policy: Policy, keys: Keys, tmp_path: Path, outcome: Outcome
) -> None:
    verdict = sign(policy, keys, tmp_path / "v.json", outcome=outcome, exit_code=1, reasons=("the gap is 9 points",))
    assert "the gap is 9 points" in str(refusal(policy, keys, verdict))


def test_a_verdict_signed_by_another_key_is_refused(policy: Policy, keys: Keys, tmp_path: Path) -> None:
    verdict = sign(policy, Keys(tmp_path, "other"), tmp_path / "v.json")
    assert "signature" in str(refusal(policy, keys, verdict))


def test_an_expired_verdict_is_refused(policy: Policy, keys: Keys, tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(days=2)
    verdict = sign(policy, keys, tmp_path / "v.json", created=before, expires=before + timedelta(days=1))
    assert "expired" in str(refusal(policy, keys, verdict))


@pytest.mark.parametrize("field", ["recipe_id", "policy_name", "policy_version"])
def test_a_verdict_about_another_policy_is_refused(policy: Policy, keys: Keys, tmp_path: Path, field: str) -> None:
    verdict = sign(policy, keys, tmp_path / "v.json", **{field: "other"})
    assert "other" in str(refusal(policy, keys, verdict))


def test_a_policy_altered_after_the_verdict_is_refused(policy: Policy, keys: Keys, tmp_path: Path) -> None:
    verdict = sign(policy, keys, tmp_path / "v.json")
    weights = policy.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "digest" in str(refusal(load_policy(policy.path), keys, verdict))


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        authorize_policy(tmp_path, mode="rollout")


@pytest.mark.parametrize("key", ["recipe_id", "policy_digest"])
def test_an_engine_that_reports_something_else_is_not_served(policy: Policy, key: str) -> None:
    authorization = authorize_policy(policy.path, mode="rollout")
    report = {"recipe_id": policy.recipe_id, "policy_digest": policy.digest}
    authorization.check_report(report)
    with pytest.raises(EngineError, match=key):
        authorization.check_report({**report, key: "sha256:other"})


def test_the_command_refuses_with_exit_3_and_starts_nothing(policy: Policy, keys: Keys, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = ServerProcess(policy.path, mode="production", public_key=keys.public, log_path=log)
    server.start()
    with pytest.raises(VerdictRefused, match="no signed verdict there"):
        server.wait_ready(30)
    assert server.poll() == 3
    assert "listening" not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "99999"], "--port"),
        (["--mode", "testing"], "--mode"),
        (["--api-key", "short"], "--api-key"),
        (["--max-queue", "-1"], "--max-queue"),
    ],
)
def test_the_command_names_a_bad_option(policy: Policy, arguments: list[str], named: str) -> None:
    app = typer.Typer()
    app.command()(serve)
    done = CliRunner().invoke(app, [str(policy.path), *arguments])
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
