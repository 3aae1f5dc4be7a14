"""Whatever happens, no key appears in a log line, an answer, a metric, or a command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Running, ScriptedEngine

from trace_serve.server.keys.file import write_keys
from trace_serve.server.keys.key import KeyLimits, mint_key, new_entry

CHAT = "/v1/chat/completions"
SINGLE, FILED, EXPIRED, WRONG = (mint_key() for _ in range(4))
SECRETS = {"single": SINGLE, "filed": FILED, "expired": EXPIRED, "wrong": WRONG, "engine": ScriptedEngine.api_key}
BODIES: list[Any] = [
    {"messages": [{"role": "user", "content": "tokens=1"}]},
    {"messages": [{"role": "user", "content": "tokens=1"}], "stream": True},
    {"messages": [{"role": "user", "content": "status=500 message=broken"}]},
    {"messages": [{"role": "user", "content": "status=401 message=bad"}]},
    {"messages": [{"role": "user", "content": "tokens=3 error_after=1"}], "stream": True},
    {"messages": [{"role": "user", "content": "tokens=3 cut_after=1"}], "stream": True},
    {"messages": [{"role": "user", "content": "tokens=3 garbage_after=1"}], "stream": True},
    {"messages": [], "n": 0},
    {"messages": [{"role": "user", "content": "x" * 2000}]},
    [1, 2],
]


def found_in(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


def test_no_output_of_a_server_at_debug_level_holds_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    limits = KeyLimits(tokens_per_minute=10_000)
    entries = [
        new_entry(n, k, expires=None, scopes=["generate"], limits=limits) for n, k in (("f", FILED), ("e", EXPIRED))
    ]
    past = entries[1].created.replace(year=2020)
    write_keys(keys, [entries[0], entries[1].model_copy(update={"expires": past})])
    texts: dict[str, str] = {}
    running = Running(tmp_path, api_key=SINGLE, key_file=keys, log_level="debug", client_stall_s=1)
    with running:
        for key in (SINGLE, FILED, EXPIRED, WRONG, WRONG * 50):
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=running.url, headers=headers, timeout=20) as client:
                for index, body in enumerate(BODIES):
                    keep(texts, f"answer {index} {key[:8]}", client, "POST", CHAT, content=json.dumps(body).encode())
                keep(texts, f"garbage {key[:8]}", client, "POST", CHAT, content=b"{" + key.encode())
                for path in ("/v1/models", "/trace/report", "/v1/rollouts/trace-0/hints", "/nowhere", "/v1/embeddings"):
                    keep(texts, f"{path} {key[:8]}", client, "GET", path)
                    keep(texts, f"query of {path} {key[:8]}", client, "GET", f"{path}?api_key={WRONG}")
        raw_garbage(running)
        assert running.process.pid is not None
        texts["argv"] = " ".join(psutil.Process(running.process.pid).cmdline())
        texts["metrics"] = httpx.get(running.url + "/metrics").text
        os.kill(running.engine()["pid"], signal.SIGKILL)
        time.sleep(0.5)
        texts["metrics without engine"] = httpx.get(running.url + "/metrics").text
        keys.write_text("{" + FILED)
        time.sleep(1.2)
        with httpx.Client(base_url=running.url) as client:
            keep(texts, "broken key file", client, "GET", "/v1/models")
    log = (tmp_path / "server.log").read_text()
    assert "key_file_refused" in log
    assert "engine_lost" in log or "engine_failed" in log or "restart" in log
    texts["log"] = log
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name not in ("keys.json", "engine.json"):
            texts[path.name] = path.read_text("utf-8", "replace")
    assert {where: names for where, text in texts.items() if (names := found_in(text))} == {}


def test_a_traceback_shows_no_local_variables() -> None:
    code = (
        "import logging, structlog\n"
        "from trace_serve.server.run import configure_logging\n"
        "configure_logging('debug')\n"
        "def handler(authorization):\n"
        "    header = [(b'authorization', authorization.encode())]\n"
        "    raise RuntimeError('boom')\n"
        "for log in (logging.getLogger('uvicorn.error'), structlog.get_logger('trace_serve.server')):\n"
        "    try:\n"
        f"        handler('Bearer ' + {WRONG[::-1]!r}[::-1])\n"
        "    except RuntimeError:\n"
        "        log.exception('failed')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr.count("boom") >= 2
    assert "handler" in ran.stderr
    assert found_in(ran.stderr) == []


def test_a_setting_that_is_refused_shows_no_key() -> None:
    environment = {**os.environ, "TRACE_SERVE_API_KEY": WRONG, "TRACE_SERVE_PORT": "none"}
    command = [sys.executable, "-m", "trace_serve.server", "nowhere"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ran.returncode == 3
    assert "TRACE_SERVE_PORT" in ran.stderr
    assert found_in(ran.stdout + ran.stderr) == []


def keep(texts: dict[str, str], name: str, client: httpx.Client, method: str, path: str, **options: Any) -> None:
    try:
        answer = client.request(method, path, **options)
    except httpx.TransportError as exc:
        texts[name] = str(exc)
    else:
        texts[name] = f"{answer.headers} {answer.text}"


def raw_garbage(running: Running) -> None:
    """Requests that no HTTP library would send."""
    host, port = running.url.removeprefix("http://").split(":")
    for data in (
        f"GET /v1/models HTTP/9.9\r\nauthorization: Bearer {WRONG}\r\n\r\n",
        f"NONSENSE {WRONG}\r\n\r\n",
        f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {WRONG}\x01\r\n\r\n",
        f"GET /v1/{WRONG} HTTP/1.1\r\nhost: x\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {WRONG}\r\ncontent-length: -5\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {WRONG}\r\ncontent-length: 10\r\n\r\nshort",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data.encode())
