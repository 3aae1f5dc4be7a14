"""What each workload asks, and that two processes with one plan ask the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval_gate import suites
from trace_serve.errors import ConfigError
from trace_serve.load.clients import client_of
from trace_serve.load.exchange import Client
from trace_serve.load.plan import LoadPlan, make_plan
from trace_serve.load.workloads import Workload, open_workload


def opened(**given: Any) -> Workload:
    return open_workload(make_plan(given))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt(workload: Workload, index: int) -> str:
    return str(workload.request(index).body["messages"][-1]["content"])


@pytest.mark.parametrize("name", ["chat", "shared-prefix", "long-context"])
def test_requests_depend_on_seed_and_index_alone(name: str) -> None:
    first, again, other = (opened(workload=name, seed=seed) for seed in (1, 1, 2))
    assert [first.request(index) for index in range(20)] == [again.request(index) for index in range(20)]
    assert [first.request(index) for index in range(20)] != [other.request(index) for index in range(20)]


def test_chat_asks_every_shipped_query_before_any_twice() -> None:
    count = len(suites.path("support").read_text("utf-8").splitlines())
    workload = opened()
    asked = [json.dumps(workload.request(index).body["messages"]) for index in range(count)]
    shipped = [json.loads(line) for line in suites.path("support").read_text("utf-8").splitlines()]
    assert sorted(asked) == sorted(json.dumps(each["messages"]) for each in shipped)
    assert workload.request(count) == workload.request(0)


def test_requests_ask_for_a_stream_with_usage_and_the_plans_fields() -> None:
    body = opened(max_tokens=7, model="m", hints="on", ignore_eos=True, temperature=0.5).request(0).body
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["model"], body["trace_hints"]) == (7, "m", True)
    assert (body["ignore_eos"], body["temperature"]) == (True, 0.5)
    assert "trace_hints" not in opened().request(0).body


def test_shared_prefixes_are_shared_and_questions_are_not() -> None:
    workload = opened(workload="shared-prefix", prefix_groups=3, prefix_words=50)
    prefixes = [workload.request(index).body["messages"][0]["content"] for index in range(40)]
    assert len(set(prefixes)) == 3
    assert all(len(each.split()) == 50 for each in prefixes)
    assert len({prompt(workload, index) for index in range(40)}) == 40


def test_long_prompts_differ_from_their_first_word_on() -> None:
    workload = opened(workload="long-context", prompt_words=300)
    prompts = [prompt(workload, index) for index in range(10)]
    assert len({each.split()[0] for each in prompts}) == 10
    assert all(300 <= len(each.split()) < 310 for each in prompts)


def logged(name: str, time: str, **fields: Any) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": name}], "max_tokens": 5, "model": "old", "user": "u"}
    record = {"schema_version": 1, "id": name, "time": time, "route": "/v1/chat/completions", "status": 200}
    return {**record, "outcome": "ok", "request": request, "response": None, **fields}


def test_a_request_log_is_replayed_in_its_order_and_rhythm(tmp_path: Path) -> None:
    log = lines(
        tmp_path / "log.jsonl",
        logged("b", "2026-01-01T00:00:03.500+00:00"),
        logged("a", "2026-01-01T00:00:02.000+00:00"),
        logged("refused", "2026-01-01T00:00:02.100+00:00", status=429),
    )
    workload = opened(workload="request-log", trace=log, arrivals="trace")
    assert [prompt(workload, index) for index in range(3)] == ["a", "b", "a"]
    assert workload.stamps_s is not None
    assert workload.stamps_s[1] - workload.stamps_s[0] == pytest.approx(1.5)
    body = workload.request(0).body
    assert body["max_tokens"] == 5
    assert "model" not in body
    assert "user" not in body
    assert workload.notes == ["1 of 3 records of the log cannot be replayed"]


def test_a_mooncake_trace_keeps_lengths_times_and_shared_blocks(tmp_path: Path) -> None:
    trace = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1200, "output_length": 40, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1100, "output_length": 80, "hash_ids": [1, 2, 9]},
    )
    workload = opened(workload="mooncake", trace=trace, arrivals="trace", length_scale=0.125)
    first, second = (prompt(workload, index).split() for index in range(2))
    assert (len(first), len(second)) == (150, round(1100 / 8))
    assert first[:128] == second[:128]
    assert first[128:] != second[128 : len(first)]
    assert [workload.request(index).body["max_tokens"] for index in range(2)] == [5, 10]
    assert workload.stamps_s is not None
    assert workload.stamps_s.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("given", "record", "named"),
    [
        ({"queries": "FILE"}, {"id": "x"}, "expected messages"),
        (
            {"workload": "mooncake", "trace": "FILE"},
            {"timestamp": 1, "input_length": -1, "output_length": 1},
            "input_l",
        ),
        ({"workload": "mooncake", "trace": "FILE"}, {"timestamp": 1, "input_length": 1}, "output_length"),
        ({"workload": "request-log", "trace": "FILE"}, {"schema_version": 9}, "schema_version"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_key(
    tmp_path: Path, given: dict[str, str], record: dict[str, Any], named: str
) -> None:
    path = lines(tmp_path / "file.jsonl", record)
    with pytest.raises(ConfigError, match=f"file.jsonl:1: .*{named}"):
        opened(**{name: str(path) if value == "FILE" else value for name, value in given.items()})


@pytest.mark.parametrize("given", [{"queries": "FILE"}, {"workload": "mooncake", "trace": "FILE"}])
def test_empty_and_absent_files_are_refused(tmp_path: Path, given: dict[str, str]) -> None:
    for path in (lines(tmp_path / "empty.jsonl"), tmp_path / "absent.jsonl"):
        with pytest.raises(ConfigError, match=path.name):
            opened(**{name: str(path) if value == "FILE" else value for name, value in given.items()})


def test_who_leaves_and_who_reads_slowly_is_drawn_by_seed() -> None:
    plan = make_plan({"disconnect_share": 0.3, "slow_share": 0.2})
    drawn = [client_of(plan, index) for index in range(2000)]
    assert drawn == [client_of(plan, index) for index in range(2000)]
    assert drawn.count(Client.LEAVES) / 2000 == pytest.approx(0.3, abs=0.05)
    assert drawn.count(Client.SLOW) / 2000 == pytest.approx(0.2, abs=0.05)
    assert {client_of(LoadPlan(), index) for index in range(100)} == {Client.PLAIN}
