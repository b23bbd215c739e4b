"""Test the OpenEnv adapter with the library and real servers (`make test-adapters`).

Text, fields and MCP tools become actions. Parallel episodes have separate sessions, which are
closed at their end. A refused action counts against the policy, a broken server against the
environment. The command of the docs runs.
"""

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.adapters.docs import block, run_command
from unstale.config import ConfigError, TaskConfig
from unstale.envs import EnvError, Message, ToolCall, Turn
from unstale.envs.registry import build_taskset
from unstale.research.adapters.openenv import OpenEnvTasks
from unstale.testing import check_env

pytest.importorskip("openenv.core", reason="needs openenv: make test-adapters")
pytestmark = pytest.mark.filterwarnings("ignore")
SERVER = Path(__file__).with_name("openenv_server.py")


@contextmanager
def serving(*command: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server in a process. `PORT` in its command is replaced by a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, *(port if word == "PORT" else word for word in command)]
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with (
        serving(str(SERVER), "guess", "PORT", "3") as (guess, _),
        serving(str(SERVER), "line", "PORT", "3") as (line, _),
        serving(str(SERVER), "tools", "PORT", "3") as (tools, _),
    ):
        yield {"guess": guess, "line": line, "tools": tools}


def text(said: str) -> Message:
    return Message("assistant", said)


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


async def episode(tasks: Any, index: int, *replies: Message) -> list[Turn]:
    env = tasks.env(next(islice(tasks.train(0), index, None)), 0)
    try:
        return [await env.begin(), *[await env.step(reply) for reply in replies]]
    finally:
        await env.close()


def play(tasks: Any, *replies: Message) -> list[Turn]:
    return asyncio.run(episode(tasks, 0, *replies))


@pytest.mark.parametrize("kind", ["guess", "line", "tools"])
def test_it_keeps_the_contract(urls: dict[str, str], kind: str) -> None:
    check_env(build_taskset(TaskConfig(env=f"openenv:{urls[kind]}")), episodes=4, max_turns=6)


def test_a_schema_of_one_text_takes_the_whole_reply(urls: dict[str, str]) -> None:
    tasks = OpenEnvTasks(urls["guess"], instructions="Only the number.")
    number = Random(tasks.seed_of(next(tasks.train(0)))).randint(1, 9)
    wrong = str(number % 9 + 1)
    begin, no, end = play(tasks, text(wrong), text(f"<think>hm</think>\n{number}"))
    assert [(one.role, one.content) for one in begin.messages] == [
        ("system", "Only the number."),
        ("user", "Guess a number from 1 to 9."),
    ]
    assert no.messages == (Message("user", "No."),) and not no.done
    assert end.done and end.rewards == {"return": 0.75} and not tasks.tools


def test_a_schema_of_several_fields_is_a_tool(urls: dict[str, str]) -> None:
    tasks = OpenEnvTasks(urls["line"])
    (tool,) = tasks.tools
    assert (
        tool["function"]["name"] == "act"
        and tool["function"]["description"] == "A step on the line."
    )
    assert set(tool["function"]["parameters"]["properties"]) == {"by", "loud"}
    begin, silent, wrong, unknown, on, end = play(
        tasks,
        text("2"),
        call("act", by="x"),
        call("go", by=1),
        call("act", by=2, loud=True),
        call("act", by=1),
    )
    assert begin.messages == (Message("user", '{"text": "Get to 3.", "place": 0}'),)
    assert silent.messages == (Message("user", "Act with a tool call."),)
    assert "VALIDATION_ERROR" in wrong.messages[0].content
    assert unknown.messages == (Message("tool", "Error: there is no tool go, only act"),)
    assert on.messages == (Message("tool", '{"place": 2}'),) and end.rewards == {"return": 1.0}


def test_mcp_tools_are_tools(urls: dict[str, str]) -> None:
    tasks = OpenEnvTasks(urls["tools"])
    (tool,) = tasks.tools
    assert tool["function"]["name"] == "add" and set(
        tool["function"]["parameters"]["properties"]
    ) == {"a", "b"}
    _, five, wrong = play(tasks, call("add", a=2, b=3), call("add", a=2))
    assert five.messages == (Message("tool", "5"),) and wrong.messages[0].content.startswith(
        "Error: "
    )


def test_episodes_at_the_same_time_have_sessions_of_their_own_and_let_go_of_them(
    urls: dict[str, str],
) -> None:
    """The server allows three sessions. Closing an unfinished episode frees its session."""
    tasks = OpenEnvTasks(urls["guess"])

    async def together() -> list[list[Turn]]:
        found = []
        for _ in range(3):
            found += await asyncio.gather(
                *[episode(tasks, index, text("0"), text("0")) for index in range(3)]
            )
        return found

    assert all(not turns[-1].done for turns in asyncio.run(together()))

    async def too_many() -> None:
        envs: list[Any] = [tasks.env(task, 0) for task in islice(tasks.train(0), 4)]
        try:
            for env in envs:
                await env.begin()
        finally:
            for env in envs:
                await env.close()

    with pytest.raises(EnvError, match="CAPACITY_REACHED"):
        asyncio.run(too_many())


def test_what_breaks_is_the_environments_fault(urls: dict[str, str]) -> None:
    with pytest.raises(EnvError, match="it is broken"):
        play(OpenEnvTasks(urls["guess"]), text("break"))


def test_a_server_that_died_is_no_other_episode() -> None:
    async def main(restart: Callable[[], None]) -> None:
        env = tasks.env(next(tasks.train(0)), 0)
        await env.begin()
        restart()
        with pytest.raises(EnvError, match=f"{tasks.url}: "):
            await env.step(text("1"))
        await env.close()

    def restart() -> None:
        process.kill()
        process.wait()

    with serving(str(SERVER), "guess", "PORT", "3") as (url, process):
        tasks = OpenEnvTasks(url)
        asyncio.run(main(restart))
        with pytest.raises(ConfigError, match="no OpenEnv server answers at"):
            OpenEnvTasks(url)


def test_a_connection_that_is_lost_is_not_made_again(urls: dict[str, str]) -> None:
    async def main() -> None:
        tasks = OpenEnvTasks(urls["guess"])
        env = tasks.env(next(tasks.train(0)), 0)
        await env.begin()
        await env._session._ws.close()
        with pytest.raises(EnvError, match="the connection was lost"):
            await env.step(text("1"))
        await env.close()

    asyncio.run(main())


def test_an_answer_that_does_not_come_is_not_waited_for(urls: dict[str, str]) -> None:
    with pytest.raises(EnvError, match="TimeoutError"):
        play(OpenEnvTasks(urls["guess"], timeout_s=1e-6))


def test_the_command_of_the_docs_plays_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guess.py").write_text(block("guess.py"))
    with serving(str(tmp_path / "guess.py"), "PORT") as (url, _):
        assert "2 tasks, 1 attempts each" in run_command(
            "openenv:", capsys, **{"http://127.0.0.1:8000": url}
        )
