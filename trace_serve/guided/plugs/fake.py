"""What the plugs share with the fake-quantized transformers model, in one place."""

from eval_gate.arms.fake_experts import _check as check_experts
from eval_gate.arms.fake_experts import _forward as experts_forward
from eval_gate.arms.fake_experts import _layer_of as layer_of
from eval_gate.arms.rounding import NearestRounding, Rounding, rotated

__all__ = ["NearestRounding", "Rounding", "check_experts", "experts_forward", "layer_of", "rotated"]
