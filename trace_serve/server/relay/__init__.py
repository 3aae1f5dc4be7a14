"""The way of one request to the engine and of its answer back."""
