"""Qwen3.5 and its text-only form: gated delta net layers and full attention in turn."""
