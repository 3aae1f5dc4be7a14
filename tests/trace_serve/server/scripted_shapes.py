"""Parts of the scripted engine's answers in the shapes of the real one: metadata, tool calls, chunks, tokens."""

from __future__ import annotations

from typing import Any


def token_ids(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def prompt_text(payload: dict[str, Any]) -> str:
    """The prompt of a request as the harness's chat template renders it."""
    if "messages" not in payload:
        return str(payload["prompt"])
    lines = [f"<{message['role']}>{message.get('content') or ''}\n" for message in payload["messages"]]
    return "".join(lines) + "<assistant>"


def metadata(payload: dict[str, Any], text: str, version: str) -> dict[str, Any]:
    """What an answer says beside its tokens; with `trace_rollout` in a request that asked for it."""
    count = len(token_ids(text))
    found: dict[str, Any] = {
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
    }
    if (payload.get("custom_params") or {}).get("trace_rollout"):
        one = {
            "prompt_token_ids": token_ids(prompt_text(payload)),
            "output_token_ids": token_ids(text),
            "output_logprobs": [-0.5] * count,
            "finish_reason": "stop",
            "weight_version_spans": {"sampled": [[0, count, version]]},
        }
        found["trace_rollout"] = [one] * payload.get("n", 1)
    return found


def tool_call(payload: dict[str, Any], arguments: str) -> dict[str, Any] | None:
    """A call of the tool that a request demands, or of its first one."""
    tools = payload.get("tools")
    if not tools or payload.get("tool_choice") == "none":
        return None
    chosen = payload.get("tool_choice")
    name = chosen["function"]["name"] if isinstance(chosen, dict) else tools[0]["function"]["name"]
    return {"id": "call_1", "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}


def choices(payload: dict[str, Any], text: str, reason: str, call: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Every choice of a whole answer, all alike."""
    found = []
    for index in range(payload.get("n", 1)):
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if "prompt" in payload:
            choice["text"] = text
        elif call is None:
            choice["message"] = {"role": "assistant", "content": text, "reasoning_content": None}
        else:
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        found.append(choice)
    return found


def delta(payload: dict[str, Any], content: str | None, reason: str | None, call: dict[str, Any] | None = None) -> Any:
    """The choices of one chunk of a stream."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if "prompt" in payload:
        choice["text"] = content or ""
    else:
        choice["delta"] = {} if content is None else {"content": content}
        if call is not None:
            choice["delta"] = {"role": "assistant", "tool_calls": [call]}
    return [choice]
