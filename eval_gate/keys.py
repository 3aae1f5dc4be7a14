"""Ed25519 keys that sign and verify verdicts: PEM files, or PEM text in an environment variable (`env:NAME`)."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from eval_gate.arms.records import write_atomic
from trace_serve.errors import ConfigError, VerdictRefused

ENVIRONMENT = "env:"


def generate_key(private_path: Path, public_path: Path) -> None:
    """Writes a new Ed25519 key pair as PEM; the private file is readable by its owner alone.

    Raises:
        ConfigError: one of the files exists already, or cannot be written.
    """
    for path in (private_path, public_path):
        if path.exists():
            raise ConfigError(
                f"{path}: exists already, and a key is never overwritten; choose another name", field="key"
            )
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        private_path.parent.mkdir(parents=True, exist_ok=True)
        public_path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(private_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(pem)
        write_atomic(public_path, public)
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: cannot be written: {exc.strerror}", field="key") from exc


def load_private_key(source: Path) -> Ed25519PrivateKey:
    """Reads the key that signs verdicts.

    Raises:
        ConfigError: not readable, or not an unencrypted Ed25519 private key in PEM.
    """
    try:
        key = serialization.load_pem_private_key(_read(source), password=None)
    except OSError as exc:
        raise ConfigError(f"--key {source}: cannot be read: {exc.strerror}", field="key") from exc
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise ConfigError(
            f"--key {source}: not an unencrypted PEM private key; make one with `eval-gate keygen`", field="key"
        ) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"--key {source}: got {type(key).__name__}, expected an Ed25519 key", field="key")
    return key


def load_public_key(source: Path) -> Ed25519PublicKey:
    """Reads the key that verdicts are verified with.

    Raises:
        VerdictRefused: not readable, or not an Ed25519 public key in PEM.
    """
    try:
        key = serialization.load_pem_public_key(_read(source))
    except OSError as exc:
        raise VerdictRefused(f"public key {source}: cannot be read: {exc.strerror}", field="public_key") from exc
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise VerdictRefused(f"public key {source}: not a PEM public key", field="public_key") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise VerdictRefused(
            f"public key {source}: got {type(key).__name__}, expected an Ed25519 key", field="public_key"
        )
    return key


def _read(source: Path) -> bytes:
    text = str(source)
    if not text.startswith(ENVIRONMENT):
        return source.read_bytes()
    value = os.environ.get(text.removeprefix(ENVIRONMENT))
    if not value:
        raise FileNotFoundError(None, "the variable is not set")
    return value.encode()
