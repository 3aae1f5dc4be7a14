"""A fake site-packages directory with real files, and patches made for it with git."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

VERSION = "0.5.23"

RELEASED: dict[str, bytes] = {
    "sglang/__init__.py": b"",
    "sglang/srt/scheduler.py": b"".join(b"line %d\n" % i for i in range(1, 41)),
    "sglang/srt/windows.py": b"first\r\nsecond\r\nthird\r\n",
    "sglang/srt/no_newline.py": b"alpha\nbeta\x0cstill beta\nomega",
    "sglang/srt/untouched.py": b"nothing to see\n",
}

SCHEDULER_1 = RELEASED["sglang/srt/scheduler.py"].replace(b"line 5\n", b"line five\n").replace(b"line 30\n", b"")
SCHEDULER_2 = SCHEDULER_1.replace(b"line 6\n", b"line 6\ninserted\n")

FIRST: dict[str, bytes] = {
    "sglang/srt/scheduler.py": SCHEDULER_1,
    "sglang/srt/windows.py": b"first\r\nSECOND\r\nthird\r\n",
}
SECOND: dict[str, bytes] = {
    "sglang/srt/scheduler.py": SCHEDULER_2,
    "sglang/srt/no_newline.py": b"alpha\nbeta\x0cstill beta\nomega, with a newline now\n",
    "sglang/srt/extra/created.py": b"new file without a newline",
}
PATCHED: dict[str, bytes] = {**FIRST, **SECOND}


class FakeSite:
    """A site-packages directory with an installed package of the same name and layout as SGLang."""

    def __init__(self, root: Path, version: str = VERSION) -> None:
        self.root = root
        info = root / f"sglang-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        record = []
        for path, content in RELEASED.items():
            self.write(path, content)
            value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={value},{len(content)}\n")
        (info / "RECORD").write_text("".join(record))

    def write(self, path: str, content: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content)

    def snapshot(self) -> dict[str, bytes]:
        """Every file below the package, helper files and bytecode included."""
        files = (path for path in (self.root / "sglang").rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}


def make_patch(directory: Path, name: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    """Writes a patch with git, the tool that developers make patches with."""
    work = directory.parent / f"git-{name}"
    work.mkdir()

    def git(*args: str) -> bytes:
        config = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false")
        return subprocess.run(["git", *config, *args], cwd=work, check=True, capture_output=True).stdout

    def fill(files: Mapping[str, bytes]) -> None:
        for path, content in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(content)

    git("init", "-q")
    fill(before)
    git("add", "-A")
    git("commit", "-q", "-m", "before")
    fill(after)
    git("add", "-A")
    diff = git("diff", "--cached", "--no-color", "--no-ext-diff", "--text")
    header = f"Subject: {name} in short\nWhy: because\n  of something.\nObsolete-when: never.\n\n"
    (directory / name).write_bytes(header.encode() + diff)
