"""The hints that belong to a forward pass, also when checkpointing computes a part of it again.

A plug asks `MicroBatches` for the rounding of the pass that is being computed. A pass opens when the model is called,
and closes when it returns; what is computed again in the backward pass reopens it through `checkpoint_contexts`, so
that several micro-batches may be in flight (gradient accumulation, pipeline schedules). Computing outside of both is an
error, never a silent rounding by other hints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trace_serve.errors import ConfigError
from trace_serve.guided.hf.rounding import NearestRounding, Rounding
from trace_serve.guided.plugs.alignment import aligned, segments
from trace_serve.guided.replay import HintedRounding
from trace_serve.guided.routing import RoutingReplay
from trace_serve.guided.rule import TAU_ALIGNED
from trace_serve.hints.rows import HintFile
from trace_serve.recipe import Recipe

Hints = Sequence[HintFile | None]
KEYWORD = "rollout_hints"
"""The keyword of the model's call that carries hints."""


class _Routes(RoutingReplay):
    """Routes of one micro-batch, followed when asked instead of by hooks of its own, so that they outlive the pass."""

    def __init__(self, model: Any, hints: Hints, input_ids: Tensor) -> None:
        super().__init__(model, hints)
        self.__exit__(None, None, None)
        self._begin(model, (input_ids,), {})

    def follow(self, layer: int, router: Any, output: Any) -> Any:
        return self._hook(layer)(router, (), output)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass follows."""

    rounding: Rounding
    routes: _Routes | None


class MicroBatches(Rounding):
    """Follows the micro-batches of one model; itself the rounding of whichever pass is being computed.

    The model is called with one more keyword, `rollout_hints=[...]`: a hint file a sequence, in the order of the batch,
    None for a sequence without. `micro_batch` gives them where the call cannot be changed. Sequences may be padded on
    either side (`attention_mask`) or packed (`position_ids` that start again at 0); their tokens are compared with
    those of the files. In training mode a call without hints is an error; in evaluation it rounds to nearest.

    Args:
        model: of transformers; what is called.
        recipe: that of the rollouts.
        tau, layers, sites: as `HintedRounding`.
        replay_routes: tokens go to the experts that the rollout chose (R3); every file must then have them.

    Raises:
        ConfigError: routes are to be replayed in a model without routers.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        *,
        tau: float = TAU_ALIGNED,
        layers: Sequence[int] | None = None,
        sites: Sequence[str] | None = None,
        replay_routes: bool = True,
    ) -> None:
        self._model, self._recipe = model, recipe
        self._options: dict[str, Any] = {"tau": tau, "layers": layers, "sites": sites}
        self._given: Hints | None = None
        self._open: MicroBatch | None = None
        self._replay_routes = replay_routes
        layer_types = getattr(model.config.get_text_config(), "layer_types", None) if hasattr(model, "config") else None
        self._recurrent = "linear_attention" in (layer_types or ())
        if replay_routes:
            RoutingReplay(model, []).__exit__(None, None, None)
            routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
            for layer, router in enumerate(routers):
                router.register_forward_hook(self._route(layer))
        model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        model.register_forward_hook(self._end_pass, always_call=True)

    @contextmanager
    def micro_batch(self, hints: Hints) -> Iterator[None]:
        """Calls of the model inside follow these hints, as if each had `rollout_hints`."""
        self._given = hints
        try:
            yield
        finally:
            self._given = None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."""
        return nullcontext(), self._reopened(self._open)

    def checkpointing(self) -> dict[str, Any]:
        """Arguments of `model.gradient_checkpointing_enable` under which a recomputation follows its own hints."""
        return {"use_reentrant": False, "context_fn": self.checkpoint_contexts}

    @property
    def current(self) -> MicroBatch:
        """The pass that is being computed.

        Raises:
            ConfigError: none is.
        """
        if self._open is None:
            raise ConfigError(
                "gradient_checkpointing: a layer was computed outside of a call of the model; checkpoint with "
                "checkpointing() of this plug, and call the model that the plug was given",
                field="gradient_checkpointing",
            )
        return self._open

    def begin(self, first: int, count: int) -> None:
        """Passes begin with the call of the model."""

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        return self.current.rounding.experts_in(layer, x)

    def experts_mid(self, layer: int, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        return self.current.rounding.experts_mid(layer, x, rows, places)

    def keys(self, layer: int, x: Tensor, first: int) -> Tensor:
        return self.current.rounding.keys(layer, x, first)

    def values(self, layer: int, x: Tensor, first: int) -> Tensor:
        return self.current.rounding.values(layer, x, first)

    def _begin_pass(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = dict(named)
        hints: Hints | None = named.pop(KEYWORD, self._given)
        if hints is None:
            if model.training:
                raise ConfigError(
                    f"{KEYWORD}: missing in training mode; give a hint file a sequence, None for those without",
                    field=KEYWORD,
                )
            self._open = MicroBatch(NearestRounding(self._recipe), None)
            return arguments, named
        input_ids = named["input_ids"] if named.get("input_ids") is not None else next(iter(arguments), None)
        cache = named.get("past_key_values")
        if not isinstance(input_ids, Tensor) or (cache is not None and cache.get_seq_length()):
            raise ConfigError(f"{KEYWORD}: needs input_ids of whole sequences and an empty cache", field=KEYWORD)
        self._open = self._followed(hints, input_ids, named.get("attention_mask"), named.get("position_ids"))
        return arguments, named

    def _followed(
        self, hints: Hints, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> MicroBatch:
        if self._replay_routes:
            for index, each in enumerate(hints):
                if each is not None and each.routed_experts is None:
                    raise ConfigError(
                        f"{KEYWORD}[{index}]: has no routed experts; ask the rollout for them, or give the plug "
                        "replay_routes=False",
                        field=KEYWORD,
                    )
        if self._recurrent and len(segments(input_ids, attention_mask, position_ids)) > input_ids.shape[0]:
            raise ConfigError(
                "position_ids: got sequences packed into a row, and linear attention carries its state from one to the "
                "next; give each sequence a row of its own",
                field="position_ids",
            )
        files = aligned(hints, input_ids, attention_mask, position_ids)
        rounding = HintedRounding(self._recipe, files, device=input_ids.device, **self._options)
        rounding.begin(0, input_ids.shape[1])
        routes = _Routes(self._model, files, input_ids) if self._replay_routes else None
        return MicroBatch(rounding, routes)

    def _end_pass(self, model: Any, arguments: Any, output: Any) -> None:
        self._open = None

    def _route(self, layer: int) -> Any:
        def follow(router: Any, arguments: Any, output: Any) -> Any:
            routes = self.current.routes
            return output if routes is None else routes.follow(layer, router, output)

        return follow

    @contextmanager
    def _reopened(self, batch: MicroBatch | None) -> Iterator[None]:
        before, self._open = self._open, batch
        try:
            yield
        finally:
            self._open = before


def on_cpu(tensor: Tensor) -> Tensor:
    """A detached copy in host memory; sharded tensors (DTensor) are gathered, which every rank must take part in."""
    full = getattr(tensor, "full_tensor", None)
    gathered: Tensor = tensor.detach() if full is None else full().detach()
    return gathered.to("cpu", copy=True) if gathered.device.type != "cpu" else gathered.clone()
