"""The sockets that the server listens on, taken before anything is started."""

from __future__ import annotations

import socket

from trace_serve.errors import ConfigError


def listen(host: str, port: int, *, prefix: str = "", backlog: int = 2048) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        host: IPv4 or IPv6 address, or name.
        port: 0 to 65535.
        prefix: of the options that name them, for example `admin_`.
        backlog: connections that may wait to be accepted.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as exc:
        options = ", ".join(f"--{prefix.replace('_', '-')}{name}" for name in ("host", "port"))
        raise ConfigError(
            f"{options}: cannot listen on {host}:{port} ({exc.strerror}); choose another or stop what uses it",
            field=f"{prefix}port",
        ) from exc
