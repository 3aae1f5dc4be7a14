"""The OpenAI-compatible HTTP front-end: validation, admission, relay, supervision of one engine, verdict check.

No numerics and no SGLang imports live here; the engine is a child process reached over loopback HTTP.
"""
