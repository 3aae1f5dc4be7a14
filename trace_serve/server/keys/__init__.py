"""API keys: how they are kept, read, checked and made."""
