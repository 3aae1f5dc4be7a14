import hashlib
import json
import os

import pytest

from trace_serve.errors import PolicyError
from trace_serve.policy import chat_template_digest, digest_directory, digest_file, tokenizer_digest


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_digest_is_that_of_the_documented_canonical_json(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "sub" / "a.txt").write_bytes(b"")
    rows = [["b.txt", 3, sha(b"two")], ["sub/a.txt", 0, sha(b"")]]
    expected = "sha256:" + sha(json.dumps(rows, separators=(",", ":")).encode())
    assert digest_directory(tmp_path) == expected
    assert digest_file(tmp_path / "b.txt") == "sha256:" + sha(b"two")


def test_paths_sort_as_text_whatever_the_directory_order(tmp_path):
    for name in ("a", "a.b", "a-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"x")
    rows = [[name, 1, sha(b"x")] for name in ("a-b/f", "a.b/f", "a/f")]
    assert digest_directory(tmp_path) == "sha256:" + sha(json.dumps(rows, separators=(",", ":")).encode())


def test_any_change_of_name_content_or_place_changes_the_digest(tmp_path):
    seen = set()
    for place, content in [("a", b"1"), ("a", b"2"), ("b", b"1"), ("c/a", b"1")]:
        root = tmp_path / str(len(seen))
        (root / place).parent.mkdir(parents=True)
        (root / place).write_bytes(content)
        seen.add(digest_directory(root))
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["symlink", "broken symlink", "fifo", "hidden", "hidden directory"])
def test_what_cannot_be_digested_is_refused_by_name(tmp_path, kind):
    (tmp_path / "f").write_text("x")
    odd = tmp_path / (".odd" if "hidden" in kind else "odd")
    if kind == "symlink":
        odd.symlink_to(tmp_path / "f")
    elif kind == "broken symlink":
        odd.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(odd)
    elif kind == "hidden":
        odd.write_text("x")
    else:
        odd.mkdir()
    with pytest.raises(PolicyError, match="odd") as caught:
        digest_directory(tmp_path)
    assert caught.value.field == str(odd)


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="not a directory"):
        digest_directory(tmp_path / "none")
    with pytest.raises(PolicyError, match="cannot be read"):
        digest_file(tmp_path / "none")


def test_the_template_has_one_digest_wherever_it_is_kept(model):
    inside, apart = chat_template_digest(model), tokenizer_digest(model)
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "bos_token": "<s>"}')
    assert chat_template_digest(model) == inside
    assert tokenizer_digest(model) == apart


def test_no_template_and_another_template_have_other_digests(model):
    first = chat_template_digest(model)
    (model / "chat_template.jinja").write_text("{{ messages }} ")
    second = chat_template_digest(model)
    (model / "chat_template.jinja").unlink()
    assert len({first, second, chat_template_digest(model)}) == 3


def test_the_tokenizer_digest_sees_its_files(model):
    before = tokenizer_digest(model)
    (model / "tokenizer.json").write_text('{"model": {"x": 1}}')
    assert tokenizer_digest(model) != before
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(PolicyError, match="no tokenizer file"):
        tokenizer_digest(model)
