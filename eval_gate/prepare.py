"""Reads and checks all input of a run before anything is started, asked or written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eval_gate.arms.http import Endpoint
from eval_gate.arms.records import Role
from eval_gate.arms.source import ArmSource, resolve
from eval_gate.checkers import check_allowed
from eval_gate.config import GateConfig
from eval_gate.execute import request_body
from eval_gate.looks import schedule
from eval_gate.queries import QuerySet
from eval_gate.redaction import load_redactor, redact
from eval_gate.suites.named import open_all


@dataclass(frozen=True)
class Plan:
    """A run whose whole input was read and checked, before anything is started, asked or written.

    Attributes:
        config: with what its input brought along written into its policy.
        queries: as both arms will be asked them.
    """

    config: GateConfig
    queries: QuerySet
    training: ArmSource
    serving: ArmSource

    @property
    def samples(self) -> int:
        """Requests of both arms, without retries."""
        return 2 * len(self.queries.queries) * self.config.policy.repeats

    @property
    def most_tokens(self) -> int:
        """Answer tokens of both arms when every answer runs to its limit."""
        return 2 * self.config.policy.repeats * sum(query.max_tokens for query in self.queries.queries)


def prepare(config: GateConfig) -> Plan:
    """Reads and checks all input of a run; starts, asks and writes nothing.

    Raises:
        ConfigError: a flag, file or directory cannot be used.
    """
    if config.key is not None:
        from eval_gate.keys import load_private_key

        load_private_key(config.key)
    if config.otel is not None:
        from eval_gate.report.otel import check_installed

        check_installed()
    redactor = None if config.redact is None else load_redactor(config.redact)
    if redactor is not None:
        config = replace(config, policy=config.policy.model_copy(update={"redaction": redactor.name}))
    specs = (config.queries,) if isinstance(config.queries, str) else config.queries
    queries = open_all(specs)
    if redactor is not None:
        queries = redact(queries, redactor)
    queries = queries.sample(config.policy.max_queries, config.policy.sample_seed)
    permissions = replace(config.permissions, judge=config.judge is not None)
    check_allowed(((query.id, query.checker) for query in queries.queries), permissions)
    for query in queries.queries:
        request_body(query, config.policy)
    endpoint = Endpoint(url="", timeout_s=config.timeout_s, concurrency=config.concurrency)
    sources = [
        resolve(role, arm.spec, replace(endpoint, url=arm.spec, api_key=arm.api_key, model=arm.model), arm.checkpoint)
        for role, arm in ((Role.TRAINING, config.training), (Role.SERVING, config.serving))
    ]
    schedule(queries.queries, config.policy.looks)
    return Plan(config, queries, *sources)
