from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Running

from trace_serve.server.observe.logging_engine import severity_of
from trace_serve.server.observe.logging_setup import HIDDEN, forget, hide, without_secrets

CHAT = "/v1/chat/completions"
SETUP = "from trace_serve.server.observe.logging_setup import configure_logging, hide; configure_logging"


def run(code: str) -> list[str]:
    """What a process that runs this code writes to standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.stderr.splitlines()


def parsed(code: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(code)]


def until(check: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)


def lines_of(running: Running, rid: str) -> list[dict[str, Any]]:
    return [line for line in running.log() if line.get("request_id") == rid]


def test_each_request_is_one_line_with_its_id_and_a_time_in_utc(shared: Running, client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "tokens=2"}], "stream": True}
    answer = client.post(CHAT, json=body, headers={"x-request-id": "mine"})
    rid = answer.headers["x-request-id"]
    until(lambda: bool(lines_of(shared, rid)))
    (line,) = lines_of(shared, rid)
    facts = {"event": "request", "level": "info", "label": "mine", "route": CHAT, "status": 200, "outcome": "ok"}
    assert {name: line[name] for name in facts} == facts
    assert (line["logger"], line["policy"]) == ("trace_serve.request", "scripted@1")
    at = datetime.fromisoformat(line["timestamp"])
    assert at.utcoffset() == timedelta(0)


def test_every_line_of_a_server_is_json(shared: Running, client: httpx.Client) -> None:
    assert client.get("/no/such/path").status_code == 404
    until(lambda: any(line.get("route") == "unknown" for line in shared.log()))
    lines = (shared.directory / "server.log").read_text().splitlines()
    assert lines
    for line in lines:
        assert {"event", "level", "timestamp", "logger"} <= set(json.loads(line))


def test_neither_prompts_nor_keys_are_logged(shared: Running, client: httpx.Client) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": "tokens=1 a-secret-prompt"}]},
        {"messages": [{"role": "user", "content": "abort=1 a-secret-prompt"}]},
        {"messages": [{"role": "a-secret-role", "content": "a-secret-prompt"}]},
    ]
    ids = [client.post(CHAT, json=body).headers["x-request-id"] for body in bodies]
    assert httpx.post(shared.url + CHAT, headers={"authorization": "Bearer a-wrong-key"}, json={}).status_code == 401
    until(lambda: all(lines_of(shared, rid) for rid in ids))
    text = (shared.directory / "server.log").read_text()
    for secret in ("a-secret", "a-wrong-key", str(shared.api_key), "scripted-engine-key"):
        assert secret not in text


def test_a_server_is_quiet_about_health_checks(shared: Running) -> None:
    assert httpx.get(shared.url + "/health/ready").status_code == 200
    answer = httpx.get(shared.url + "/v1/models", headers={"authorization": f"Bearer {shared.api_key}"})
    assert answer.status_code == 200
    until(lambda: any(line.get("route") == "/v1/models" for line in shared.log()))
    assert not any(line.get("route", "").startswith("/health") for line in shared.log())


def test_lines_of_libraries_warnings_and_crashes_are_json_too() -> None:
    lines = parsed(
        f"{SETUP}('info')\n"
        "import logging, threading, warnings\n"
        "logging.getLogger('uvicorn.error').warning('from %s', 'uvicorn')\n"
        "warnings.warn('a warning of python')\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker'); thread.start(); thread.join()\n"
        "raise RuntimeError('the end')"
    )
    by_logger = {line["logger"]: line for line in lines}
    assert by_logger["uvicorn.error"]["event"] == "from uvicorn"
    assert by_logger["uvicorn.error"]["level"] == "warning"
    assert "a warning of python" in by_logger["py.warnings"]["event"]
    uncaught = [line for line in lines if line["event"] == "uncaught"]
    assert [line["exception"][0]["exc_type"] for line in uncaught] == ["ZeroDivisionError", "RuntimeError"]
    assert uncaught[0]["thread"] == "worker"


def test_a_traceback_shows_no_local_variables() -> None:
    lines = run(f"{SETUP}('info')\ndef f(prompt):\n    raise ValueError('no')\nf('a-secret' + '-prompt')")
    assert "ValueError" in lines[0]
    assert "a-secret-prompt" not in lines[0]


@pytest.mark.parametrize("secret", ["plain-key-123", 'quote"and\\slash', "ключ-1234"])
def test_a_hidden_text_is_in_no_line_whatever_logs_it(secret: str) -> None:
    code = (
        f"{SETUP}('info'); hide({secret!r})\nimport logging, structlog\n"
        f"logging.getLogger('other').warning('key %s', {secret!r})\n"
        f"structlog.get_logger('x').info('event', headers={{'authorization': 'Bearer ' + {secret!r}}})\n"
        f"raise ValueError({secret!r})"
    )
    lines = run(code)
    assert len(lines) == 3
    assert all(HIDDEN in line for line in lines)
    assert not any(secret in line or json.dumps(secret)[1:-1] in line for line in lines)


def test_a_text_can_be_shown_again_and_a_short_one_is_never_hidden() -> None:
    hide("engine-key")
    assert without_secrets("an engine-key here") == f"an {HIDDEN} here"
    forget("engine-key")
    assert without_secrets("an engine-key here") == "an engine-key here"
    hide("a")
    assert without_secrets("banana") == "banana"


def test_a_value_that_json_cannot_hold_is_still_a_line() -> None:
    code = "import structlog; structlog.get_logger('x').info('event', a='\\ud800', b=2**70, c=object)"
    (line,) = parsed(f"{SETUP}('info')\n{code}")
    assert (line["event"], line["b"], line["c"]) == ("event", 2**70, "<class 'object'>")


def test_lines_of_several_threads_stay_whole() -> None:
    code = (
        "import logging, structlog; from concurrent.futures import ThreadPoolExecutor\n"
        "def both(n):\n"
        "    structlog.get_logger('x').info('ours', text='x' * 5000); logging.getLogger('y').info('y' * 5000)\n"
        "with ThreadPoolExecutor(8) as pool: list(pool.map(both, range(100)))"
    )
    lines = parsed(f"{SETUP}('info')\n{code}")
    assert len(lines) == 200
    assert sum(line["event"] == "ours" for line in lines) == 100


def test_levels_below_the_one_asked_for_are_left_out() -> None:
    code = "import logging; [logging.getLogger('x').log(n, 'm') for n in (10, 20, 30, 40)]"
    assert [line["level"] for line in parsed(f"{SETUP}('warning')\n{code}")] == ["warning", "error"]
    assert [line["level"] for line in parsed(f"{SETUP}('debug')\n{code}")] == ["debug", "info", "warning", "error"]


def test_console_lines_are_for_people_and_hold_no_control_characters() -> None:
    evil = "two\nlines \x1b[31mred"
    lines = run(
        f"{SETUP}('info', 'console')\nimport logging, structlog\n"
        f"structlog.get_logger('x').info('request', label={evil!r})\nlogging.getLogger('y').info({evil!r})"
    )
    assert len(lines) == 2
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[info +\] request", lines[0])
    assert "\x1b" not in "".join(lines)
    assert all(r"two\nlines" in line for line in lines)


def test_format_and_level_are_options_of_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Running(tmp_path, log_format="console", log_level="debug") as running:
        httpx.get(running.url + "/health/live")
        until(lambda: "route=/health/live" in log.read_text())
    lines = log.read_text().splitlines()
    assert all("[debug" in line for line in lines if "route=/health/live" in line)
    assert not any(line.startswith("{") for line in lines)


ENGINE = """
import sys, time
print("[2026-11-30 01:28:22 TP0] capacity 1.0")
print("loading:  50%|#####     | 1/2 [00:00<00:00]\\rloading: 100%|##########| 2/2 [00:00<00:00]")
print("[2026-11-30 01:28:23] key " + sys.argv[1], flush=True)
print("Traceback (most recent call last):\\n  File x, line 1\\nValueError: no", flush=True)
sys.stdout.write("the last words"); sys.stdout.flush()
time.sleep(600)
"""

FOLLOWED = """
import subprocess, sys, tempfile
from pathlib import Path
from trace_serve.server.observe.logging_engine import FollowedEngine
from trace_serve.server.observe.logging_setup import configure_logging

