"""Every advisory that the audit passes over has its reason, and is passed to pip-audit as written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"(GHSA-[0-9a-z]{4}(-[0-9a-z]{4}){2}|PYSEC-\d{4}-\d+|CVE-\d{4}-\d+) +\S.{10,}")


def test_every_allowed_advisory_has_a_reason() -> None:
    lines = (ROOT / "audit-allow.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#") and LINE.fullmatch(line) is None] == []


def test_the_make_target_reads_ids_and_nothing_else(tmp_path: Path) -> None:
    recipe = re.search(r"\$\$\((sed .*) audit-allow\.txt\)", (ROOT / "Makefile").read_text("utf-8"))
    assert recipe is not None
    listed = tmp_path / "allow.txt"
    listed.write_text("# GHSA-aaaa-bbbb-cccc no\n\nGHSA-xxxx-yyyy-zzzz  never called\nPYSEC-2026-1  not on Linux\n")
    done = subprocess.run(f"{recipe[1]} {listed}", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--ignore-vuln", "GHSA-xxxx-yyyy-zzzz", "--ignore-vuln", "PYSEC-2026-1"]
