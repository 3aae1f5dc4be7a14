"""The release gate: replays the same queries through two versions of a policy and decides if the gap is acceptable.

No torch here; starting an engine goes through `trace_serve.engine.launch`.
"""
