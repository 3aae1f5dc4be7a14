"""Where a gap comes from: recipes tried on the same queries until the loss is found and mended, or the budget ends.

The search is a generator that knows no engine; `run` answers its trials with real ones.
"""
