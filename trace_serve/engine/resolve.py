"""What an engine would be run with (`python -m trace_serve.engine.resolve ARGS`), as SGLang resolves it.

Takes the arguments and the environment of `engine.main`, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trace_serve.engine.main import main, prepare
from trace_serve.errors import ConfigError, SeamError

_LEFT_OUT = frozenset({"api_key", "admin_api_key", "random_seed"})


def _resolve(argv: list[str]) -> None:
    server_args = prepare(argv)
    from trace_serve.engine import refusals, seams, spec

    try:
        server_args.resolve_once()
        server_args.check_server_args()
        resolved = server_args.resolved_dict()
    except (AssertionError, ValueError, NotImplementedError) as exc:
        raise ConfigError(f"SGLang refuses these arguments: {exc}", field="engine_args") from exc
    except AttributeError as exc:
        raise SeamError(f"seam arguments: {exc}; SGLang resolves its arguments otherwise in this release") from exc
    engine_spec = spec.from_env()
    assert engine_spec is not None
    if not engine_spec.recipe.is_bf16:
        # What SGLang sets by itself has to pass as well.
        refusals.refuse(server_args)
    print(json.dumps({"arguments": _told(resolved), "seams": len(seams.check_process())}, default=str))


def _told(resolved: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are not at their default; secrets and the seed of this call stay out."""
    from sglang.srt.server_args import ServerArgs

    default = ServerArgs(model_path="")
    return {
        name: value
        for name, value in sorted(resolved.items())
        if not name.startswith("_") and name not in _LEFT_OUT and value != getattr(default, name, None)
    }


if __name__ == "__main__":
    sys.exit(main(_resolve))
