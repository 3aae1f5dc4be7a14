"""Experimental: hint files with syndromes of the lowest bits, for a trainer that knows nearly all of them (no torch).

The code, the file and what is fetched on demand; decoding needs the trainer's values and is in `trace_serve.guided`.
"""
