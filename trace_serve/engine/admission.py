"""A request's `trace_hints`, checked when it arrives and carried to the scheduler in its sampling parameters."""

from __future__ import annotations

import copy
from typing import Any

from trace_serve.engine import state
from trace_serve.errors import ConfigError
from trace_serve.hints.options import FIELD, HintOptions, layers_of, parse
from trace_serve.hints.sinks import Target

_SENT = "_sent"
"""Key in a request's `trace_hints` that counts the requests SGLang made of it: parallel samples share the rest."""


def admit(request: Any, prompt_tokens: int | None) -> None:
    """Replaces the `trace_hints` of a request by the options it means; leaves other requests alone.

    Args:
        request: SGLang's GenerateReqInput of one prompt.
        prompt_tokens: length of its prompt; None where it has none, as with embeddings as input.

    Raises:
        ValueError: the option at fault; SGLang makes a 400 of it.
    """
    params = getattr(request, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    if params is None or not isinstance(custom, dict) or custom.get(FIELD) is None:
        return
    wanted = custom[FIELD]
    try:
        beams = (params.get("beam_width") or 1) != 1
        options = _checked(wanted, str(request.rid), prompt_tokens, beams=beams)
    except ConfigError as exc:
        raise ValueError(f"custom_params.{exc}" if str(exc).startswith(FIELD) else str(exc)) from exc
    fields = {name: getattr(options, name) for name in HintOptions.__dataclass_fields__}
    # Prompts of one batch share their parameters, so nothing is changed in place.
    request.sampling_params = {**params, "custom_params": {**custom, FIELD: {**fields, "name": str(request.rid)}}}


def _checked(wanted: Any, name: str, prompt_tokens: int | None, *, beams: bool) -> HintOptions:
    engine = state.get()
    engine_spec = engine.spec
    if not engine_spec.recipe.has_hints:
        raise ConfigError(
            f"{FIELD}: there are no hints to export, since this recipe rounds neither activations (experts w4a4) nor "
            "the KV cache (kv nvfp4)"
        )
    options = parse(wanted, engine_spec.hints)
    extra = [site for site in options.sites if site not in engine_spec.hints.sites]
    if extra:
        raise ConfigError(
            f"{FIELD}.sites: this engine does not keep {extra[0]}, it keeps {', '.join(engine_spec.hints.sites)}"
        )
    experts = [site for site in options.sites if site.startswith("experts")]
    if options.codes == "full" and engine_spec.hints.codes != "full" and experts:
        raise ConfigError(
            f"{FIELD}.codes: this engine keeps the lowest bits of {experts[0]}; start it with --hint-codes full, "
            "or ask for k and v alone"
        )
    if isinstance(options.layers, tuple) and engine.layers:
        layers_of(options.layers, engine.layers)
    if beams:
        raise ConfigError(
            f"{FIELD}: hints belong to one sequence, and beam search has no such rows; leave out beam_width"
        )
    if prompt_tokens is None:
        raise ConfigError(f"{FIELD}: hints need a prompt of token ids or text, not of embeddings")
    if options.first_token > prompt_tokens:
        raise ConfigError(
            f"{FIELD}.first_token: got {options.first_token}, expected at most {prompt_tokens}, the prompt's length"
        )
    if options.sink != "inline":
        # Parallel samples get a suffix, so the longest name is checked.
        target: Target = engine.allowed_targets.parse(options.sink)
        engine.sinks.uri(target, f"{name}-9999")
    return options


def send(tokenized: Any) -> None:
    """Gives a request that goes to the scheduler its own copy of the options, its name and its log-probabilities.

    SGLang sends a prompt with n > 1 as one request that only fills the prefix cache, which has no hints, and n
    samples under new ids; sample i's hints are called `<id>_0-<i>` (it calls prompt k of a request `<id>_k`).
    """
    params = getattr(tokenized, "sampling_params", None)
    custom = getattr(params, "custom_params", None)
    if not isinstance(custom, dict) or not isinstance(custom.get(FIELD), dict):
        return
    shared = custom[FIELD]
    own = {key: value for key, value in shared.items() if key != _SENT}
    own_custom: dict[str, Any] = {**custom, FIELD: own}
    if str(tokenized.rid) != shared["name"]:
        sent = shared.get(_SENT, 0)
        shared[_SENT] = sent + 1
        if sent == 0:
            del own_custom[FIELD]
        else:
            own["name"] = f"{shared['name']}-{sent - 1}"
    tokenized.sampling_params = copy.copy(params)
    tokenized.sampling_params.custom_params = own_custom or None
    if FIELD in own_custom and own["logprobs"]:
        # The scheduler computes them; the answer shows them only to a client that asked for them too.
        tokenized.return_logprob = True
