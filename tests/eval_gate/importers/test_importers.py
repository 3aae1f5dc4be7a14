"""Other tools' files become queries, or are refused by file and line and leave nothing behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_gate.cli import main
from eval_gate.importers import ImportOptions, convert
from eval_gate.importers.records import load_answers
from eval_gate.importers.sglang_dump import read_requests
from eval_gate.queries import Query, load_queries
from eval_gate.suites.named import open_all, open_queries, stored
from trace_serve.errors import ConfigError, QueryError

DATA = Path(__file__).parent / "data"


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., dict[str, Query]]:
    """Converts a fixture and reads the query file back, by id."""

    def run(name: str, file: str | Path, *, skip: bool = False, **options: Any) -> dict[str, Query]:
        out = tmp_path / "out.jsonl"
        convert(name, DATA / file, out, ImportOptions(**options), skip_unsupported=skip)
        return {query.id: query for query in load_queries(out).queries}

    return run


Converted = Callable[..., dict[str, Query]]


def turns(query: Query) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in query.messages]


def test_openai_batch_takes_its_answers_from_a_file_or_a_batch_output(converted: Converted, tmp_path: Path) -> None:
    found = converted("openai-batch", "openai-batch.jsonl", answers=load_answers(DATA / "openai-batch-output.jsonl"))
    assert turns(found["b-1"]) == [("system", "Answer in one word."), ("user", "Capital of France?")]
    assert (found["b-1"].max_tokens, found["b-1"].checker.type, found["b-1"].expected_text) == (
        16,
        "normalized",
        "Paris",
    )
    assert turns(found["b-2"]) == [("user", "2 + 2 =")]
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"id": "b-1", "expected": ["Paris", "paris"]}\n{"id": "b-2", "expected": "4"}\n')
    found = converted("openai-batch", "openai-batch.jsonl", answers=load_answers(answers), checker="contains")
    assert found["b-1"].checker.type == "contains"
    with pytest.raises(QueryError, match=r"openai-batch.jsonl:1: .*give --answers"):
        converted("openai-batch", "openai-batch.jsonl")


def test_openai_evals_match_the_start_of_an_answer(converted: Converted) -> None:
    found = converted("openai-evals", "openai-evals.jsonl")
    first, second = found["openai-evals:1"], found["openai-evals:2"]
    assert turns(first)[0] == ("system", "Complete the phrase as concisely as possible.")
    assert second.checker.model_dump() == {"type": "prefix", "expected": ("George Washington", "Washington")}


def test_promptfoo_crosses_prompts_with_tests_and_keeps_them_in_clusters(converted: Converted) -> None:
    found = converted("promptfoo", "promptfoo.yaml")
    assert len(found) == 8
    assert turns(found["test-0-prompt-0"]) == [("user", "Translate to French: Hello")]
    assert turns(found["test-0-prompt-1"]) == [("system", "You translate to French."), ("user", "Hello")]
    assert found["test-0-prompt-0"].cluster == found["test-0-prompt-1"].cluster == "test-0"
    assert turns(found["test-1-prompt-0"])[0][1].endswith("{{braces}} stay")
    assert found["test-1-prompt-0"].checker.model_dump()["expected"] == ("accolades", "French")
    assert [found[f"test-{n}-prompt-0"].checker.type for n in range(4)] == [
        *("contains", "contains", "json_schema", "regex")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("icontains", "llm-rubric"), r"tests.0: assertion 'llm-rubric' has no counterpart.*--skip-unsupported"),
        (("{{ text }}", "{{ text | upper }}"), "has filters or blocks"),
        (('{text: "Hello"}', '{text: "file://hello.txt"}'), "vars.text: files are not read"),
        (("tests:", "tests: ["), "not YAML"),
        (("prompts:", "prompt:"), "prompts and tests: expected a list"),
    ],
)
def test_promptfoo_features_without_counterpart_are_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((DATA / "promptfoo.yaml").read_text().replace(*change))
    with pytest.raises(QueryError, match=message):
        convert("promptfoo", path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_inspect_datasets_and_logs(converted: Converted, tmp_path: Path) -> None:
    found = converted("inspect", "inspect-dataset.jsonl")
    assert found["many"].cluster == "colours"
    assert found["many"].checker.model_dump()["expected"] == ("red", "blue", "yellow")
    assert turns(found["talk"]) == [("system", "Be brief."), ("user", "Capital of France?")]
    assert "B) chair" in found["pick"].prompt_text
    assert found["pick"].checker.model_dump() == {"type": "choice", "options": ("A", "B"), "expected": "A"}
    log = json.loads((DATA / "inspect-log.json").read_text())
    log["samples"] += [{**sample, "epoch": 2} for sample in log["samples"]]
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert converted("inspect", tmp_path / "log.json").keys() == {"sum", "many", "talk"}
    with pytest.raises(QueryError, match="inspect log dump"):
        converted("inspect", tmp_path / "packed.eval")


def test_sgl_eval_predictions_become_math(converted: Converted) -> None:
    found = converted("sgl-eval", "sgl-eval-predictions.jsonl", max_tokens=100)
    assert found["own-1"].checker.model_dump() == {"type": "math", "expected": r"\frac{1}{2}"}
    assert r"\boxed{}" in found["own-1"].prompt_text


def test_request_logs_replay_what_was_answered(converted: Converted) -> None:
    with pytest.raises(QueryError, match=r"request-log.jsonl:2: was answered with status 429; --skip-unsupported"):
        converted("request-log", "request-log.jsonl", recorded=True)
    (query,) = converted("request-log", "request-log.jsonl", recorded=True, skip=True).values()
    assert (query.cluster, query.expected_text, query.max_tokens) == ("c-7", "Billing", 12)


def test_sglang_dumps_are_read_without_sglang(converted: Converted) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        converted("sglang-dump", "sglang-dump.pkl", recorded=True, skip=True)
    requests = read_requests(DATA / "sglang-dump.pkl")
    assert requests[0]["text"] == "<s>[INST] Capital of France? [/INST]"
    assert (requests[0]["output"], requests[0]["max_new_tokens"]) == (" Paris.", 16)
    assert (requests[1]["input_ids"], requests[1]["session"]) == ([1, 5, 6, 7], "s1")
    assert "not text alone" in requests[2]["unreadable"]


def test_token_ids_of_a_dump_are_decoded_without_the_tokenizer_s_own_prefix(
    converted: Converted, engine_model: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine_model / "tokenizer.json"))
    found = converted("sglang-dump", "sglang-dump.pkl", recorded=True, skip=True, tokenizer=engine_model)
    prefix = tokenizer.encode("").ids
    ids = [1, 5, 6, 7]
    expected = tokenizer.decode(ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids, skip_special_tokens=False)
    assert found["r1"].prompt_text == expected
    assert found["r1"].cluster == "s1"


class Evil:
    """Pickles to a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_code_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = Evil(f"touch {mark}")
    request = ({"rid": "r", "text": "hi", "custom": evil}, {"text": "out"}, 0.0, 1.0)
    path = tmp_path / "dump.pkl"
    path.write_bytes(pickle.dumps({"server_args": evil, "requests": [request]}))
    assert [one["text"] for one in read_requests(path)] == ["hi"]
    # The same bytes in the ordinary unpickler do run it, so the test would notice.
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"], check=True)
    assert mark.exists()
    mark.unlink()
    assert [one["text"] for one in read_requests(path)] == ["hi"]
    assert not mark.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"not a pickle",
        lambda raw: pickle.dumps({"requests": []}),
        lambda raw: pickle.dumps({"requests": [1]}),
        lambda raw: b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little"),
    ],
)
def test_damaged_dumps_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "dump.pkl"
    path.write_bytes(damage((DATA / "sglang-dump.pkl").read_bytes()))
    with pytest.raises(QueryError, match="not a dump"):
        read_requests(path)


