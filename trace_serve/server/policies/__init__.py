"""Policies on disk and what is done with them: the registry, the digest cache, activation, and the audit log."""
