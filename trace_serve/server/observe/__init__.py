"""What is written down: metrics, traces, logs and the request log."""