LINES = {
    "openai-batch": ("openai-batch.jsonl", {"answers": {"b-1": "x", "b-2": "y"}}),
    "openai-evals": ("openai-evals.jsonl", {}),
    "inspect": ("inspect-dataset.jsonl", {}),
    "sgl-eval": ("sgl-eval-predictions.jsonl", {}),
    "request-log": ("request-log.jsonl", {"recorded": True}),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line[:-9], ":2: not a JSON object"),
        (lambda line: b"\xff" + line, ":2: not UTF-8 at byte 1"),
        (lambda line: b"{}", ":2: "),
        (lambda line: b"[1]", ":2: got list"),
        (lambda line: line.replace(b'": ', b'": "\\ud800", "x": ', 1).replace(b'":', b'":', 1), ":2: "),
    ],
)
def test_damaged_lines_are_named_and_nothing_is_written(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    file, options = LINES[name]
    good = (DATA / file).read_bytes().splitlines()[0]
    path = tmp_path / file
    path.write_bytes(good + b"\n" + damage(good) + b"\n")
    with pytest.raises(QueryError, match=f"{file}{message}"):
        convert(name, path, tmp_path / "out.jsonl", ImportOptions(**options))
    assert [one.name for one in tmp_path.iterdir()] == [file]


def test_repeated_ids_and_byte_order_marks_are_named(tmp_path: Path) -> None:
    line = (DATA / "inspect-dataset.jsonl").read_bytes().splitlines()[0] + b"\n"
    path = tmp_path / "d.jsonl"
    path.write_bytes(line + line)
    with pytest.raises(QueryError, match=r"d.jsonl:2: id 'sum' is already used at .*d.jsonl:1"):
        convert("inspect", path, tmp_path / "out.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + line)
    with pytest.raises(QueryError, match="byte order mark of UTF-8"):
        convert("inspect", path, tmp_path / "out.jsonl")


def test_unknown_formats_and_checkers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of openai-batch"):
        convert("csv", DATA / "openai-evals.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="--checker 'psychic'"):
        convert("openai-evals", DATA / "openai-evals.jsonl", tmp_path / "out.jsonl", ImportOptions(checker="psychic"))
    with pytest.raises(QueryError, match="'time' is not a number"):
        convert("openai-evals", DATA / "openai-evals.jsonl", tmp_path / "out.jsonl", ImportOptions(checker="numeric"))


@pytest.mark.parametrize("name", ["aime24", "aime25", "aime26"])
def test_aime_comes_from_the_wheel_of_sgl_eval(name: str) -> None:
    loaded = open_queries(name)
    assert len(loaded.queries) == 30
    assert {(query.suite, query.checker.type) for query in loaded.queries} == {(name, "math")}
    if name == "aime25":
        assert next(query for query in loaded.queries if query.id == "aime25-0").expected_text == "70"


def test_reasoning_gym_is_generated_by_seed_and_kept(tmp_path: Path) -> None:
    one, again, other = (open_queries(f"reasoning-gym:chain_sum:4:{seed}") for seed in (7, 7, 8))
    assert one.queries == again.queries != other.queries
    assert one.digest == again.digest != other.digest
    path = stored(one, tmp_path)
    assert path is not None
    assert load_queries(path).queries == one.queries
    assert load_queries(path).digest == one.digest
    assert stored(open_queries("support"), tmp_path) is None
    with pytest.raises(ConfigError, match="reasoning-gym:no_such_task"):
        open_queries("reasoning-gym:no_such_task:1:1")
    with pytest.raises(ConfigError, match="TASK:COUNT:SEED"):
        open_queries("reasoning-gym:chain_sum:many:1")


def test_several_suites_are_one_set_with_unique_ids() -> None:
    both = open_all(["support-dev", "reasoning-gym:chain_sum:3:0"])
    assert {query.suite for query in both.queries} >= {"reasoning-gym:chain_sum"}
    assert len(both.queries) == 403
    with pytest.raises(QueryError, match="already used"):
        open_all(["support-dev", "support-dev"])


def test_the_command_converts_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q.jsonl"
    arguments = ["convert", str(DATA / "request-log.jsonl"), str(out), "--from", "request-log"]
    monkeypatch.setattr(sys, "argv", ["eval-gate", *arguments, "--answers", "recorded", "--skip-unsupported", "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["written"] == 1
    assert "request-log.jsonl:2: was answered with status 429" in report["skipped"][0]
    monkeypatch.setattr(sys, "argv", ["eval-gate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 3
    assert capsys.readouterr().err.startswith("error: ")
