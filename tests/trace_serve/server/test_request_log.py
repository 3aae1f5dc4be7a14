from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redactors
from exposition import page, value
from harness import Running

from eval_gate.redaction import load_redactor
from trace_serve.errors import ConfigError
from trace_serve.server.observe.request_log import MAX_QUEUED_BYTES, RequestLog, open_request_log
from trace_serve.server.observe.request_log_file import LogFile
from trace_serve.server.observe.request_log_record import Exchange
from trace_serve.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HERE = Path(__file__).parent


class Logged(Running):
    """A front-end with a request log."""

    def __init__(self, directory: Path, redact: str = "redactors:mask", **settings: object) -> None:
        self.path = directory / "requests.jsonl"
        super().__init__(directory, request_log=self.path, request_log_redact=redact, **settings)
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        self.process._environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def ask(self, words: str, *, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": words}], **fields}
        return httpx.post(self.url + CHAT, json=body, headers=headers, timeout=20)

    def lines(self) -> list[dict[str, Any]]:
        raw = self.path.read_bytes()
        assert not raw or raw.endswith(b"\n")
        return [json.loads(line) for line in raw.splitlines()]

    def line_of(self, answer: httpx.Response) -> dict[str, Any]:
        rid = answer.headers["x-request-id"]
        until(lambda: any(line["id"] == rid for line in self.lines()))
        return next(line for line in self.lines() if line["id"] == rid)


def until(check: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)


def gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eval_gate.cli", *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    with Logged(tmp_path_factory.mktemp("logged")) as running:
        yield running


def test_a_request_and_its_answer_become_one_redacted_line(logged: Logged) -> None:
    answer = logged.ask("tokens=2 SECRETplan", max_tokens=7, user="anna@example.org")
    line = logged.line_of(answer)
    assert line["request"] == {"messages": [{"role": "user", "content": "tokens=2 [gone]"}], "max_tokens": 7}
    said = answer.json()["choices"][0]["message"]["content"]
    assert line["response"]["choices"][0]["message"] == {"role": "assistant", "content": said}
    facts = ("schema_version", "route", "status", "outcome", "policy", "redactor")
    assert [line[name] for name in facts] == [1, CHAT, 200, "ok", "scripted@1", "redactors:mask 7"]
    assert line["policy_digest"] == answer.headers["x-trace-policy-digest"]
    assert b"SECRET" not in logged.path.read_bytes()
    assert b"anna" not in logged.path.read_bytes()
    assert (value(page(logged.url), "trace_serve_request_log_records_total", result="written") or 0) >= 1


def test_the_recorded_redactor_is_named_as_the_gate_names_it(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    line = logged.line_of(logged.ask("tokens=1"))
    assert line["redactor"] == load_redactor("redactors:mask").name


def test_a_stream_is_recorded_as_the_answer_it_adds_up_to(logged: Logged) -> None:
    whole = logged.line_of(logged.ask("tokens=3"))
    streamed = logged.line_of(logged.ask("tokens=3 bytewise=1", stream=True))
    assert streamed["response"]["choices"] == whole["response"]["choices"]


def test_requests_of_one_conversation_share_a_name(logged: Logged) -> None:
    one, two, other = (
        logged.line_of(logged.ask("tokens=1", headers={"x-trace-conversation": name}))["conversation"]
        for name in ("case 7", "case 7", "case 8")
    )
    assert one == two != other
    assert logged.line_of(logged.ask("tokens=1"))["conversation"] is None


def test_failures_are_recorded_without_an_answer_and_refused_requests_not_at_all(logged: Logged) -> None:
    failed = logged.ask("abort=1")
    line = logged.line_of(failed)
    assert (line["status"], line["response"]) == (failed.status_code, None)
    cut = logged.line_of(logged.ask("tokens=3 cut_after=1", stream=True))
    assert (cut["status"], cut["outcome"], cut["response"]) == (200, "answer_cut", None)
    refused = logged.ask("tokens=1", temperature=9)
    logged.line_of(logged.ask("tokens=1"))
    assert refused.headers["x-request-id"] not in {line["id"] for line in logged.lines()}


def test_the_gate_replays_the_log(logged: Logged, tmp_path: Path) -> None:
    answers = [logged.ask(f"tokens={n}", headers={"x-trace-conversation": f"case {n % 2}"}) for n in (1, 2, 3)]
    answers.append(logged.ask("tokens=2", stream=True))
    body = {"prompt": "tokens=2", "max_tokens": 4}
    answers.append(httpx.post(logged.url + COMPLETIONS, json=body, timeout=20))
    for answer in (*answers, logged.ask("abort=1")):
        logged.line_of(answer)
    queries = tmp_path / "queries.jsonl"
    convert = ["convert", str(logged.path), str(queries), "--from", "request-log", "--answers", "recorded"]
    refused = gate(*convert)
    assert (refused.returncode, "was answered with status 502" in refused.stderr) == (3, True)
    done = gate(*convert, "--skip-unsupported", "--json")
    assert done.returncode == 0, done.stderr
    by_id = {query["id"]: query for query in map(json.loads, queries.read_text().splitlines())}
    assert set(by_id) == {line["id"] for line in logged.lines() if line["response"]}
    assert json.loads(done.stdout)["written"] == len(by_id)
    replayed = [by_id[answer.headers["x-request-id"]] for answer in answers]
    assert replayed[0]["cluster"] == replayed[2]["cluster"] != replayed[1]["cluster"]
    texts = [answers[0].json()["choices"][0]["message"]["content"], answers[4].json()["choices"][0]["text"]]
    assert [replayed[0]["checker"]["expected"], replayed[4]["checker"]["expected"]] == texts
    arms = ["--training", "http://127.0.0.1:1", "--serving", "http://127.0.0.1:2"]
    where = ["--queries", str(queries), "--margin", "0.05", "--out", str(tmp_path / "gate")]
    dry = gate("run", *arms, *where, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert json.loads(dry.stdout)["queries"] == len(by_id)


def test_a_killed_server_leaves_whole_lines(tmp_path: Path) -> None:
    with Logged(tmp_path, redact="none", request_log_max_bytes=100_000) as running:
        stop = threading.Event()

        def load() -> None:
            with httpx.Client(timeout=20) as client, contextlib.suppress(httpx.TransportError):
                while not stop.is_set():
                    body = {"messages": [{"role": "user", "content": "tokens=1 " + "x" * 2000}]}
                    client.post(running.url + CHAT, json=body)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: running.path.with_name("requests.jsonl.1").exists())
        assert running.process.pid is not None
        os.kill(running.process.pid, signal.SIGKILL)
        stop.set()
        for thread in threads:
            thread.join()
    ids = [
        json.loads(line)["id"]
        for path in tmp_path.glob("requests.jsonl*")
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n") or pytest.fail(f"{path}: half a line")
    ]
    assert len(ids) == len(set(ids)) > 20


class InProcess:
    """A request log of this process, whose redactor can be made to wait."""

    def __init__(self, path: Path, apply: Callable[[str], str] = redactors.mask, share: float = 1.0) -> None:
        self.counts: Counter[str] = Counter()
        self.path = path
        self.going = threading.Event()
        self.going.set()
        self.busy = threading.Event()

        def applied(text: str) -> str:
            self.busy.set()
            assert self.going.wait(60)
            return apply(text)

        file = LogFile(path, max_bytes=1 << 20, files=1)
        self.log = RequestLog(
            file, share=share, redactor="x", apply=applied, max_queued=2, count=lambda result: self.count(result)
        )

    def count(self, result: str) -> None:
        self.counts[result] += 1

    def submit(self, number: int, prompt: str = "SECRETplan") -> None:
        body = json.dumps({"prompt": prompt}).encode()
        nothing = {"conversation": None, "policy": None, "digest": None, "response": None}
        exchange = Exchange(
            id=str(number), route=CHAT, status=200, outcome="ok", at=0.0, request=body, streamed=False, **nothing
        )
        self.log.submit(exchange)

    def ids(self) -> list[str]:
        return [json.loads(line)["id"] for line in self.path.read_bytes().splitlines()]


def test_a_slow_redactor_costs_records_and_never_a_wait(tmp_path: Path) -> None:
    slow = InProcess(tmp_path / "log")
    slow.going.clear()
    slow.submit(0)
    assert slow.busy.wait(60)
    for number in range(1, 20):
        slow.submit(number)  # the redactor has not returned: a submit that waited for it would never come back
    assert slow.counts == {"dropped": 17}
    slow.going.set()
    slow.log.close(60)
    assert slow.counts == {"dropped": 17, "written": 3}
    assert slow.ids() == ["0", "1", "2"]


def test_records_that_wait_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    slow = InProcess(tmp_path / "log")
    slow.going.clear()
    slow.submit(0)
    assert slow.busy.wait(60)
    slow.submit(1, "x" * MAX_QUEUED_BYTES)
    slow.submit(2)
    assert slow.counts == {"dropped": 1}
    slow.going.set()
    slow.log.close(60)
    assert slow.ids() == ["0", "2"]


def test_a_redactor_that_raises_leaves_no_line_and_the_log_well(tmp_path: Path) -> None:
    def sometimes(text: str) -> str:
        return redactors.broken(text) if "bad" in text else redactors.mask(text)

    log = InProcess(tmp_path / "log", sometimes)
    for number, prompt in enumerate(("bad", "good")):
        log.submit(number, prompt)
    log.log.close(60)
    assert log.ids() == ["1"]
    assert log.counts == {"failed": 1, "written": 1}


def test_a_close_that_takes_too_long_drops_the_rest(tmp_path: Path) -> None:
    slow = InProcess(tmp_path / "log")
    slow.going.clear()
    for number in range(2):
        slow.submit(number)
    assert slow.busy.wait(60)
    slow.log.close(0.1)
    assert slow.counts == {"dropped": 1}
    slow.submit(9)
    assert slow.counts == {"dropped": 2}
    slow.going.set()
    until(lambda: slow.counts["written"] == 1)


def test_a_share_takes_whole_conversations(tmp_path: Path) -> None:
    log = InProcess(tmp_path / "log", share=0.25).log
    taken = [log.wants(f"trace-{number}", None) for number in range(4000)]
    assert 0.2 < sum(taken) / len(taken) < 0.3
    for conversation in map(str, range(50)):
        assert len({log.wants(f"trace-{number}", conversation) for number in range(20)}) == 1
    log.close(5)


@pytest.mark.parametrize(
    ("redact", "message"),
    [
        (None, r"say how they are redacted with --request-log-redact presidio or module:function, or `none`"),
        ("no_such_module:mask", r"--request-log-redact no_such_module:mask: cannot be imported"),
        ("json:decoder", r"--request-log-redact json:decoder: is not a function"),
    ],
)
def test_a_log_without_a_redaction_that_works_is_refused(tmp_path: Path, redact: str | None, message: str) -> None:
    settings = Settings(request_log=tmp_path / "log", request_log_redact=redact)
    with pytest.raises(ConfigError, match=message) as refusal:
        open_request_log(settings, lambda _: None)
    assert refusal.value.field == "request_log_redact"
    assert not (tmp_path / "log").exists()


def test_a_server_that_cannot_write_its_log_does_not_start(tmp_path: Path) -> None:
    running = Logged(tmp_path)
    running.path.mkdir()
    running.process.start()
    with pytest.raises(ConfigError, match=r"--request-log .*requests\.jsonl: cannot be opened"):
        running.process.wait_ready(20)
    assert not (tmp_path / "engine.json").exists()
