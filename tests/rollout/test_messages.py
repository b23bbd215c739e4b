"""Test the Messages API of the endpoint.

A conversation has the same tokens as by the Chat API. A stream has Anthropic's events and the
content of the whole answer. Clients of Anthropic's API run unmodified.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from tests.envs.test_chat import QWEN
from tests.rollout.test_endpoint import THINKING, chat_of, rest_of, visit
from tests.rollout.test_external import ANTHROPIC, CALL, CHAT, World, says, whole
from tests.support.scripted_agents import OWN_TOOL, with_anthropic, with_litellm, with_sdk
from unstale.config import EndpointConfig
from unstale.engines import SamplingParams
from unstale.envs.calculator import TOOL
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.conversation import with_call_ids
from unstale.rollout.endpoint.messages import MessageFormat, read_messages
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.server import RecordingEndpoint

LENIENT = EndpointConfig(lenient=True)
ASKED = {"role": "user", "content": "one"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def use(call: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "calculate", "input": given}


def result(call: str, content: Any = "30") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


def test_an_agent_of_anthropics_client_has_the_tokens_of_one_of_openais() -> None:
    pytest.importorskip("anthropic")
    worlds = World(), World()
    ours, other = (
        whole(world.play(agent))
        for world, agent in zip(worlds, (with_anthropic, with_sdk), strict=True)
    )
    assert (ours.reward, ours.num_turns, ours.branches) == (1, 2, ())
    assert ours.pieces == other.pieces
    assert worlds[0].sampled == worlds[1].sampled and not worlds[0].events


def test_the_example_of_the_docs_runs() -> None:
    pytest.importorskip("anthropic")
    example: dict[str, Any] = {}
    exec(ANTHROPIC, example)
    world = World()
    trajectory = whole(world.play(example["agent"]))
    assert (trajectory.reward, trajectory.num_turns) == (1, 2) and not world.events


def conversation(api: str, replies: Sequence[str], template: str) -> Any:
    """Return what is recorded of a conversation with two calls in a reply, by one of the APIs."""
    chat = chat_of(template)
    reply = with_call_ids(wire.HistoryMessage(*reversed(chat.reader.parse_text(replies[0]))), "0")
    ids = [call.id for call in reply.message.tool_calls]
    if api == "chat":
        history: list[Any] = [
            {"role": "system", "content": [text("Be "), text("brief.")]},
            {"role": "user", "content": "What is 10 + 20?"},
            wire.message(reply),
            *({"role": "tool", "tool_call_id": each, "content": "30"} for each in ids),
            {"role": "user", "content": "Go on."},
        ]
        return wire.read_chat({"messages": history, "tools": [TOOL]}, temperature=1.0).call
    answer = MessageFormat("policy", chat).whole([wire.Choice(reply, "stop", (), 1)], None)
    blocks = [*(result(each, [text("30")]) for each in reversed(ids)), text("Go "), text("on.")]
    body = {
        "system": [text("Be "), {**text("brief."), **CACHED}],
        "messages": [
            {"role": "user", "content": [{**text("What is 10 + 20?"), **CACHED}]},
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": blocks},
        ],
        "tools": [{**OWN_TOOL, **CACHED, "type": "custom", "eager_input_streaming": True}],
        "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        **CACHED,
    }
    return read_messages(body, temperature=1.0).call


@pytest.mark.parametrize("thoughts", ["", "Hm.\n</think>\n\n"])
@pytest.mark.parametrize("said", ["So. ", ""])
def test_a_conversation_is_the_one_that_chat_would_have(thoughts: str, said: str) -> None:
    template = THINKING if thoughts else QWEN
    replies = [f"{thoughts}{said}{CALL}{CALL.replace('20', '21')}"]
    ours, others = (conversation(api, replies, template) for api in ("messages", "chat"))
    assert ours == others and ours.form == others.form
    chat = chat_of(template)
    tokens = [
        each.chat(chat).encode_prompt([one.message for one in each.history])
        for each in (ours, others)
    ]
    assert tokens[0] == tokens[1]


async def events_of(client: httpx.AsyncClient, body: Any) -> list[Any]:
    async with client.stream("POST", "messages", json={**body, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in events]
    return events


def assembled(events: Sequence[Any]) -> Any:
    """Return the message that a client puts together from a stream. Check the events' order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message, is_open = dict(events[0]["message"]), False
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                block = dict(event["content_block"])
                message["content"].append(block)
                is_open, given = True, ""
            case "content_block_delta":
                delta = event["delta"]
                assert is_open and event["index"] == len(message["content"]) - 1
                if delta["type"] == "input_json_delta":
                    given += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
                if block["type"] == "tool_use":
                    block["input"] = json.loads(given)
    assert not is_open and events[-2]["type"] == "message_delta"
    assert events[-2]["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def test_a_stream_has_the_blocks_of_the_whole_answer() -> None:
    def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        is_sum = "calculate" in CHAT.text(tokens)
        return rest_of(f"So. It is a sum. {CALL}" if is_sum else "One. Two. Three.", tokens)

    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"messages": [{"role": "user", "content": "calculate"}], "tools": [OWN_TOOL]}, "tool_use"),
        ({}, "end_turn"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"stop_sequences": ["Four", "wo. T"]}, "stop_sequence"),
    )

    async def act(client: httpx.AsyncClient, world: World) -> None:
        for fields, reason in cases:
            body = {"model": "m", "messages": [ASKED], "max_tokens": 64, **fields}
            plain = (await client.post("messages", json=body)).json()
            streamed = assembled(await events_of(client, body))
            assert (plain["stop_reason"], plain["model"]) == (reason, "m")
            assert plain["stop_sequence"] == ("wo. T" if reason == "stop_sequence" else None)
            for answer in (plain, streamed):
                assert answer.pop("id").startswith("msg")
                for block in answer["content"]:
                    block.pop("id", "")  # every call has its own
            assert plain == streamed
            counted = await client.post("messages/count_tokens", json=body)
            assert counted.json() == {"input_tokens": plain["usage"]["input_tokens"]}
        assert plain["content"] == [text("One. T")]

    trajectory = visit(World(say, max_turns=8), act)
    assert len(trajectory.branches) == 7, "nothing is recorded of what is only counted"


