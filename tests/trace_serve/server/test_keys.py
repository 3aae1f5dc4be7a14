"""Keys are kept as hashes in a file that nobody else can read, and each opens what its scopes say."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from trace_serve.cli import main
from trace_serve.errors import ConfigError
from trace_serve.server.errors import ApiError
from trace_serve.server.keys import access as keys_access
from trace_serve.server.keys.access import Access
from trace_serve.server.keys.file import read_keys, write_keys
from trace_serve.server.keys.key import KeyEntry, KeyLimits, KeyRing, hash_key, mint_key, new_entry
from trace_serve.server.keys.private import read_private

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`trace-serve keys ARGS --key-file keys.json`: exit code, standard output and error."""

    def run_keys(*args: str) -> tuple[int, str, str]:
        code = main(["keys", *args, "--key-file", str(tmp_path / "keys.json")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_keys


def entry(name: str, key: str, **changes: Any) -> KeyEntry:
    options: dict[str, Any] = {"expires": None, "scopes": ["generate"], "limits": KeyLimits()}
    return new_entry(name, key, **{**options, **changes})


def bearer(key: str) -> str:
    return f"Bearer {key}"


def refused(access: Access, authorization: str | None, scope: Any = "generate") -> ApiError:
    with pytest.raises(ApiError) as caught:
        access.check(authorization, "10.0.0.1", scope)
    return caught.value


def test_a_key_is_printed_once_and_only_its_hash_is_kept(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("add", "ci", "--tokens-per-minute", "5000", "--expires-days", "30", "--scope", "generate")
    key = out.strip()
    kept = (tmp_path / "keys.json").read_text()
    stored = json.loads(kept)["keys"][0]
    assert code == 0
    assert re.fullmatch(r"tsk_[A-Za-z0-9_-]{43}", key)
    assert key not in kept
    assert stored["sha256"] == hash_key(key)
    assert (stored["scopes"], stored["limits"]["tokens_per_minute"]) == (["generate"], 5000)
    expires = datetime.fromisoformat(stored["expires"])
    assert timedelta(days=29) < expires - datetime.now(UTC) <= timedelta(days=30)
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    _, listed, _ = run("list")
    assert "ci" in listed
    assert key not in listed
    assert stored["sha256"] not in listed
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


def test_two_keys_have_the_names_they_were_given_and_one_can_be_revoked(run: Run, tmp_path: Path) -> None:
    first, second = run("add", "one")[1].strip(), run("add", "two")[1].strip()
    assert first != second
    assert run("revoke", "one")[0] == 0
    assert [each.name for each in read_keys(tmp_path / "keys.json")[0].keys] == ["two"]
    code, _, error = run("revoke", "one")
    assert code == 3
    assert "two" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["add", "a b"], "NAME"),
        (["add", "a", "--scope", "everything"], "--scope"),
        (["add", "a", "--expires-days", "0"], "--expires-days"),
        (["add", "there"], "already"),
    ],
)
def test_a_bad_command_changes_nothing_and_prints_no_key(
    run: Run, tmp_path: Path, args: list[str], message: str
) -> None:
    run("add", "there")
    before = (tmp_path / "keys.json").read_bytes()
    code, out, error = run(*args)
    assert (code, out) == (3, "")
    assert message in error
    assert (tmp_path / "keys.json").read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o620])
def test_a_key_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, [])
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"--key-file: .*mode {mode:04o}.*chmod 600") as caught:
        Access(None, path)
    assert caught.value.field == "key_file"


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "large"])
def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys.json"
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "large":
        path.write_bytes(b"x" * 101)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"--key-file: .*keys\.json"):
        read_private(path, flag="--key-file", limit=100)


@pytest.mark.parametrize(
    ("owner", "me", "mode", "accepted"),
    [
        (0, 1000, 0o440, True),
        (0, 1000, 0o640, True),
        (0, 1000, 0o660, False),
        (0, 1000, 0o444, False),
        (1000, 1000, 0o400, True),
        (1000, 1000, 0o440, False),
        (0, 0, 0o440, False),
        (1001, 1000, 0o400, False),
    ],
)
def test_a_group_may_read_only_what_root_mounted_for_another_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: int, me: int, mode: int, accepted: bool
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    real = path.stat()
    shown = os.stat_result((stat.S_IFREG | mode, real.st_ino, real.st_dev, 1, owner, 0, 1, 0, 0, 0))
    monkeypatch.setattr("trace_serve.server.keys.private.os.geteuid", lambda: me)
    monkeypatch.setattr("trace_serve.server.keys.private.os.fstat", lambda _: shown)
    if accepted:
        assert read_private(path, flag="--key-file")[0] == b"x"
    else:
        with pytest.raises(ConfigError, match="--key-file"):
            read_private(path, flag="--key-file")


