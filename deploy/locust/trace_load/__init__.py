"""Users, shape and hooks of the locust run. What needs no locust is in `trace_serve.load`."""