@pytest.mark.parametrize("said", ["Hm.\n</think>\n\nYes.", f"Hm.\n</think>\n\n{CALL}", "Yes.", ""])
def test_thoughts_text_and_calls_of_a_reply_are_read_back_as_one_message(said: str) -> None:
    chat = chat_of(THINKING if "</think>" in said else QWEN)
    reply = with_call_ids(wire.HistoryMessage(*reversed(chat.reader.parse_text(said))), "0/1")
    answer = wire.Choice(reply, "stop", (), 1)
    request = read_messages({"messages": [ASKED], "tools": [OWN_TOOL]}, temperature=1.0)
    whole_answer = MessageFormat("policy", chat).whole([answer], request)
    messages = [ASKED, {"role": "assistant", "content": whole_answer["content"]}]
    if reply.message.tool_calls:
        messages.append({"role": "user", "content": [result(reply.message.tool_calls[0].id)]})
    again = read_messages({"messages": messages}, temperature=1.0).call.history
    assert again[1].key == reply.key and (again[1].thoughts or None) == reply.thoughts
    form = MessageFormat("policy", chat)
    events = [
        *form.begin(request),
        *(event for end in range(len(said)) for event in form.grow(0, said[:end], request)),
        *form.end([answer], request),
    ]
    blocks = assembled([*events[:-2], {**events[-2], "usage": {"input_tokens": 0}}, events[-1]])
    assert [{**each, "signature": ""} for each in blocks["content"]] == [
        {**each, "signature": ""} for each in whole_answer["content"]
    ]


def turn(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [*content]}