def valid_file() -> dict[str, Any]:
    return {"version": 1, "keys": [json.loads(entry(name, name * 8).model_dump_json()) for name in ("a", "b")]}


def set_field(index: int, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["keys"][index].__setitem__(name, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw.update(version=2), "version"),
        (lambda raw: raw.update(more=1), "more"),
        (set_field(1, "name", "a"), "name 'a' is there twice"),
        (set_field(0, "sha256", "AB" * 32), r"keys\.0\.sha256"),
        (set_field(0, "created", "2026-01-01T00:00:00"), r"keys\.0\.created"),
        (set_field(1, "scopes", ["generate", "root"]), r"keys\.1\.scopes\.1"),
        (set_field(1, "limits", {"concurrent": 0}), r"keys\.1\.limits\.concurrent"),
        (set_field(0, "key", "secret"), r"keys\.0\.key"),
    ],
)
def test_a_damaged_key_file_is_refused_and_the_place_is_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    raw = valid_file()
    edit(raw)
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(raw))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)


def test_every_entry_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [mint_key() for _ in range(5)]
    ring = KeyRing(entry(f"key-{index}", key) for index, key in enumerate(keys))
    compared: list[bytes] = []
    real = keys_access.hashlib.sha256

    def count(kept: bytes, presented: bytes) -> bool:
        compared.append(kept)
        return kept == presented

    monkeypatch.setattr("trace_serve.server.keys.key.hmac.compare_digest", count)
    for index, key in enumerate(keys):
        found = ring.find(key.encode())
        assert found is not None
        assert found.name == f"key-{index}"
    assert ring.find(b"tsk_" + b"x" * 43) is None
    assert compared == [real(key.encode()).digest() for key in keys] * 6


def test_scopes_and_expiry_decide(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = datetime.now(UTC) - timedelta(seconds=1)
    write_keys(
        path,
        [
            entry("sampler", "sampler-key", limits=KeyLimits(concurrent=3)),
            entry("watcher", "watcher-key", scopes=["metrics"]),
            entry("past", "past-key", expires=old),
        ],
    )
    access = Access(None, path)
    caller = access.check(bearer("sampler-key"), None, "generate")
    assert (caller.name, caller.limits.concurrent) == ("sampler", 3)
    assert access.check(bearer("watcher-key"), None, None).name == "watcher"
    lacking = refused(access, bearer("watcher-key"))
    assert (lacking.status, lacking.code) == (403, "missing_scope")
    expired = refused(access, bearer("past-key"))
    assert (expired.status, expired.code) == (401, "invalid_api_key")
    assert "expired" in expired.message


@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Basic sampler-key", "Bearer wrong", "sampler-key"])
def test_without_a_key_that_counts_it_is_a_401_in_openai_form(tmp_path: Path, sent: str | None) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, [entry("sampler", "sampler-key")])
    error = refused(Access(None, path), sent)
    assert error.status == 401
    assert error.body()["error"]["type"] == "authentication_error"
    assert error.body()["error"]["code"] == "invalid_api_key"
    assert error.headers()["www-authenticate"] == "Bearer"


def test_a_key_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, [])
    assert refused(Access(None, path), None).status == 401


def test_the_single_key_and_a_key_file_work_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, [entry("sampler", "sampler-key")])
    access = Access(SecretStr("single-key"), path)
    assert access.check(bearer("single-key"), None, "metrics").name == "api-key"
    assert access.check(bearer("sampler-key"), None, "generate").name == "sampler"
    assert "single-key" not in repr(vars(access))
    write_keys(path, [entry("api-key", "sampler-key")])
    with pytest.raises(ConfigError, match="rename"):
        Access(SecretStr("single-key"), path)


def test_a_server_without_keys_is_open_and_tells_clients_apart_by_what_they_send() -> None:
    access = Access(None, None)
    assert access.open
    assert access.check(None, "10.0.0.1", "generate").name == "10.0.0.1"
    first, second = (access.check(bearer(key), "10.0.0.1", "generate").name for key in ("one", "two"))
    assert first != second
    assert "one" not in first


def test_an_edit_takes_effect_and_a_slip_keeps_the_keys_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_access, "POLL_S", 0.0)
    path = tmp_path / "keys.json"
    write_keys(path, [entry("one", "key-one")])
    access = Access(None, path)
    write_keys(path, [entry("two", "key-two")])
    assert access.check(bearer("key-two"), None, "generate").name == "two"
    assert refused(access, bearer("key-one")).status == 401
    path.write_text("{")
    assert access.check(bearer("key-two"), None, "generate").name == "two"
    path.unlink()
    assert access.check(bearer("key-two"), None, "generate").name == "two"
    write_keys(path, [entry("three", "key-three")])
    path.chmod(0o644)
    assert refused(access, bearer("key-three")).status == 401
    path.chmod(0o600)
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    assert access.check(bearer("key-three"), None, "generate").name == "three"
