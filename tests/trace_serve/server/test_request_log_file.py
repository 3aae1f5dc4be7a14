from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trace_serve.errors import ConfigError
from trace_serve.server.observe.request_log_file import LogFile


def opened(path: Path, *, max_bytes: int = 1000, files: int = 3) -> LogFile:
    file = LogFile(path, max_bytes=max_bytes, files=files)
    file.open()
    return file


def test_lines_are_appended_to_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"before\n")
    path.chmod(0o644)
    file = opened(path)
    file.append(b"after\n")
    file.close()
    assert path.read_bytes() == b"before\nafter\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_file_is_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    file = opened(path, max_bytes=10, files=3)
    for number in range(5):
        file.append(f"line {number}.\n".encode())
    file.close()
    found = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert found == {
        "requests.jsonl": "line 4.\n",
        "requests.jsonl.1": "line 3.\n",
        "requests.jsonl.2": "line 2.\n",
    }
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_one_file_alone_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    file = opened(path, max_bytes=10, files=1)
    file.append(b"line one\n")
    file.append(b"line two\n")
    file.close()
    assert [each.name for each in tmp_path.iterdir()] == ["requests.jsonl"]
    assert path.read_bytes() == b"line two\n"


def test_a_line_longer_than_a_file_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    file = opened(path, max_bytes=10)
    long = b"x" * 100 + b"\n"
    for line in (b"short\n", long, b"short\n"):
        file.append(line)
    file.close()
    assert (tmp_path / "requests.jsonl.1").read_bytes() == long


@pytest.mark.parametrize("broken", [b"half of a li", b"x" * 200_000])
def test_what_a_crash_left_unfinished_is_removed_at_the_next_start(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"whole\n" + broken)
    file = LogFile(path, max_bytes=1 << 20, files=2)
    assert file.open() == len(broken)
    file.append(b"next\n")
    file.close()
    assert path.read_bytes() == b"whole\nnext\n"


def test_a_file_of_one_broken_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"half of a li")
    opened(path).close()
    assert path.read_bytes() == b""


def test_a_line_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from trace_serve.server.observe.request_log_file import LogFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))\n"
        "file = LogFile(Path(sys.argv[1]), max_bytes=10_000, files=2); file.open()\n"
        "file.append(b'a' * 99 + b'\\n')\n"
        "for size in (99, 40):\n"
        "    try: file.append(b'b' * size + b'\\n'); print('written')\n"
        "    except OSError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "written"]
    assert path.read_bytes() == b"a" * 99 + b"\n" + b"b" * 40 + b"\n"


def test_two_servers_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    first = opened(path)
    with pytest.raises(ConfigError, match="another process writes it"):
        opened(path)
    first.close()
    opened(path).close()


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "no directory"])
def test_only_a_regular_file_of_its_own_is_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "requests.jsonl"
    if kind == "link":
        target = tmp_path / "elsewhere"
        target.write_bytes(b"precious\n")
        path.symlink_to(target)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "missing" / "requests.jsonl"
    with pytest.raises(ConfigError, match="--request-log"):
        opened(path)
    if kind == "link":
        assert target.read_bytes() == b"precious\n"
