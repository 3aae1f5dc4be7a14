"""Commands of `eval-gate` besides `run` and `verify`, one a file; `eval_gate.cli` puts them together."""
