"""An audit log shows every edit of its past."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_serve.errors import ConfigError
from trace_serve.server.policies.audit import START, AuditLog, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for index in range(5):
        log.append("activate", actor="someone", policy=f"a@{index}")
    log.close()
    return path


def test_an_untouched_log_verifies_and_goes_on_where_it_was(path: Path) -> None:
    chain = verify(path)
    assert chain.lines == 5
    log = AuditLog(path)
    assert log.head == chain.head
    assert log.append("rollback", actor="someone")["seq"] == 5
    assert verify(path).lines == 6
    assert [event["event"] for event in log.tail(2)] == ["activate", "rollback"]
    log.close()


def test_a_new_log_starts_the_chain_and_is_private(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "new.jsonl")
    assert log.head == START
    assert log.append("activate", actor="someone")["previous"] == START
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o600
    log.close()


def test_every_changed_byte_of_a_line_that_has_a_successor_breaks_the_chain(path: Path) -> None:
    data = path.read_bytes()
    end_of_fourth = len(b"".join(data.splitlines(keepends=True)[:4]))
    for index in range(end_of_fourth):
        changed = bytearray(data)
        changed[index] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(ConfigError, match=r"audit\.jsonl"):
            verify(path)


@pytest.mark.parametrize("change", ["remove", "insert", "swap", "repeat"])
def test_lines_cannot_be_moved(path: Path, change: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "remove":
        del lines[1]
    elif change == "insert":
        lines.insert(1, b'{"event": "activate"}\n')
    elif change == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines.insert(1, lines[1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="a line was edited, removed or inserted"):
        verify(path)
    with pytest.raises(ConfigError):
        AuditLog(path)


def test_lines_cut_off_the_end_show_against_a_head_kept_elsewhere(path: Path) -> None:
    head = verify(path).head
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(path).head != head


def test_a_line_that_a_crash_left_unfinished_stays_and_is_named(path: Path) -> None:
    with path.open("ab") as log:
        log.write(b'{"seq": 5, "event": "acti')
    with pytest.raises(ConfigError, match="ends in the middle of a line"):
        verify(path)
    log = AuditLog(path)
    log.append("activate", actor="someone")
    log.close()
    assert verify(path).lines == 7
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    with pytest.raises(ConfigError):
        verify(path)


def test_garbage_that_no_event_explains_is_refused(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b"not json\n"]))
    with pytest.raises(ConfigError, match="not a JSON object"):
        verify(path)
