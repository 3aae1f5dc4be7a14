"""A small policy directory that passes every check, and verdicts about it signed with a fresh key."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from harness import prepare_policy
from safetensors.numpy import save_file

from eval_gate import keys, signing
from eval_gate.arms.evidence import ArmEvidence
from eval_gate.policy import GatePolicy
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import ArmSummary, Comparison, Subjects, Verdict
from trace_serve.policy import Policy, build_policy, digest_bytes, load_policy
from trace_serve.recipe import PRESETS

CONFIG = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


def write_policy(directory: Path) -> Policy:
    model = directory / "model"
    model.mkdir()
    prepare_policy(model)
    (model / "reported-digest").unlink()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a.weight": np.ones((2, 3), dtype=np.float16)}, model / "model.safetensors")
    build_policy(model, directory / "policy", name="tiny", version="1", recipe=PRESETS["default"])
    return load_policy(directory / "policy")


class Keys:
    def __init__(self, directory: Path, name: str = "key") -> None:
        self.private, self.public = directory / f"{name}.pem", directory / f"{name}.pub"
        keys.generate_key(self.private, self.public)


def sign(policy: Policy, keys: Keys, out: Path, **changes: Any) -> Path:
    """Signs a passing verdict about a policy, or one with `changes`."""
    comparison = Comparison(
        n=200, scored=200, training_pass_rate=0.8, serving_pass_rate=0.8, gap=0.0, lower=-0.01, upper=0.01, margin=0.05,
        both=160, only_training=0, only_serving=0, neither=40, mcnemar_exact_p=1.0,
    )  # fmt: skip
    arm = ArmSummary(
        samples=200, passed=160, failed=40, unscored={}, pass_rate=0.8, pass_rate_low=0.8, pass_rate_high=0.8,
        truncated=0, degenerate=0, mean_completion_tokens=8.0, attempts=200,
    )  # fmt: skip
    some = digest_bytes(b"some")
    fields: dict[str, Any] = {
        "outcome": Outcome.PASS,
        "exit_code": 0,
        "cause": "margin",
        "reasons": ("the gap is below the margin",),
        "policy": GatePolicy(),
        "method": "tango",
        "floor": 0.01,
        "queries_needed": 52,
        "overall": comparison,
        "suites": (),
        "kinds": {},
        "training": arm,
        "serving": arm,
        "findings": (),
        "training_evidence": ArmEvidence(source="training"),
        "serving_evidence": ArmEvidence(source="serving"),
        "subjects": Subjects(
            serving=policy.digest,
            training=policy.base_digest,
            queries=some,
            gate_policy=GatePolicy().digest,
            results=some,
        ),
        "query_source": "support",
        "recipe_id": policy.recipe_id,
        "policy_name": policy.name,
        "policy_version": policy.version,
        "created": datetime.now(UTC),
        "expires": datetime.now(UTC) + timedelta(days=1),
        "flipped": (),
        "tools": {},
    }
    signing.sign_verdict(Verdict(**{**fields, **changes}), keys.private, out)
    return out