CALLED = turn("assistant", use("a"))
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
NO_BASE64 = {"type": "base64", "media_type": "image/png", "data": "%"}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 0}, "temperature", "endpoint.lenient"),
    ({"top_k": 5}, "top_k", "endpoint.lenient"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.type", "endpoint.lenient"),
    ({"thinking": {"type": "disabled"}}, "thinking.type", "the policy itself decides"),
    ({"output_config": {"effort": "low"}}, "output_config.effort", "endpoint.lenient"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format",
        "endpoint.lenient",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type", "endpoint.lenient"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "own tools"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "own tools"),
    ({"context_management": {"edits": [1]}}, "context_management", "a context is never cut"),
    ({"n": 2}, "n", "unknown field"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": ["x"]}, "messages[0]", "is not an object"),
    ({"messages": [{**ASKED, "role": "tool"}]}, "messages[0].role", "user, assistant, system"),
    ({"messages": [turn("user")]}, "messages[0].content", "a list of blocks"),
    ({"messages": [turn("user", IMAGE)]}, "messages", "the policy reads only text"),
    (
        {"messages": [turn("user", {**IMAGE, "source": {"type": "url", "url": "http://x"}})]},
        "messages[0].content[0].source.type",
        "cannot be 'url': the endpoint fetches no pictures",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", result("a", [{**IMAGE, "source": NO_BASE64}]))]},
        "messages[2].content[0].content[0].source.data",
        "is not base64",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", result("a", [{"type": "document"}]))]},
        "messages[2].content[0].content[0]",
        "is not a block of type text or image or tool_reference",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", result("a", [REFERENCE]))]},
        "messages[2].content[0].content[0]",
        "tool_name is 'later', which no tool has",
    ),
    (
        {"messages": [ASKED, turn("assistant", {"type": "redacted_thinking", "data": "x"})]},
        "messages[1].content[0]",
        "is not a block of type thinking or text or tool_use",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", text("x"), result("a"))]},
        "messages[2].content[1]",
        "is a block of type tool_result after one of type text",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", result("b"))]},
        "messages[2].content[0].tool_use_id",
        "messages[2].content[0].tool_use_id is 'b', but no tool call of messages[1] has this id",
    ),
    (
        {"messages": [ASKED, CALLED, ASKED]},
        "messages[1]",
        "messages[1] has tool calls without a result: a. The next message must begin with",
    ),
    (
        {"messages": [ASKED, CALLED, turn("user", result("a"), result("a"))]},
        "messages[2].content[1].tool_use_id",
        "messages[2].content[0] has the same id",
    ),
    (
        {"messages": [turn("user", result("a"))]},
        "messages[0].content[0]",
        "no call comes before it",
    ),
    (
        {"system": "a", "messages": [ASKED, {"role": "system", "content": "b"}]},
        "messages[1]",
        "there is at most one system message",
    ),
    ({"messages": [ASKED, turn("assistant", text("x"))]}, "messages", "nothing to answer"),
    ({"messages": [{**ASKED, "content": "long " * 5000}]}, "messages", "no reply fits"),
]


def test_a_deferred_tool_is_described_where_a_result_refers_to_it() -> None:
    later = {**OWN_TOOL, "name": "later", "defer_loading": True}
    turns = [ASKED, CALLED, turn("user", result("a", [text("Found: "), REFERENCE]))]
    before = read_messages({"messages": [ASKED], "tools": [OWN_TOOL]}, temperature=1.0)
    found = read_messages({"messages": turns, "tools": [OWN_TOOL, later]}, temperature=1.0)
    assert found.call.form == before.call.form and found.calls
    described = {"type": "function", "function": {**TOOL["function"], "name": "later"}}
    assert found.call.history[2].message.content == f"Found: {json.dumps(described)}\n"
    seen = {**later, "defer_loading": False}
    found = read_messages({"messages": turns, "tools": [OWN_TOOL, seen]}, temperature=1.0)
    assert found.call.history[2].message.content == "Found: later\n"


def test_what_cannot_be_done_is_refused_in_anthropics_form() -> None:
    async def act(client: httpx.AsyncClient, world: World) -> None:
        body = {"messages": [ASKED], "max_tokens": 8}
        for change, param, words in REFUSED:
            answer = await client.post("messages", json={**body, **change})
            assert answer.json()["type"] == "error"
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (change, error)
            assert error["type"] == "invalid_request_error" and words in error["message"], error
        neutral = {"temperature": None, "system": "", "thinking": {"type": "adaptive"}, "top_p": 1}
        assert (await client.post("messages", json={**body, **neutral})).status_code == 200
        large = await client.post("messages", content=b" " * (3 << 20))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        unread = await client.get("messages")
        assert (unread.status_code, unread.json()["type"]) == (405, "error")
        for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), (None, 200)):
            headers = {"x-api-key": world.endpoint.token} if headers is None else headers
            async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as other:
                for path in ("messages", "v1/messages"):
                    answer = await other.post(path, json=body)
                    assert answer.status_code == status
                    if status == 401:
                        assert answer.json()["error"]["type"] == "authentication_error"

    visit(World(lambda tokens, params: says("so"), max_turns=9), act)


