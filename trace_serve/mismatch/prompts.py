"""Prompts of a query set as the policy's own chat template renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval_gate.suites.named import open_queries
from trace_serve.errors import EngineError

SEED = 0


def prompt_ids(policy: Path, queries: str, limit: int) -> list[list[int]]:
    """Token ids of at most `limit` queries, in seeded random order.

    Raises:
        ConfigError, QueryError: no such query set.
        EngineError: the tokenizer cannot be loaded.
    """
    import transformers

    chosen = open_queries(queries).sample(limit, SEED).queries
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(policy)
    except (OSError, ValueError) as exc:
        raise EngineError(f"{policy}: its tokenizer cannot be loaded: {' '.join(str(exc).split())[:300]}") from exc
    found = []
    for query in chosen:
        messages = [message.model_dump(exclude_none=True) for message in query.messages]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        found.append([int(token) for token in encoded["input_ids"]])
    return found
