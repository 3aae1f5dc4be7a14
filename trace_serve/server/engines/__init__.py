"""Engines behind the front-end: local ones that are supervised, and remote ones."""