def test_a_lenient_endpoint_counts_what_it_ignores() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"), text("Be brief.")]
    body = {
        "messages": [ASKED, {"role": "system", "content": "c"}],
        "system": system,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tool_choice": {"type": "tool", "name": "calculate"},
        "temperature": 0.5,
    }
    found = read_messages(body, temperature=1.0, config=LENIENT)
    assert set(found.overridden) == {
        *("thinking", "output_config", "context_management", "tool_choice", "temperature"),
        *("billing_header", "system_message"),
    }
    assert found.format and found.format.schema == {}
    first, *others = [each.message for each in found.call.history]
    assert first.content.startswith("Be brief.\n\nWrite the final reply as JSON")
    assert [(each.role, each.content) for each in others] == [("user", "one"), ("user", "c")]
    strict = read_messages({"messages": [ASKED], "system": system}, temperature=1.0)
    assert strict.call.history[0].message.content.startswith("x-anthropic"), "nothing is ignored"
    with pytest.raises(Refused, match="must be a number"):
        read_messages({"messages": [ASKED], "temperature": "x"}, temperature=1.0, config=LENIENT)


def test_a_streaming_tool_loop_of_anthropics_client_is_one_conversation() -> None:
    anthropic = pytest.importorskip("anthropic")

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with anthropic.AsyncAnthropic(
            base_url=base_url, api_key=api_key, max_retries=0
        ) as client:
            messages: list[Any] = [{"role": "user", "content": [{**text("10 + 20?"), **CACHED}]}]
            while True:
                async with client.messages.stream(
                    model="claude",
                    max_tokens=64,
                    system=[{**text("Use the tool."), **CACHED}],
                    messages=messages,
                    tools=[OWN_TOOL],
                ) as stream:
                    said = [part async for part in stream.text_stream]
                    reply = await stream.get_final_message()
                messages.append({"role": "assistant", "content": reply.content})
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    return float("".join(said) == "It is 30.")
                results = [result(call.id) for call in calls]
                reminder = text("<system-reminder>Be brief.</system-reminder>")
                messages.append({"role": "user", "content": [*results, reminder]})

    world = World()
    trajectory = whole(world.play(agent))
    assert (trajectory.reward, trajectory.num_turns, trajectory.branches) == (1, 2, ())
    assert "system-reminder" in CHAT.text(trajectory.tokens)


def test_a_refusal_reaches_anthropics_client_as_its_own_error() -> None:
    anthropic = pytest.importorskip("anthropic")

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        asked = {"model": "m", "max_tokens": 8, "messages": [ASKED]}
        async with anthropic.AsyncAnthropic(
            base_url=base_url, api_key=api_key, max_retries=0
        ) as client:
            with pytest.raises(anthropic.BadRequestError, match="temperature must be the run's"):
                await client.messages.create(**asked, extra_body={"temperature": 0})
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="no").messages.create(**asked)
            await client.messages.create(**asked)
        return 1.0

    assert whole(World().play(agent)).num_turns == 1


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_litellm_as_a_client_of_anthropics_api(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("litellm")
    world = World()
    world.endpoint = RecordingEndpoint(LENIENT)
    agent = partial(with_litellm, api="anthropic", streamed=streamed)
    trajectory = whole(world.play(agent))
    assert (trajectory.reward, trajectory.num_turns, trajectory.branches) == (1, 2, ())
