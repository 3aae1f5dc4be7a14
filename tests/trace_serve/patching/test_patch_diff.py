from __future__ import annotations

import pytest

from trace_serve.errors import PatchError
from trace_serve.patching.diff import parse_diff

PATH = "sglang/a.py"
HEAD = f"--- a/{PATH}\n+++ b/{PATH}\n"
CHANGE = HEAD + "@@ -2,3 +2,3 @@ def f():\n two\n-three\n+THREE\n four\n"
BEFORE = b"one\ntwo\nthree\nfour\nfive\n"
AFTER = b"one\ntwo\nTHREE\nfour\nfive\n"


def test_a_hunk_applies_and_is_undone() -> None:
    (diff,) = parse_diff("p", CHANGE)

    assert diff.forward(BEFORE) == AFTER
    assert diff.backward(AFTER) == BEFORE


@pytest.mark.parametrize(
    "content",
    [b"zero\n" + BEFORE, BEFORE.replace(b"two", b"2"), BEFORE.replace(b"\n", b"\r\n"), b"one\ntwo\n", b"", AFTER],
)
def test_a_hunk_never_applies_with_an_offset_or_other_context(content: bytes) -> None:
    (diff,) = parse_diff("p", CHANGE)

    with pytest.raises(PatchError, match=r"sglang/a\.py: the hunk for line 2 does not match"):
        diff.forward(content)


@pytest.mark.parametrize(
    ("hunk", "before", "after"),
    [
        ("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n", b"a", b"b\n"),
        ("@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", b"a\n", b"b"),
        ("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n", b"a", b"b"),
        ("@@ -1 +1,2 @@\n+x\n a\n\\ No newline at end of file\n", b"a", b"x\na"),
        ("@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n", b"a\r\nb\r\n", b"a\r\nc\r\n"),
        ("@@ -1 +1 @@\n-a\r\n\\ No newline at end of file\n+a\n", b"a\r", b"a\n"),
        ("@@ -1,2 +1,2 @@\n a\x0cb\u2028c\n-d\n+e\n", "a\x0cb\u2028c\nd\n".encode(), "a\x0cb\u2028c\ne\n".encode()),
        ("@@ -0,0 +1 @@\n+a\n", b"", b"a\n"),
        ("@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", b"a\n\nb\n", b"a\n\nc\n"),
        ("@@ -2,0 +3,1 @@\n+x\n", b"a\nb\nc\n", b"a\nb\nx\nc\n"),
    ],
)
def test_line_endings_and_missing_final_newlines_are_exact(hunk: str, before: bytes, after: bytes) -> None:
    (diff,) = parse_diff("p", HEAD + hunk)

    assert diff.forward(before) == after
    assert diff.backward(after) == before


def test_a_created_file_exists_only_after_the_patch() -> None:
    (diff,) = parse_diff("p", f"--- /dev/null\n+++ b/{PATH}\n@@ -0,0 +1 @@\n+a\n")

    assert diff.forward(None) == b"a\n"
    assert diff.backward(b"a\n") is None
    with pytest.raises(PatchError, match="expects no such file"):
        diff.forward(b"")


def test_an_empty_file_can_be_created() -> None:
    text = f"diff --git a/{PATH} b/{PATH}\nnew file mode 100644\nindex 0000000..e69de29\n"

    (diff,) = parse_diff("p", text)

    assert diff.forward(None) == b""
    assert diff.backward(b"") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no file change"),
        ("just words\n", "got no file change"),
        (CHANGE.replace("-2,3 +2,3", "-2,9 +2,9"), "not a unified diff"),
        (CHANGE.replace("-2,3 +2,3", "-2,2 +2,2"), "beyond the length its hunk announces"),
        (CHANGE + CHANGE, "in two places"),
        (f"--- a/{PATH}\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "deletes a file"),
        (f"--- a/{PATH}\n+++ b/sglang/b.py\n@@ -1 +1 @@\n-a\n+b\n", "renames a file"),
        (f"diff --git a/{PATH} b/{PATH}\nold mode 100644\nnew mode 100755\n" + CHANGE, "changes a file mode"),
        (f"diff --git a/{PATH} b/{PATH}\nBinary files a/{PATH} and b/{PATH} differ\n", "is binary"),
        (CHANGE.replace(PATH, "sglang/../../etc/passwd"), "expected b/sglang/"),
        (CHANGE.replace(PATH, "torch/a.py"), "expected b/sglang/"),
        (CHANGE.replace(f"b/{PATH}", f"b/{PATH}\r"), "sglang"),
        (CHANGE.replace("a/sglang", "sglang").replace("b/sglang", "sglang"), "expected b/sglang/"),
        ("--- a//sglang/a.py\n+++ b//sglang/a.py\n@@ -1 +1 @@\n-a\n+b\n", "expected b/sglang/"),
    ],
)
def test_what_cannot_be_applied_exactly_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message) as raised:
        parse_diff("some.patch", text)

    assert str(raised.value).startswith("some.patch: ")
    assert "\n" not in str(raised.value)
