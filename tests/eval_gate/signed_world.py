"""A policy, what it was trained as, queries, gate policy and results on disk, and a signed verdict about them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from eval_gate.keys import generate_key, load_private_key
from eval_gate.signing import PAYLOAD_TYPE, sign_verdict
from eval_gate.verdict import Subjects, Verdict
from eval_gate.verification import SubjectFiles
from trace_serve.policy import build_policy, load_policy
from trace_serve.policy.digest import digest_directory, digest_file
from trace_serve.recipe import Recipe

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


PAST, FUTURE = "2020-01-01T00:00:00Z", "2090-01-01T00:00:00Z"


@dataclass(frozen=True)
class World:
    """Everything lies below `root`."""

    root: Path
    verdict: Verdict

    @property
    def private_key(self) -> Path:
        return self.root / "gate.pem"

    @property
    def public_key(self) -> Path:
        return self.root / "gate.pub"

    @property
    def envelope(self) -> Path:
        return self.root / "verdict.dsse.json"

    @property
    def files(self) -> SubjectFiles:
        return SubjectFiles(
            policy=self.root / "policy",
            training=self.root / "model",
            queries=(str(self.root / "queries.jsonl"),),
            gate_policy=self.root / "gate-policy.json",
            results=self.root / "results.jsonl",
        )

    def statement(self) -> dict[str, Any]:
        return statement_of(self.envelope)

    def resign(self, payload: Any, *, payload_type: str = PAYLOAD_TYPE, key: Path | None = None) -> Path:
        """Signs any payload and writes it in the form of our envelopes."""
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        envelope = Envelope(raw, payload_type, {})
        envelope.sign(CryptoSigner(load_private_key(key or self.private_key)))
        return write_envelope(self.root / "resigned.json", envelope.to_dict())

    def copy(self, directory: Path) -> World:
        shutil.copytree(self.root, directory)
        return World(directory, self.verdict)


def build(root: Path, verdict: Verdict) -> World:
    """Writes the files, and signs `verdict` with their digests in it."""
    model = root / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("{}")
    save_file({"a.weight": np.ones((2, 3), dtype=np.float16)}, model / "model.safetensors")
    build_policy(model, root / "policy", name="demo", version="1", recipe=Recipe())
    policy = load_policy(root / "policy")
    (root / "queries.jsonl").write_text('{"id": "q"}\n')
    (root / "results.jsonl").write_text('{"record": "sample"}\n')
    (root / "gate-policy.json").write_bytes(verdict.policy.canonical)
    subjects = Subjects(
        serving=policy.digest,
        training=digest_directory(model),
        queries=digest_file(root / "queries.jsonl"),
        gate_policy=verdict.policy.digest,
        results=digest_file(root / "results.jsonl"),
    )
    judged = {"recipe_id": policy.recipe_id, "policy_name": policy.name, "policy_version": policy.version}
    world = World(root, verdict.model_copy(update={"subjects": subjects, **judged}))
    generate_key(world.private_key, world.public_key)
    sign_verdict(world.verdict, world.private_key, world.envelope)
    return world


def statement_of(path: Path) -> dict[str, Any]:
    """The statement inside an envelope, unverified."""
    statement: dict[str, Any] = json.loads(Envelope.from_dict(json.loads(path.read_text())).payload)
    return statement


def write_envelope(path: Path, envelope: dict[str, Any]) -> Path:
    """Writes an envelope in the one form that is accepted."""
    path.write_bytes((json.dumps(envelope, sort_keys=True, separators=(",", ":")) + "\n").encode())
    return path


def wrong(world: World, check: str) -> Path:
    """An envelope that fails this check and, as far as that is possible, every later one."""
    good = world.statement()
    predicate = good["predicate"]
    expired = {"created": PAST, "expires": PAST}
    foreign = world.root / "foreign.pem"
    if not foreign.exists():
        generate_key(foreign, world.root / "foreign.pub")
    settings_edited = {"policy": {**predicate["policy"], "margin": 0.2}, **expired}
    statements: dict[str, Any] = {
        "payload": b"[]",
        "predicateType": {**good, "predicateType": "other", "predicate": {}, "subject": []},
        "predicate": {**good, "predicate": {**predicate, "outcome": "PERHAPS"}, "subject": []},
        "subject": {**good, "predicate": {**predicate, **settings_edited}, "subject": good["subject"][1:]},
        "gate_policy": {**good, "predicate": {**predicate, **settings_edited}},
        "expires": {
            **good,
            "predicate": {**predicate, "created": FUTURE, "expires": PAST},
        },
        "created": {
            **good,
            "predicate": {**predicate, "created": FUTURE, "expires": "2091-01-01T00:00:00Z"},
        },
    }
    if check in statements:
        return world.resign(statements[check])
    path = world.resign(b"[]", payload_type="text/plain", key=world.private_key if check == "payloadType" else foreign)
    envelope = json.loads(path.read_bytes())
    if check in ("envelope", "signatures"):
        envelope["signatures"] *= 2
        envelope["signatures"][1] = {**envelope["signatures"][1], "keyid": "0" * 64}
    write_envelope(path, envelope)
    if check == "envelope":
        path.write_bytes(path.read_bytes() + b"\n")
    return path
