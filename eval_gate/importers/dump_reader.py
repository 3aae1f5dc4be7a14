"""Opens a pickle from stdin with inert stand-ins for every name, and prints its requests as JSON.

Run as a script in a process of its own (see `sglang_dump`); it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from typing import Any

_MEMORY_BYTES = 8 << 30
_CPU_S = 240


class Inert:
    """Takes the place of any class or function that a pickle names; does nothing, and keeps its state."""

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update({key: value for key, value in part.items() if isinstance(key, str)})

    def __call__(self, *arguments: Any, **named: Any) -> Inert:
        return Inert()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class Reader(pickle.Unpickler):
    """Never looks a name up: each becomes a new inert class."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name.rpartition(".")[2], (Inert,), {})

    def persistent_load(self, key: Any) -> Any:
        return Inert()


def requests_of(data: Any) -> list[dict[str, Any]]:
    """Plain values of each request.

    Raises:
        ValueError: not what SGLang dumps.
    """
    entries = data.get("requests") if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries:
        raise ValueError("expected a dump with requests")
    return [_request(entry) for entry in entries]


def _request(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, tuple) or len(entry) < 2:
        raise ValueError("expected requests of (request, output, start, end)")
    asked = entry[0] if isinstance(entry[0], dict) else getattr(entry[0], "__dict__", {})
    output = entry[1] if isinstance(entry[1], dict) else {}
    meta = _mapping(output.get("meta_info"))
    sampling = _mapping(asked.get("sampling_params"))
    text = asked.get("text") if isinstance(asked.get("text"), str) else None
    ids = list(asked["input_ids"]) if isinstance(asked.get("input_ids"), list | tuple) else []
    limit = sampling.get("max_new_tokens")
    name = asked.get("rid") or meta.get("id")
    unreadable = None
    if not isinstance(name, str):
        unreadable = "has no request id, or is a batch"
    elif text is None and not (ids and all(type(token) is int for token in ids)):
        unreadable = "has neither a prompt's text nor its token ids"
    elif any(asked.get(kind) for kind in ("image_data", "video_data", "audio_data", "input_embeds")):
        unreadable = "has a prompt that is not text alone"
    return {
        "id": name,
        "text": text,
        "input_ids": ids if unreadable is None else [],
        "output": output.get("text") if isinstance(output.get("text"), str) else None,
        "max_new_tokens": limit if type(limit) is int else None,
        "session": asked.get("session_id") if isinstance(asked.get("session_id"), str) else None,
        "unreadable": unreadable,
    }


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def main() -> None:
    """Prints `{"requests": [...]}` or `{"error": "..."}`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    answers = sys.stdout
    try:
        found: dict[str, Any] = {"requests": requests_of(Reader(sys.stdin.buffer).load())}
        print(json.dumps(found), file=answers)
    except MemoryError:
        print('{"error": "not a dump: asks for too much memory"}', file=answers)
    except Exception as exc:
        print(json.dumps({"error": f"not a dump: {type(exc).__name__}: {str(exc)[:200]}"}), file=answers)


if __name__ == "__main__":
    main()
