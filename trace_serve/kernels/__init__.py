"""Backends of the NVFP4 kernels: which exist, which can run here, and how to get one.

What they compute is defined in `trace_serve.nvfp4`; nothing here decides a rounding.
"""

from trace_serve.kernels.base import Availability, Kernels, available, get_kernels
from trace_serve.kernels.for_recipe import RecipeKernels, kernels_for

__all__ = ["Availability", "Kernels", "RecipeKernels", "available", "get_kernels", "kernels_for"]
