"""Tools, formats and conversations are checked field by field, and reach the engine exactly as they were sent."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Running, prepare_policy

from trace_serve.server.errors import ApiError
from trace_serve.server.schemas.parsing import ChatRequest, parse_request
from trace_serve.server.tokens import PromptCounter

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(ChatRequest, {"messages": [HI], **fields})
    assert caught.value.status == 400
    return caught.value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ([], "tools"),
        ([tool(f"f{i}") for i in range(65)], "tools"),
        ([tool(), tool()], "tools"),
        ([tool("has space")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool(description="x" * 8193)], "tools[0].function.description"),
        ([tool(), {"type": "retrieval"}], "tools[1].type"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters=nested(48))], "tools[0].function.parameters"),
        ([tool(parameters={"enum": list(range(8200))})], "tools[0].function.parameters"),
        ([tool(parameters={"description": "x" * 70_000})], "tools[0].function.parameters"),
        ([tool(parameters={"$ref": "https://example.com/x"})], "tools[0].function.parameters"),
        ([tool(parameters={"$ref": "#"})], "tools[0].function.parameters"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(surprise=1)], "tools[0].function.surprise"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused_by_its_place(tools: list[Any], named: str) -> None:
    error = refusal(tools=tools)
    assert error.param == "tools"
    assert error.message.startswith(named)
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": schema_format(nested(60))}, "response_format"),
        ({"response_format": schema_format({"minLength": 10**9})}, "response_format"),
        ({"response_format": schema_format({"pattern": "x" * 513})}, "response_format"),
        ({"response_format": schema_format({"pattern": "((a{1,1000}){1,1000}){1,9}"})}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [tool()]}, "response_format"),
        ({"stream": True, "return_token_ids": True}, "return_token_ids"),
        ({"stream": True, "return_meta_info": True}, "return_meta_info"),
        ({"trace_hints": {"layers": [3, 1]}}, "trace_hints"),
        ({"trace_hints": {"sites": ["q"]}}, "trace_hints"),
        ({"trace_hints": {"sink": "shm"}}, "trace_hints"),
        ({"trace_hints": "file"}, "trace_hints"),
        ({"weight_version": ""}, "weight_version"),
        ({"return_rollout": 1}, "return_rollout"),
    ],
)
def test_a_field_that_contradicts_itself_or_another_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([HI, RESULT], "messages[1].tool_call_id"),
        ([HI, CALLED, HI], "messages[2]"),
        ([HI, CALLED], "messages"),
        ([HI, CALLED, RESULT, RESULT], "messages[3].tool_call_id"),
        ([HI, {"role": "assistant", "content": None}], "messages[1].content"),
        ([HI, {**CALLED, "tool_calls": [CALL, CALL]}], "messages[1].tool_calls"),
        ([HI, {**CALLED, "tool_calls": []}], "messages[1].tool_calls"),
        ([HI, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        (
            [HI, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}],
            "messages[1].tool_calls",
        ),
        (
            [HI, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
            "messages[1].tool_calls",
        ),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0]"),
        ([HI, {"role": "user", "content": None}], "messages[1].content"),
    ],
)
def test_a_conversation_that_does_not_hold_together_is_refused_by_its_place(messages: list[Any], named: str) -> None:
    error = refusal(messages=messages)
    assert error.param == "messages"
    assert error.message.startswith(named)


def test_what_an_answer_held_can_be_sent_back_as_it_was() -> None:
    answered = {"role": "assistant", "content": "hello", "reasoning_content": None, "refusal": None, "audio": None}
    streamed = {**CALLED, "tool_calls": [{**CALL, "index": 0}]}
    request = parse_request(ChatRequest, {"messages": [HI, answered, HI, streamed, RESULT]})
    assert [message.role for message in request.messages] == ["user", "assistant", "user", "assistant", "tool"]


def test_tools_and_schemas_reach_the_engine_with_their_keys_in_the_clients_order() -> None:
    parameters = {"type": "object", "properties": {"z": {"enum": ["x", None]}, "a": {"default": None}}}
    tools = [{"function": {"parameters": parameters, "strict": False, "name": "f"}, "type": "function"}]
    sent = {"messages": [HI], "tools": copy.deepcopy(tools), "tool_choice": "none"}
    payload = parse_request(ChatRequest, sent).upstream_payload(rid="r", served_name="m")
    assert json.dumps(payload["tools"]) == json.dumps(tools)
    form = schema_format({"properties": {"b": {}, "a": {"const": None}}})
    payload = parse_request(ChatRequest, {"messages": [HI], "response_format": form}).upstream_payload(
        rid="r", served_name="m"
    )
    assert json.dumps(payload["response_format"]) == json.dumps(form)


def test_options_of_hints_are_passed_on_with_the_front_ends_sink() -> None:
    wanted = {"messages": [HI], "trace_hints": {"layers": "deeper-half", "first_token": 5}}
    payload = parse_request(ChatRequest, wanted).upstream_payload(rid="r", served_name="m")
    assert payload["custom_params"]["trace_hints"] == {"layers": "deeper-half", "first_token": 5, "sink": "file"}


def test_a_schema_that_refers_to_itself_through_its_parts_is_fine() -> None:
    tree = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    parse_request(ChatRequest, {"messages": [HI], "response_format": schema_format(tree)})
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert "refers to itself" in refusal(response_format=schema_format(loop)).message


async def test_a_prompt_with_tools_is_the_engines_to_count(tmp_path: Path) -> None:
    prepare_policy(tmp_path)
    counter = PromptCounter(tmp_path)
    with_tools = {"messages": [HI], "tools": [tool()], "tool_choice": "none"}
    assert await counter.count(parse_request(ChatRequest, with_tools)) is None
    assert await counter.count(parse_request(ChatRequest, {"messages": [HI, CALLED, RESULT]})) is None
    assert await counter.shows_tools() is False
    counter.close()


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Running(tmp_path_factory.mktemp("calling"), tool_call_parser="qwen") as running:
        yield running


def test_tools_are_refused_where_no_call_could_be_read(client: httpx.Client) -> None:
    refused = client.post(CHAT, json={"messages": [HI], "tools": [tool()]})
    assert refused.json()["error"]["code"] == "tools_unsupported"
    assert client.post(CHAT, json={"messages": [HI], "tools": [tool()], "tool_choice": "none"}).status_code == 200


def test_a_demanded_call_passes_where_the_template_hides_tools_and_a_free_one_does_not(calling: Running) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return httpx.post(calling.url + CHAT, json={"messages": [HI], "tools": [tool()], **fields}, timeout=20)

    assert "chat template" in ask().json()["error"]["message"]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = ask(tool_choice=choice)
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("status", "message", "extra", "param"),
    [
        (400, "Failed_to_compile_json_grammar:_why", {"response_format": schema_format({})}, "response_format"),
        (500, "Grammar_accept_token_failed", {"response_format": schema_format({})}, "response_format"),
        (400, "trace_hints.sites:_this_engine_does_not_keep_experts_mid", {"trace_hints": True}, "trace_hints"),
    ],
)
def test_the_engines_refusal_names_the_field_that_it_is_about(
    client: httpx.Client, status: int, message: str, extra: dict[str, Any], param: str
) -> None:
    script = {"role": "user", "content": f"status={status} message={message}"}
    refused = client.post(CHAT, json={"messages": [script], **extra})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
