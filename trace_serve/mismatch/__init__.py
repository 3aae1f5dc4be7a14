"""How far a training-time version of a policy is from its FP4 rollouts, and what hints do about it."""
