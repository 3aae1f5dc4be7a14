"""What a client may send, field by field."""
