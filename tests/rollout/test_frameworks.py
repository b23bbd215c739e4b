"""Test agents of four libraries, unmodified, against the endpoint with `endpoint.lenient`.

Their default settings, typed outputs and retries work. Overridden options are counted, and every
sampled token is recorded.
"""

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.rollout import test_external
from tests.rollout.test_external import CALL, CHAT, OPENAI_AGENTS, World, says, whole
from tests.support.waits import LIMIT_S
from unstale.config import EndpointConfig
from unstale.engines import SamplingParams
from unstale.envs.calculator import calculate
from unstale.records import Trajectory
from unstale.rollout.endpoint.server import RecordingEndpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
pydantic = pytest.importorskip("pydantic")

BEGIN = "<|im_start|>assistant\n"
ADA = '{"name": "Ada", "age": 36}'


@pytest.fixture(autouse=True)
def collect_open_clients() -> Iterator[None]:
    """Collect the HTTP clients that a library leaves open now, not during another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: str
    age: int


def lenient(*replies: str, **config: Any) -> World:
    """Return a world whose n-th sampled reply is `replies[n]`, in parts if it is streamed."""
    left = list(replies)

    def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        begun = CHAT.text(tokens, whole=True).rpartition(BEGIN)[2]
        if not begun:
            world.reply = says(left.pop(0))
        return world.reply[len(CHAT.encode(begun)) :]

    world = World(say, **config)
    world.room["max_context"] = 4096
    world.endpoint = RecordingEndpoint(EndpointConfig(lenient=True))
    return world


def play(world: World, agent: Callable[..., Any]) -> Trajectory:
    trajectory = whole(world.play(agent))
    assert trajectory.reward == 1 and trajectory.num_turns
    return trajectory


@pytest.mark.costly
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_gets_structured_output_at_its_temperature(api: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        model = langchain_openai.ChatOpenAI(
            model="policy",
            base_url=base_url,
            api_key=api_key,
            temperature=0,
            max_retries=0,
            use_responses_api=api == "responses",
        )
        person = await model.with_structured_output(Person).ainvoke("Ada is 36. Who is that?")
        return float(person == Person(name="Ada", age=36))

    world = lenient("I think it is Ada.", '{"name": "Ada"}', ADA)
    trajectory = play(world, agent)
    assert trajectory.facts["overridden_temperature"] == 1
    assert trajectory.facts["format_retries"] == 2
    assert len(trajectory.branches) == 2
    assert "JSON Schema" in CHAT.text(trajectory.pieces[0].tokens)


def test_langchain_gets_structured_output_from_a_tool_call() -> None:
    langchain_openai = pytest.importorskip("langchain_openai")

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        model = langchain_openai.ChatOpenAI(
            model="policy", base_url=base_url, api_key=api_key, seed=seed, max_retries=0
        )
        structured = model.with_structured_output(Person, method="function_calling")
        person = await structured.ainvoke("Ada is 36. Who is that?")
        return float(person == Person(name="Ada", age=36))

    call = f'<tool_call>\n{{"name": "Person", "arguments": {ADA}}}\n</tool_call>'
    facts = play(lenient(call), agent).facts
    assert (facts["overridden_tool_choice"], facts["overridden_seed"]) == (1, 1)


@pytest.mark.costly
def test_pydantic_ai_gets_its_typed_output() -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        # A busy machine may need longer than the library's 5 s to connect, while it still imports.
        async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
            provider = OpenAIProvider(base_url, api_key=api_key, http_client=client)
            model = OpenAIChatModel("policy", provider=provider)
            solver = pydantic_ai.Agent(model, output_type=Person)
            result = await solver.run("Ada is 36. Who is that?")
            return float(result.output == Person(name="Ada", age=36))

    call = f'<tool_call>\n{{"name": "final_result", "arguments": {ADA}}}\n</tool_call>'
    trajectory = play(lenient("It is Ada.", call), agent)
    assert trajectory.facts["overridden_tool_choice"] == 2
    assert trajectory.facts["overridden_system_message"] == 1, "which asks for a call"
    assert trajectory.num_turns == 2 and not trajectory.branches, "the library asks again itself"


@pytest.mark.costly
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents_run_by_default_through_the_responses_api(streamed: bool) -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool(name_override="calculate")  # type: ignore[untyped-decorator]
    def compute(expression: str) -> str:
        """Work out an expression of whole numbers."""
        return str(calculate(expression))

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            solver = agents.Agent(name="solver", instructions="Use the tool.", tools=[compute])
            if not streamed:
                result = await agents.Runner.run(solver, "What is 10 + 20?")
                return float(result.final_output == "It is 30.")
            running = agents.Runner.run_streamed(solver, "What is 10 + 20?")
            deltas = [
                event.data.delta
                async for event in running.stream_events()
                if getattr(event, "data", None) is not None
                and event.data.type == "response.output_text.delta"
            ]
            return float(running.final_output == "It is 30." == "".join(deltas))

    trajectory = play(lenient(CALL, "It is 30."), agent)
    assert trajectory.num_turns == 2 and not trajectory.branches
    assert {"overridden_reasoning", "overridden_text"} <= set(trajectory.facts)


def test_the_openai_agents_example_of_the_docs_runs() -> None:
    pytest.importorskip("agents")
    example: dict[str, Any] = {}
    exec(OPENAI_AGENTS, example)
    assert play(lenient(CALL, "It is 30."), example["agent"]).num_turns == 2


def test_openai_agents_get_their_output_type() -> None:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            solver = agents.Agent(name="solver", output_type=Person)
            result = await agents.Runner.run(solver, "Ada is 36. Who is that?")
            return float(result.final_output == Person(name="Ada", age=36))

    trajectory = play(lenient("Ada.", ADA), agent)
    assert trajectory.facts["format_retries"] == 1


def test_smolagents_runs_with_its_default_tool_choice() -> None:
    smolagents = pytest.importorskip("smolagents")

    tool = smolagents.tool

    @tool  # type: ignore[untyped-decorator]
    def compute(expression: str) -> str:
        """Work out an expression of whole numbers.

        Args:
            expression: For example (12 + 7) * 3.
        """
        return str(calculate(expression))

    def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        model = smolagents.OpenAIModel("policy", base_url, api_key)
        solver = smolagents.ToolCallingAgent(
            [compute], model, max_steps=3, verbosity_level=smolagents.LogLevel.OFF
        )
        try:
            return float(str(solver.run("What is 10 + 20?")) == "30")
        finally:
            model.client.close()

    replies = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (
            ("compute", '{"expression": "10 + 20"}'),
            ("final_answer", '{"answer": "30"}'),
        )
    ]
    assert play(lenient(*replies), agent).facts["overridden_tool_choice"] == 2


def test_a_format_that_no_reply_has_ends_the_episode_without_reward() -> None:
    openai = pytest.importorskip("openai")
    codes = []

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            try:
                await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "one"}],
                    response_format={"type": "json_object"},
                )
            except openai.BadRequestError as error:
                codes.append(error.code)
                raise
        return 1.0

    trajectory = whole(lenient("no", "[1]", "{").play(agent))
    assert (trajectory.stop, trajectory.reward) == ("invalid_format", 0.0)
    assert codes == ["invalid_format"]
    assert trajectory.facts["format_retries"] == 2 and len(trajectory.branches) == 2


def test_a_client_that_disconnects_during_a_retry_gets_the_rest_of_that_reply() -> None:
    openai = pytest.importorskip("openai")
    asked = asyncio.Event()
    hung = asyncio.Event()

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        if len(world.sampled) == 2 and not asked.is_set():
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                hung.set()

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            body: dict[str, Any] = {
                "model": "policy",
                "messages": [{"role": "user", "content": "one"}],
                "response_format": {"type": "json_object"},
            }
            calling = asyncio.create_task(client.chat.completions.create(**body))
            await asked.wait()
            calling.cancel()
            await hung.wait()
            again = await client.chat.completions.create(**body)
            return float(again.choices[0].message.content == ADA)

    def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        text = CHAT.text(tokens, whole=True).rpartition("<|im_start|>assistant\n")[2]
        reply = says("no" if not world.sampled else ADA)
        return reply[len(CHAT.encode(text)) :]

    world = World(say, slow)
    world.endpoint = RecordingEndpoint(EndpointConfig(lenient=True))
    trajectory = whole(world.play(agent))
    assert trajectory.reward == 1 and len(trajectory.branches) == 1


@pytest.mark.costly
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_killed_run_repeats_the_retries_that_it_recorded(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        test_external, "RecordingEndpoint", lambda: RecordingEndpoint(EndpointConfig(lenient=True))
    )

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask = test_external.asker(base_url, api_key)
        messages = [{"role": "user", "content": "one"}]
        await ask(messages, response_format={"type": "json_object"})
        return 1.0

    group, first, second = test_external.halves(tmp_path, agent, after=after)
    assert len(group.trajectories) == 2 and not group.failures
    assert [each.facts["format_retries"] for each in group.trajectories] == [2, 2]
    assert len(first.sampled) + len(second.sampled) == 6, "what was recorded is not sampled again"
