"""Statistics of paired pass rates: small pure functions, one method a file, each with its source.

Nothing here knows about queries, arms or verdicts. Differences are A minus B, so positive means B lost.
"""
