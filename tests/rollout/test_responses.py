"""Test the Responses API of the endpoint, and options that the endpoint overrides.

An item that is sent back is the recorded answer. A stream has the items of the whole answer.
Without `endpoint.lenient` another sampling is refused, with it the option is counted.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from itertools import count, groupby
from pathlib import Path
from random import Random
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.envs.test_chat import QWEN
from tests.rollout.test_endpoint import ASK, THINKING, chat_of, rest_of, visit
from tests.rollout.test_external import CALL, CHAT, SUMS, TASK, World, says, whole
from tests.support.waits import LIMIT_S
from unstale.config import EndpointConfig
from unstale.config.run import SHIPPED_POLICY
from unstale.durability.journal import Journal
from unstale.engines import SamplingParams
from unstale.envs.calculator import TOOL, calculate
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.model.loading import load_tokenizer
from unstale.model.pictures import PictureReader
from unstale.pictures import PictureStore
from unstale.records import ContextPiece, GroupRequest
from unstale.rewards import schemas, workers
from unstale.rollout.endpoint import off_loop, wire
from unstale.rollout.endpoint.conversation import with_call_ids
from unstale.rollout.endpoint.responses import ResponseFormat, read_response
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.metrics import describe
from unstale.testing.pictures import draw_digit, save_vision_model

FUNCTION = {"type": "function", **TOOL["function"]}
LENIENT = EndpointConfig(lenient=True)


async def with_responses(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Solve a sum with the Responses API and a tool."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": f"What is {task}?"}]
        for _ in range(4):
            response = await client.responses.create(
                model="policy", instructions="Use the tool.", input=items, tools=[FUNCTION]
            )
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text == "It is 30.")
            for call in calls:
                result = str(calculate(json.loads(call.arguments)["expression"]))
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                )
    return 0.0


def test_an_agent_of_the_responses_api_is_recorded_as_one_of_chats() -> None:
    world = World()
    trajectory = whole(world.play(with_responses))
    (first, call, _), (_, answer, _) = world.sampled
    assert (trajectory.reward, trajectory.num_turns, trajectory.branches) == (1, 2, ())
    assert trajectory.tokens == (*first, *call, *trajectory.pieces[2].tokens, *answer)
    assert not world.events, "items that are sent back are the recorded answer"


async def with_pictures(base_url: str, task: str, seed: int, api_key: str) -> float:
    """Show a picture in a question and another one in the result of a tool."""
    shown = []
    for digit in (1, 7):
        data = b64encode(draw_digit(digit, Random(digit))).decode()
        url = f"data:image/png;base64,{data}"
        shown.append({"type": "input_image", "detail": "auto", "image_url": url})
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        items: list[Any] = [user({"type": "input_text", "text": "Which "}, shown[0])]
        for _ in range(2):
            response = await client.responses.create(model="p", input=items, tools=[FUNCTION])
            items += response.output
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": [shown[1]]}
                for call in response.output
                if call.type == "function_call"
            ]
    return float(response.output_text == "It is 30.")


def test_pictures_of_the_responses_api_are_in_the_record(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(SHIPPED_POLICY)
    save_vision_model("qwen3_vl", tmp_path, tokenizer)
    reader = PictureReader(tmp_path, tokenizer, PictureStore())
    replies = iter((CALL, "It is 30."))
    chat = Chat(tokenizer, (), pictures=reader)
    world = World(lambda tokens, params: says(next(replies)), chat=chat)
    trajectory = whole(world.play(with_pictures))
    assert (trajectory.reward, trajectory.num_turns, trajectory.branches) == (1, 2, ())
    contexts = [piece for piece in trajectory.pieces if isinstance(piece, ContextPiece)]
    digits = [sha256(draw_digit(digit, Random(digit))).hexdigest() for digit in (1, 7)]
    assert [[each.digest for each in piece.pictures] for piece in contexts] == [
        [each] for each in digits
    ]


def test_a_stream_has_the_items_of_the_whole_answer() -> None:
    def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        return rest_of(
            f"So. It is a sum. {CALL}" if "calculate" in CHAT.text(tokens) else "One.", tokens
        )

    async def act(client: httpx.AsyncClient, world: World) -> None:
        sdk = openai.AsyncOpenAI(
            base_url=str(client.base_url), api_key=world.endpoint.token, max_retries=0
        )
        for fields in ({"input": "calculate", "tools": [FUNCTION]}, {"input": "one"}):
            plain = await sdk.responses.create(model="m", **fields)
            events = [
                event
                async for event in await sdk.responses.create(model="m", stream=True, **fields)
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            done = events[-1].response
            closed = [e.item for e in events if e.type == "response.output_item.done"]
            assert closed == done.output
            assert done.usage == plain.usage and done.status == plain.status == "completed"
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == done.output_text == plain.output_text
            parts = [
                [item.model_dump(exclude={"id", "call_id"}) for item in each.output]
                for each in (plain, done)
            ]
            assert parts[0] == parts[1]
            async with sdk.responses.stream(model="m", **fields) as stream:
                assert (await stream.get_final_response()).output_text == plain.output_text
        cut = await sdk.responses.create(model="m", input="one", max_output_tokens=1)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        told = await sdk.responses.create(
            model="m", input="one", include=["message.output_text.logprobs"]
        )
        assert told.output[0].content[0].logprobs[0].logprob == -0.5
        await sdk.close()

    visit(World(say, max_turns=99), act)


@pytest.mark.parametrize("text", ["Hm.\n</think>\n\nYes.", f"Hm.\n</think>\n\n{CALL}", "Yes."])
def test_thoughts_text_and_calls_of_a_reply_are_read_back_as_one_message(text: str) -> None:
    chat = chat_of(THINKING if "</think>" in text else QWEN)
    reply = with_call_ids(wire.HistoryMessage(*reversed(chat.reader.parse_text(text))), "0/1")
    answer = wire.Choice(reply, "stop", (), 1)
    request = read_response({"input": "one", "tools": [FUNCTION]}, temperature=1.0)
    whole_answer = ResponseFormat("policy", chat).whole([answer], request)
    items = [{"role": "user", "content": "one"}, *whole_answer["output"]]
    again = read_response({"input": items}, temperature=1.0).call.history
    assert [each.key for each in again[1:]] == [answer.message.key]
    assert (again[1].thoughts or None) == answer.message.thoughts
    form = ResponseFormat("policy", chat)
    events = [
        *form.begin(request),
        *(event for end in range(len(text)) for event in form.grow(0, text[:end], request)),
        *form.end([answer], request),
    ]
    kinds = [item["type"] for item in whole_answer["output"]]
    assert [e["item"]["type"] for e in events if e["type"].endswith("item.added")] == kinds
    streamed = [key for key, _ in groupby(e["output_index"] for e in events if "output_index" in e)]
    assert streamed == list(range(len(kinds)))


ASKED = {"role": "user", "content": "one"}
LEADING = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "Hm."}]}
CALLED = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}


def answered(call: str) -> dict[str, str]:
    return {"type": "function_call_output", "output": "x", "call_id": call}


REMOTE = {"type": "input_image", "image_url": "https://example.org/a.png"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
TEXT = {"type": "input_text", "text": "x"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole input"),
    ({"background": True}, "background", "the client that waits for it"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "endpoint.lenient"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "endpoint.lenient"),
    ({"temperature": 0}, "temperature", "endpoint.lenient"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions can be called"),
    ({"input": []}, "input", "at least one item"),
    ({"input": [{"type": "reasoning"}]}, "input", "input has no message"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "is not an item of type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "no such role"),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "a"}]},
        "input[0]",
        "input[0].arguments is not a JSON object",
    ),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
        "is missing",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "x", "call_id": "a"}]},
        "input[0]",
        "input[0] is the result of a tool call, but no call comes before it",
    ),
    (
        {"input": [ASKED, CALLED, answered("b")]},
        "input[2].call_id",
        "input[2].call_id is 'b', but no tool call of input[1] has this id: they have a",
    ),
    (
        {"input": [ASKED, CALLED, answered("messages[9]")]},
        "input[2].call_id",
        "input[2].call_id is 'messages[9]', but no tool call of input[1] has this id",
    ),
    (
        {"input": [ASKED, CALLED, CALLED, answered("a")]},
        "input[1]",
        "input[1] has two calls with the same id: a, a",
    ),
    (
        {"input": [*LEADING, ASKED, THOUGHT, CALLED, {**CALLED, "call_id": "b", "arguments": "["}]},
        "input[5]",
        "input[5].arguments is not a JSON object",
    ),
    (
        {"instructions": "Sum.", "input": [*LEADING, ASKED, CALLED, ASKED]},
        "input[3]",
        "input[3] has tool calls without a result: a. A function_call_output with the call_id of",
    ),
    (
        {"input": [ASKED, CALLED, answered("a"), answered("a")]},
        "input[3].call_id",
        "input[3].call_id is 'a', but input[2] has the same id: each tool call has one result",
    ),
    (
        {"input": [ASKED, {"role": "system", "content": "x"}]},
        "input[1]",
        "there is at most one system message, and it comes first",
    ),
    ({"input": [ASKED, {"role": "assistant", "content": "x"}]}, "input", "nothing to answer"),
    ({"input": "long " * 5000}, "input", "no reply fits"),
    (
        {"instructions": "Sum.", "input": [ASKED, CALLED, {**answered("a"), "output": [REMOTE]}]},
        "input[2].output[0].image_url",
        "input[2].output[0].image_url must be a data URL",
    ),
    (
        {"input": [*LEADING, user(TEXT, REMOTE)]},
        "input[2].content[1].image_url",
        "got 'https://example.org/a.png': the endpoint fetches no pictures",
    ),
    ({"input": [user(PICTURE)]}, "input", "the policy reads only text"),
    (
        {"input": [{**user(PICTURE), "role": "system"}, ASKED]},
        "input[0].content[0].type",
        "only text is supported",
    ),
    (
        {"input": [user({"type": "input_image", "file_id": "file-1"})]},
        "input[0].content[0].file_id",
        "the endpoint keeps no files",
    ),
    ({"input": [user({"type": "input_image"})]}, "input[0].content[0].image_url", "is missing"),
    ({"input": [user({"type": "input_text"})]}, "input[0].content[0].text", "is missing"),
    ({"input": [user({"type": "input_file"})]}, "input[0].content[0].type", "only text and"),
    ({"n": 2}, "n", "unknown field"),
]


def test_what_cannot_be_done_is_refused_in_words() -> None:
    async def act(client: httpx.AsyncClient, world: World) -> None:
        for change, param, words in REFUSED:
            answer = await client.post("responses", json={"input": "one", **change})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (change, error)
            assert words in error["message"], (change, error["message"])
        neutral = {"temperature": None, "store": True, "reasoning": {"effort": None}, "top_p": 1}
        assert (await client.post("responses", json={"input": "x", **neutral})).status_code == 200

    visit(World(lambda tokens, params: says("so")), act)


OVERRIDDEN: dict[str, Any] = {
    "seed": 3,
    "temperature": 0.0,
    "top_p": 0.9,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_another_sampling_is_refused_or_with_lenient_counted(name: str, tmp_path: Path) -> None:
    codes = []

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        key = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=key, timeout=LIMIT_S) as client:
            for change in ({name: OVERRIDDEN[name]}, {}):
                body = {**ASK, "tools": [TOOL], **change}
                answer = await client.post(f"{base_url}/chat/completions", json=body)
                codes.append(answer.status_code)
        return 1.0

    strict = whole(World().play(agent))
    assert codes == [400, 200] and f"overridden_{name}" not in strict.facts
    world = World()
    world.endpoint = RecordingEndpoint(LENIENT)

    async def main() -> Any:
        with Journal(tmp_path / "journal.sqlite") as journal:
            async with world.open():
                rollout = world.rollout(ExternalAgent(agent, SUMS, name="sums"))
                journal.add_request(GroupRequest(0, TASK, 0, 0))
                await journal.publishing(0)
                group = await rollout.group(
                    GroupRequest(0, TASK, 0, 0), size=2, open_writer=journal.begin
                )
                await journal.finish(group)
                return group

    group = asyncio.run(main())
    assert codes[2:] == [200] * 4
    assert describe([group])[f"env/overridden_{name}_mean"] == 1
    with Journal.read(tmp_path) as reader:
        assert [each.facts[f"overridden_{name}"] for each in reader.group(0).trajectories] == [1, 1]
    assert 3 not in {seed for _, _, seed in world.sampled}, "the run's own noise is used"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nothing"}, "not a JSON schema"),
        ({"$ref": "https://example.com/x"}, "it does not define"),
        ("x", "must be an object"),
    ],
)
def test_a_format_that_cannot_be_checked_is_refused(schema: Any, words: str) -> None:
    async def act(client: httpx.AsyncClient, world: World) -> None:
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await client.post(
            "chat/completions", json={**ASK, "response_format": response_format}
        )
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert (await client.post("chat/completions", json=ASK)).status_code == 200

    world = World(lambda tokens, params: says("so"))
    world.endpoint = RecordingEndpoint(LENIENT)
    visit(world, act)


def wide(levels: int) -> dict[str, Any]:
    """Return a schema of about 1 kB whose check takes 4^levels evaluations."""
    steps = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(levels)}
    return {"$defs": {**steps, f"d{levels}": {}}, "$ref": "#/$defs/d0"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def test_schemas_and_bodies_that_take_long_are_refused_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile others are answered. A right schema is accepted afterwards."""
    monkeypatch.setattr(workers, "CPU_S", 0.5)
    pool = workers.WorkerPool("schema_worker.py")
    monkeypatch.setattr(schemas, "_POOL", pool)

    def asked(schema: Any) -> Any:
        schema = {"name": "x", "schema": schema}
        return {**ASK, "response_format": {"type": "json_schema", "json_schema": schema}}

    async def act(client: httpx.AsyncClient, world: World) -> None:
        bomb = asyncio.create_task(client.post("chat/completions", json=asked(wide(12))))
        await asyncio.sleep(0.1)
        assert (await client.get("models")).status_code == 200 and not bomb.done()
        answers = [await bomb]
        answers += [
            await client.post("chat/completions", json=body)
            for body in (asked({**wide(10), "type": "null"}), asked(nested(400)))
        ]
        deep = {"type": "function", "function": {"name": "f", "parameters": nested(500)}}
        answers.append(await client.post("chat/completions", json={**ASK, "tools": [deep]}))
        answers.append(await client.post("responses", json={"input": [{"x": nested(500)}]}))
        for answer, words in zip(
            answers, ["takes over", "takes over", *["nested more than"] * 3], strict=True
        ):
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        right = await client.post("chat/completions", json=asked({"type": "integer"}))
        assert right.json()["choices"][0]["message"]["content"] == "7"

    world = World(lambda tokens, params: says("7"))
    world.endpoint = RecordingEndpoint(LENIENT)
    visit(world, act)
    pool.close()


def test_a_template_that_takes_long_ends_the_episode_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, "LIMIT_S", 0.2)

    async def act(client: httpx.AsyncClient, world: World) -> None:
        assert (await client.post("chat/completions", json=ASK)).status_code == 200
        monkeypatch.setattr(Chat, "encode_prompt", lambda *_: next(n for n in count() if n < 0))
        body = {"messages": [{"role": "user", "content": "other"}]}
        slow = await client.post("chat/completions", json=body)
        assert slow.status_code == 503 and "chat template gave no result" in slow.text
        assert (await client.post("chat/completions", json=ASK)).status_code == 410

    visit(World(lambda tokens, params: says("7")), act)
