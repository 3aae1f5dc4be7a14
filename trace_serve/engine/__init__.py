"""The patch layer on SGLang: what loads into the engine's processes, and what starts and checks them.

Numerics live in `nvfp4` and `kernels`; nothing here decides a rounding.
"""
