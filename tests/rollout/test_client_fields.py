"""Test the fields that client libraries add to their requests.

Fields that are null are absent. Those that change no reply are ignored with `endpoint.lenient`, and
named. A refusal names the field, also inside of a part of a message.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from unstale.config import SHIPPED_POLICY, EndpointConfig
from unstale.envs.chat import Chat
from unstale.model.loading import load_tokenizer
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.responses import read_response
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.session import AgentSession

LENIENT = EndpointConfig(lenient=True)
ASK: dict[str, Any] = {"role": "user", "content": "hi"}
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{**ASK, "content": [CACHED]}]}, "messages[0].content[0].cache_control", ""),
    ({"messages": [{**ASK, "cache_control": {"x": 1}}]}, "messages[0].cache_control", ""),
    (
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": "x",
                    "provider_specific_fields": {"refusal": None},
                },
                ASK,
            ]
        },
        "messages[1].provider_specific_fields",
        "",
    ),
    ({"verbosity": "low"}, "verbosity", ""),
    ({"return_token_ids": True}, "return_token_ids", ""),
    ({"repetition_penalty": 1.1}, "repetition_penalty", ""),
    ({"ignore_eos": True}, "ignore_eos", ""),
    ({"top_logprobs": 5}, "top_logprobs", ""),
    (
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "continuous_usage_stats",
    ),
]


def read(body: dict[str, Any], config: EndpointConfig = wire.STRICT) -> wire.CompletionRequest:
    return wire.read_chat({"messages": [ASK], **body}, temperature=1.0, config=config)


@pytest.mark.parametrize(("body", "param", "_"), FIELDS)
def test_a_field_without_influence_is_refused_by_its_name(
    body: dict[str, Any], param: str, _: str
) -> None:
    with pytest.raises(Refused) as refused:
        read(body)
    assert refused.value.param == param and param in str(refused.value)


@pytest.mark.parametrize(("body", "param", "name"), FIELDS)
def test_a_lenient_endpoint_ignores_and_names_it(
    body: dict[str, Any], param: str, name: str
) -> None:
    found = read(body, LENIENT)
    assert found.overridden == (name or param.rpartition(".")[2],)
    bare = json.loads(json.dumps(body), object_hook=_without)
    assert found.call == read({key: bare[key] for key in bare if key == "messages"}).call
    assert found.usage == ("stream_options" in body)


def _without(record: dict[str, Any]) -> dict[str, Any]:
    names = ("cache_control", "provider_specific_fields")
    return {key: value for key, value in record.items() if key not in names}


def test_a_lenient_endpoint_does_not_show_the_policy_marks_of_a_cache() -> None:
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}}
    assert read({"tools": [marked]}, LENIENT).call == read({"tools": [TOOL]}).call


@pytest.mark.parametrize(
    "field", ["foo", "prediction", "web_search_options", "seed", "tools", "verbosity", "stop"]
)
def test_null_is_absent(field: str) -> None:
    plain = read({})
    assert read({field: None}) == plain
    message = {**ASK, field: None, "content": [{"type": "text", "text": "hi", field: None}]}
    assert read({"messages": [message]}) == plain
    assert read({field: None}, LENIENT).overridden == ()
    assert read_response({"input": "hi", field: None}, temperature=1.0).call == plain.call


def test_neutral_values_are_accepted() -> None:
    neutral = {"repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True}
    assert read({**neutral, "verbosity": "medium", "return_token_ids": False}) == read({})


def test_a_part_of_another_kind_is_named() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": ""}}
    with pytest.raises(Refused, match=r"messages\[0\].content\[1\].type cannot be 'input_audio'"):
        read({"messages": [{**ASK, "content": [{"type": "text", "text": "x"}, sound]}]}, LENIENT)
    with pytest.raises(Refused, match="a string or a list of parts"):
        read({"messages": [{**ASK, "content": 5}]})


def test_ignored_fields_of_both_translations_are_named() -> None:
    body = {
        "input": [{**ASK, "cache_control": {}}, {"role": "system", "content": "x"}],
        "top_logprobs": 3,
    }
    found = read_response(body, temperature=1.0, config=LENIENT)
    assert set(found.overridden) == {"cache_control", "top_logprobs", "system_message"}


def test_the_bytes_of_tokens_are_their_own() -> None:
    chat = Chat(load_tokenizer(SHIPPED_POLICY), ())
    text = "a 🧑‍🚀 naïve 日本"
    tokens = tuple(wire.AnswerToken(chat.bytes_of(each), -0.5) for each in chat.encode(text))
    content = wire.chat_logprobs(tokens)["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == text
    assert any(each["token"] == "\ufffd" and len(each["bytes"]) == 1 for each in content)
    offsets = wire.text_logprobs(tokens)["text_offset"]
    assert offsets[0] == 0 and max(offsets) <= len(text)
    for at, token in zip(offsets, tokens, strict=True):
        assert not token.data.isascii() or text.startswith(token.data.decode(), at)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"messages": [ASK, {"role": "assistant", "content": "x"}, {**ASK, "role": "system"}]},
        {"messages": [{**ASK, "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_a_refusal_gives_the_option_as_the_command_line_has_it(body: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"--endpoint\.lenient true"):
        read(body)
    assert read(body, LENIENT).overridden


def test_the_chat_of_a_call_with_tools_is_looked_up_once() -> None:
    """Each part of a stream needs it, on the event loop. Tools may have 2 MB."""
    wanted: list[Any] = []

    class Base:
        def with_tools(self, *given: Any) -> object:
            wanted.append(given)
            return self

    call = read({"tools": [TOOL]}).call
    base: Any = Base()
    assert call.chat(base) is call.chat(base) is base and len(wanted) == 1
    assert read({"tools": [TOOL]}).call == call


def test_a_call_while_the_run_ends_is_refused() -> None:
    """The task group of calls then takes no more tasks, which was status 500."""
    rollout: Any = SimpleNamespace(generator=SimpleNamespace(chat=None))
    transcript: Any = SimpleNamespace(branches=[])
    session = AgentSession(rollout, transcript, asyncio.TaskGroup())
    with pytest.raises(Refused, match="the run is ending") as refused:
        session.start(read({}), lambda index, text: None)
    assert refused.value.status == 503
