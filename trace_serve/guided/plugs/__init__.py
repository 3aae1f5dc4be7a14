"""Plugs for trainers (Hugging Face with FSDP, ModelOpt, Transformer Engine, verl): round and route as the rollouts did.

A plug imports its trainer's package when it is used, not before. What they have in common is `micro_batch`; the rule of
rounding and the reading of hints lie outside.
"""
