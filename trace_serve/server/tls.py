"""TLS of the front-end's port: certificate, private key and, for mutual TLS, the authority of clients."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from trace_serve.errors import ConfigError
from trace_serve.server.keys.private import Stamp, read_private, stamp_of

log = structlog.get_logger("trace_serve.tls")


def server_context(cert: Path | None, key: Path | None, client_ca: Path | None = None) -> ssl.SSLContext | None:
    """A context for TLS 1.2 and later, or None where no TLS was asked for.

    Args:
        cert: PEM certificate, followed by the intermediate ones.
        key: PEM private key without a passphrase, readable by its owner only.
        client_ca: PEM certificates; every client must then show a certificate that one of them signed.

    Raises:
        ConfigError: one of the two is missing, cannot be read, is open to others, or they do not belong together.
    """
    if cert is None and key is None:
        if client_ca is not None:
            raise ConfigError(
                "--tls-client-ca: client certificates need TLS; give --tls-cert and --tls-key too",
                field="tls_client_ca",
            )
        return None
    if cert is None or key is None:
        missing = "tls_cert" if cert is None else "tls_key"
        raise ConfigError(
            f"--{missing.replace('_', '-')}: missing, expected --tls-cert and --tls-key together", field=missing
        )
    _require_readable(cert, "--tls-cert")
    read_private(key, flag="--tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise ConfigError(f"--tls-cert, --tls-key: {_reason(exc, cert, key)}", field="tls_cert") from exc
    if client_ca is not None:
        _require_readable(client_ca, "--tls-client-ca")
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(f"--tls-client-ca: {client_ca} holds no PEM certificate", field="tls_client_ca") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class RenewedTls:
    """A server's context that takes a renewed certificate without a restart; open connections keep the old one.

    Args:
        cert, key, client_ca: see `server_context`; a change of `client_ca` needs a restart.

    Raises:
        ConfigError: see `server_context`.
    """

    def __init__(self, cert: Path | None, key: Path | None, client_ca: Path | None = None) -> None:
        self.context = server_context(cert, key, client_ca)
        self._files = (cert, key) if cert is not None and key is not None else None
        self._seen = self._stamps()

    @property
    def factory(self) -> Callable[..., ssl.SSLContext] | None:
        """What uvicorn asks for the context; None without TLS."""
        context = self.context
        return None if context is None else lambda *_, made=context: made

    def refresh(self) -> None:
        """Loads certificate and key again if they were replaced; a pair that cannot be used is logged and left."""
        stamps = self._stamps()
        if self.context is None or self._files is None or stamps == self._seen:
            return
        self._seen = stamps
        try:
            server_context(*self._files)
            self.context.load_cert_chain(*self._files)
            log.info("certificate_renewed", path=str(self._files[0]))
        except (ConfigError, OSError) as exc:
            log.error("certificate_refused", reason=str(exc))

    def _stamps(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self._files or ()]


def _require_readable(path: Path, flag: str) -> None:
    try:
        path.open("rb").close()
    except OSError as exc:
        field = flag.lstrip("-").replace("-", "_")
        raise ConfigError(f"{flag}: {path} cannot be read ({exc.strerror})", field=field) from exc


def _no_passphrase() -> str:
    """Instead of OpenSSL's question on the terminal, which nobody would answer."""
    raise ValueError("the private key has a passphrase, expected one without; decrypt it")


def _reason(exc: Exception, cert: Path, key: Path) -> str:
    if isinstance(exc, ssl.SSLError):
        if exc.reason == "KEY_VALUES_MISMATCH":
            return f"{key} is not the private key of the certificate in {cert}"
        return f"{cert} and {key} are not a PEM certificate and a PEM private key ({exc.reason or 'unreadable'})"
    return str(exc)