class Engine:
    url, api_key, served_name = "", "an-engine-key", ""
    def start(self):
        self.directory = tempfile.TemporaryDirectory()
        self.log_path = Path(self.directory.name) / "engine.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", sys.argv[1], self.api_key], stdout=log)
    def wait_ready(self, timeout_s): ...
    def poll(self): return self.process.poll()
    def stop(self, timeout_s):
        while b"last words" not in self.log_path.read_bytes(): pass
        self.process.kill(); self.process.wait(); self.directory.cleanup()

configure_logging("info")
engine = FollowedEngine(Engine())
engine.start()
engine.stop(1)
"""


def test_the_engines_output_becomes_lines_of_the_servers_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWED, ENGINE], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["logger"] for line in lines} == {"trace_serve.engine"}
    assert [(line["level"], line["event"]) for line in lines] == [
        ("info", "capacity 1.0"),
        ("info", f"key {HIDDEN}"),
        ("error", "Traceback (most recent call last):"),
        ("error", "  File x, line 1"),
        ("error", "ValueError: no"),
        ("info", "the last words"),
    ]


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("[2026-11-30 01:28:22] ready", "info"),
        ("x.py:53: UserWarning: only CUDA", "warning"),
        ("torch.OutOfMemoryError: 3 GiB", "error"),
        ("no errors so far", "info"),
        ("    raise it", "error"),
    ],
)
def test_a_line_of_the_engine_is_as_bad_as_its_words(line: str, severity: str) -> None:
    assert severity_of(line, "error") == severity


def test_threads_and_files_of_a_followed_engine_end_with_it() -> None:
    code = FOLLOWED + (
        "import os, threading\n"
        "assert 'engine-log' not in [thread.name for thread in threading.enumerate()]\n"
        "paths = [f'/proc/self/fd/{number}' for number in os.listdir('/proc/self/fd')]\n"
        "links = [os.readlink(path) for path in paths if os.path.islink(path)]\n"
        "assert not any('engine.log' in link for link in links), links\n"
    )
    subprocess.run([sys.executable, "-c", code, ENGINE], capture_output=True, timeout=60, check=True)
