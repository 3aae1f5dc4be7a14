"""A query file is read whole or refused, with the line named."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_gate import queries, suites
from eval_gate.queries import load_queries
from eval_gate.suites import generate
from trace_serve.errors import QueryError

GOOD = b'{"id": "q1", "prompt": "2 + 2?", "checker": {"type": "numeric", "expected": 4}}\n'


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (GOOD, "q.jsonl:2: id 'q1' is already used on line 1"),
        (b'{"id": "q2", "prompt": "\xff"}\n', "q.jsonl:2: not UTF-8 at byte 25"),
        (b'{"id": "q2", "prompt": "\\ud800"}\n', "q.jsonl:2: unpaired surrogate"),
        (b'{"id": "q2", "prompt"\n', "q.jsonl:2: not a JSON object"),
        (b'["q2"]\n', "q.jsonl:2: got list, expected a JSON object"),
        (b'{"id": "q2", "id": "q3"}\n', "q.jsonl:2: .*key 'id' appears twice"),
        (b'{"id": "q2", "prompt": NaN}\n', "q.jsonl:2: .*NaN is not a JSON number"),
        (GOOD.replace(b'"q1"', b'"q2", "max_tokens": 0'), "q.jsonl:2: max_tokens: .*greater than or equal to 1"),
        (GOOD.replace(b'"q1"', b'"q2", "max_token": 5'), "q.jsonl:2: max_token: Extra inputs are not permitted"),
        (GOOD.replace(b'"q1"', b'"q2", "messages": []'), "q.jsonl:2: has both prompt and messages"),
        (GOOD.replace(b"numeric", b"psychic"), "q.jsonl:2: checker: .*psychic"),
        (GOOD.replace(b'"q1"', b'""'), "q.jsonl:2: id: "),
        (b"[" * 200_000 + b"\n", "q.jsonl:2: "),
        (GOOD.replace(b'"q1"', b'"q2", "cluster": ""'), "q.jsonl:2: cluster: "),
        (GOOD.replace(b'"q1"', b'"q2\\u0000"'), "q.jsonl:2: id: "),
        (b'{"id": "q2", "prompt": "\xed\xa0\x80"}\n', "q.jsonl:2: not UTF-8 at byte 25"),
    ],
)
def test_a_faulty_record_is_named_by_line(tmp_path: Path, second: bytes, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        load_queries(write(tmp_path, GOOD + second))


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_byte_order_marks_are_named(tmp_path: Path, mark: bytes) -> None:
    with pytest.raises(QueryError, match=r"q.jsonl:1: starts with the byte order mark of UTF-"):
        load_queries(write(tmp_path, mark + GOOD))


def test_written_queries_read_back_equal(tmp_path: Path) -> None:
    everything = load_queries(suites.path("support")).queries
    path = write(tmp_path, queries.canonical(everything))
    assert load_queries(path).queries == everything
    schema = {"id": "s", "prompt": "p", "checker": {"type": "json_schema", "schema": {"type": "object"}}}
    odd = queries.Query.model_validate(schema)
    assert load_queries(write(tmp_path, queries.canonical([odd]))).queries == (odd,)


def test_oversize_records_and_empty_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QueryError, match="no queries"):
        load_queries(write(tmp_path, b"\n\n"))
    with pytest.raises(QueryError, match="not a regular file"):
        load_queries(tmp_path)
    monkeypatch.setattr(queries, "MAX_RECORD_BYTES", 20)
    with pytest.raises(QueryError, match=r":1: record of \d+ bytes, expected at most 20"):
        load_queries(write(tmp_path, GOOD))


def test_a_prompt_is_one_user_turn_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    loaded = load_queries(write(tmp_path, b"\n" + GOOD + b"\n"))
    (query,) = loaded.queries
    assert [(m.role, m.content) for m in query.messages] == [("user", "2 + 2?")]
    assert loaded.digest.startswith("sha256:")


def test_a_subsample_is_random_seeded_and_not_the_first_lines() -> None:
    everything = load_queries(suites.path("support"))
    one, again, other = (everything.sample(40, seed) for seed in (1, 1, 2))
    assert one.queries == again.queries != other.queries
    assert one.queries != everything.queries[:40]
    assert len({query.kind for query in one.queries}) >= 4


@pytest.mark.parametrize(("which", "name"), list(enumerate(suites.NAMES)))
def test_shipped_suites_are_what_the_generator_writes(which: int, name: str) -> None:
    text = suites.path(name).read_text(encoding="utf-8")
    assert text == generate.dump(generate.build(name, which, generate.DEFAULT_SEED))
    loaded = load_queries(suites.path(name)).queries
    assert len(loaded) == sum(generate.COUNTS.values()) == 400
    assert {query.kind for query in loaded} == {"routing", "extraction", "arithmetic", "facts", "sentiment"}
    assert all(8 <= query.max_tokens <= 24 for query in loaded)


def test_the_development_suite_shares_no_item_with_the_shipped_one() -> None:
    shipped, development = (load_queries(suites.path(name)).queries for name in suites.NAMES)
    assert not {q.messages[-1] for q in shipped} & {q.messages[-1] for q in development}
    assert not {q.id for q in shipped} & {q.id for q in development}


def test_an_unknown_suite_is_named() -> None:
    with pytest.raises(QueryError, match=r"'suport'.*support, support-dev"):
        suites.path("suport")
