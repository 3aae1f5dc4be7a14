"""Packed NVFP4 checkpoints: writing them under a recipe, and reading them as BF16 images.

What the layouts are and which recipes they carry is in `trace_serve.policy` (`layouts`, `storable`, `packed`), which
needs no torch.
"""
