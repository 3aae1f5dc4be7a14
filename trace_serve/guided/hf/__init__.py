"""A transformers model that rounds its experts and its KV cache as the engine does under a recipe."""
