"""The admin API: policies in and out of service, on a port and with a key of its own. Off unless a port is set."""
