"""The two versions under comparison as things that answer queries: endpoints, engines we start, recorded results.

Grading, pairing and statistics live elsewhere.
"""
