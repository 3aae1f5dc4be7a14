"""What the plugs share with the fake-quantized transformers model, in one place."""

from trace_serve.guided.hf.experts import _check as check_experts
from trace_serve.guided.hf.experts import _forward as experts_forward
from trace_serve.guided.hf.experts import _layer_of as layer_of
from trace_serve.guided.hf.rounding import NearestRounding, Rounding, rotated

__all__ = ["NearestRounding", "Rounding", "check_experts", "experts_forward", "layer_of", "rotated"]
