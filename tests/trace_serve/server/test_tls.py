"""With a certificate the port speaks TLS 1.2 and later only, and may demand certificates of its clients."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from harness import Running
from scripted_engine import TEXT

from trace_serve.errors import ConfigError
from trace_serve.server.tls import RenewedTls, server_context


class Files:
    """A certificate authority, a server's and a client's certificate, as files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.cert, self.key = self.issue("server", self.ca.issue_cert("127.0.0.1", "localhost"))
        self.client_cert, self.client_key = self.issue("client", self.ca.issue_cert("client.example"))

    def issue(self, name: str, leaf: trustme.LeafCert) -> tuple[Path, Path]:
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return cert, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A front-end that demands client certificates."""
    options = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca_file}
    running = Running(tmp_path_factory.mktemp("secure"), api_key="a-client-key", **options)
    running.process.start()
    try:
        wait_until_serving(running)
        yield running
    finally:
        running.process.stop(10)


def wait_until_serving(running: Running, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not any(line["event"] == "engine_ready" for line in running.log()):
        assert running.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def client_context(files: Files, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca_file))
    if certificate:
        context.load_cert_chain(files.client_cert, files.client_key)
    return context


def https(running: Running) -> str:
    return running.url.replace("http://", "https://")


def test_answers_and_streams_come_over_tls(secure: Running, files: Files) -> None:
    headers = {"authorization": f"Bearer {secure.api_key}"}
    body = {"messages": [{"role": "user", "content": "tokens=3"}]}
    with httpx.Client(verify=client_context(files), base_url=https(secure), headers=headers, timeout=20) as client:
        whole = client.post("/v1/chat/completions", json=body)
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
    assert whole.json()["choices"][0]["message"]["content"] == TEXT * 3
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_plain_http_and_strangers_get_nothing(secure: Running, files: Files) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(secure.url + "/health/live")
    with (
        httpx.Client(verify=client_context(files, certificate=False)) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get(https(secure) + "/health/live")
    with pytest.raises(httpx.TransportError):
        httpx.get(https(secure) + "/health/live")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_tls_before_1_2_is_refused(secure: Running, files: Files) -> None:
    old = client_context(files)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with httpx.Client(verify=old) as client, pytest.raises(httpx.ConnectError):
        client.get(https(secure) + "/health/live")


def test_no_certificate_means_no_tls() -> None:
    assert server_context(None, None) is None


def test_a_context_refuses_versions_before_1_2(files: Files) -> None:
    context = server_context(files.cert, files.key)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(files: Files, tmp_path: Path) -> None:
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"
    copy(files.cert, cert)
    copy(files.key, key)
    renewed = RenewedTls(cert, key)
    assert serial(renewed) == serial_of(files.cert)
    new_cert, new_key = files.issue("renewed", files.ca.issue_cert("127.0.0.1", "localhost"))
    copy(new_cert, cert)
    renewed.refresh()
    assert serial(renewed) == serial_of(files.cert), "its key is not there yet"
    copy(new_key, key)
    renewed.refresh()
    assert serial(renewed) == serial_of(new_cert)
    cert.unlink()
    renewed.refresh()
    assert serial(renewed) == serial_of(new_cert)


def copy(source: Path, target: Path) -> None:
    """As a file that replaces the one before, whatever the resolution of modification times."""
    temporary = target.with_suffix(".new")
    temporary.write_bytes(source.read_bytes())
    temporary.chmod(0o600)
    temporary.replace(target)


def serial_of(cert: Path) -> int:
    return x509.load_pem_x509_certificate(cert.read_bytes()).serial_number


def serial(renewed: RenewedTls) -> int:
    """Of the certificate that a new connection is shown."""
    assert renewed.context is not None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = renewed.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_each_fault_of_the_files_is_named(files: Files, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not PEM")
    junk.chmod(0o600)
    shared = tmp_path / "shared.key"
    shared.write_bytes(files.key.read_bytes())
    shared.chmod(0o640)
    locked = tmp_path / "locked.key"
    locked.write_bytes(_encrypted(files.key))
    locked.chmod(0o600)
    missing = tmp_path / "missing.pem"
    for cert, key, ca, message in (
        (files.cert, None, None, "--tls-key: missing"),
        (None, files.key, None, "--tls-cert: missing"),
        (None, None, files.ca_file, "--tls-client-ca: client certificates need TLS"),
        (missing, files.key, None, "--tls-cert: .*cannot be read"),
        (files.cert, missing, None, "--tls-key: .*cannot be read"),
        (files.cert, shared, None, "--tls-key: .*mode 0640"),
        (files.cert, junk, None, "not a PEM certificate"),
        (junk, files.key, None, "not a PEM certificate"),
        (files.cert, files.client_key, None, "not the private key"),
        (files.cert, locked, None, "has a passphrase"),
        (files.cert, files.key, junk, "--tls-client-ca: .*no PEM certificate"),
    ):
        with pytest.raises(ConfigError, match=message):
            server_context(cert, key, ca)


def _encrypted(key: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
