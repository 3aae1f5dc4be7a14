"""Rounding hints: the wire format (no torch), the command line, and the engine-side store of rows by KV slot.

How hints are followed is in `trace_serve.guided`; when they are collected is decided in `trace_serve.engine`.
"""
