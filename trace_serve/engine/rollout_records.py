"""What an answer of the OpenAI routes may say of its own tokens: `metadata.trace_rollout`, one entry a choice.

SGLang's OpenAI routes give token ids in some answers and log-probabilities as text; a trainer needs both as numbers, of
streams too. A request asks with `custom_params: {"trace_rollout": true}`.
"""

from __future__ import annotations

from typing import Any

FIELD = "trace_rollout"
VERSION_HEADER = "x-trace-weight-version"
"""Of a stream: the percent-encoded label of the weights that computed its first token. Whole answers have
`metadata.weight_version`."""


def is_wanted(request: Any) -> bool:
    """Whether a request, in SGLang's internal form, asks for the record of its tokens."""
    params = getattr(request, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return isinstance(custom, dict) and custom.get(FIELD) is True


def ask(request: Any) -> None:
    """Makes SGLang keep what the record needs; the answer itself shows none of it unless it is asked for."""
    if not is_wanted(request):
        return
    request.return_prompt_token_ids = True
    if not request.return_logprob:
        request.return_logprob = True
        request.return_text_in_logprobs = False  # the text of each token costs a call of the tokenizer


def version_of(meta: dict[str, Any]) -> str | None:
    """The label of the weights that sampled an answer's last token; of an answer without tokens, what SGLang says.

    SGLang's own `weight_version` does not follow an update that came without a label.
    """
    spans = (meta.get("weight_version_spans") or {}).get("sampled") or []
    return str(spans[-1][2]) if spans else meta.get("weight_version")


def record(content: dict[str, Any]) -> dict[str, Any]:
    """The record of one choice.

    Args:
        content: the last output of SGLang's tokenizer manager for it.

    Returns:
        `prompt_token_ids` and `output_token_ids`; `output_logprobs`, of each output token by the forward pass that
        sampled it, as in the hint file; `finish_reason`; `weight_version_spans` as in docs/refit.md.
    """
    meta = content["meta_info"]
    reason = meta.get("finish_reason")
    return {
        "prompt_token_ids": content.get("prompt_token_ids"),
        "output_token_ids": list(content["output_ids"]),
        "output_logprobs": [entry[0] for entry in meta.get("output_token_logprobs") or ()],
        "finish_reason": reason["type"] if isinstance(reason, dict) else reason,
        "weight_version_spans": meta.get("weight_version_spans"),
    }
