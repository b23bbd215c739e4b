"""Test what every customer-service desk promises.

The scripted expert succeeds at every level; each degenerate policy succeeds in less than 15% of
tasks. Tasks are functions of their seed. Wrong calls get an error message and change nothing. Tool
latency is real, log-normal and seeded. Conversations fit into the context.
"""

import asyncio
import itertools
import json
import math
import time
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import desks_degenerate
from unstale.config import SHIPPED_POLICY
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.chat import Chat
from unstale.envs.desk import DeskEnv, DeskTasks, shipped_desks
from unstale.envs.desk.domain import LEVELS
from unstale.envs.desk.expert import correct_call, expert_replies
from unstale.records import Task
from unstale.testing import check_env

DESKS = {level: shipped_desks(level=str(level)) for level in LEVELS}
NAMES = tuple(DESKS[1])
CONTEXT = 1024
"""Largest number of tokens of a conversation at level 1."""

every_desk = pytest.mark.parametrize("name", NAMES)
every_level = pytest.mark.parametrize("level", LEVELS)


def episode(tasks: DeskTasks, task: Task, replies: list[Message]) -> list[Turn]:
    async def run() -> list[Turn]:
        env = tasks.env(task, 0)
        turns = [await env.begin()]
        for reply in replies:
            turns.append(await env.step(reply))
            if turns[-1].done:
                break
        return turns

    return asyncio.run(run())


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


@every_desk
@every_level
def test_the_expert_always_succeeds_and_never_errs(name: str, level: int) -> None:
    tasks = DESKS[level][name]
    for task in tasks.held_out(100):
        last = episode(tasks, task, expert_replies(tasks.scenario(task)))[-1]
        assert last.done
        assert dict(last.rewards) == {"success": 1.0}
        assert last.facts["tool_errors"] == 0.0


@every_desk
def test_degenerate_policies_stay_below_fifteen_percent(name: str) -> None:
    tables = [asyncio.run(desks_degenerate.measure(DESKS[level][name], 30)) for level in LEVELS]
    for policy in tables[0].keys() - {"scripted expert"}:
        assert sum(table[policy] for table in tables) / len(tables) < 0.15, policy


@every_desk
def test_kinds_come_in_the_shares_that_are_promised(name: str) -> None:
    tasks = DESKS[1][name]
    scenarios = [tasks.scenario(task) for task in tasks.held_out(1000)]
    kinds = [scenario.requests[0].kind for scenario in scenarios]
    assert sum(tasks.domain.kinds.values()) == pytest.approx(1.0)
    for kind, share in tasks.domain.kinds.items():
        assert kinds.count(kind) / 1000 == pytest.approx(share, abs=0.04), kind
    calls = [correct_call(scenario, scenario.requests[0])[0] for scenario in scenarios]
    assert set(calls) == {tool.name for tool in desks_degenerate.writers(tasks.domain)}
    for ending in ("refuse", "hand_over"):
        assert 0.05 < calls.count(ending) / 1000 <= 0.15


@every_desk
def test_every_rule_that_is_ignored_costs_success_in_some_tasks(name: str) -> None:
    tasks = DESKS[1][name]
    scenarios = [(task, tasks.scenario(task)) for task in tasks.held_out(150)]
    for rule in ("account", *tasks.domain.faults):
        wrong = [
            task
            for task, scenario in scenarios
            if (replies := expert_replies(scenario, {rule: 1.0})) != expert_replies(scenario)
            and not episode(tasks, task, replies)[-1].rewards.get("success")
        ]
        assert wrong, rule
    with pytest.raises(ValueError, match="has no rule weather; rules are account, "):
        expert_replies(scenarios[0][1], {"weather": 1.0})


@every_desk
def test_every_reason_for_a_refusal_is_right_in_some_tasks(name: str) -> None:
    tasks = DESKS[2][name]
    scenarios = map(tasks.scenario, tasks.held_out(600))
    calls = [correct_call(scenario, scenario.requests[0]) for scenario in scenarios]
    found = {arguments["reason"] for tool, arguments in calls if tool == "refuse"}
    assert found == set(tasks.domain.tools.choices["reason"])


@every_desk
def test_tasks_are_functions_of_their_seed(name: str) -> None:
    tasks = DESKS[3][name]
    task = tasks.held_out(5)[4]
    assert tasks.scenario(task) == tasks.scenario(task)
    first, second, held_out = (
        {task.key for task in part}
        for part in (
            itertools.islice(tasks.train(0), 50),
            itertools.islice(tasks.train(1), 50),
            tasks.held_out(50),
        )
    )
    assert not first & second and not (first | second) & held_out
    assert {task.env for task in tasks.held_out(3)} == {name}
    check_env(tasks, episodes=4)


@every_desk
def test_wrong_calls_get_an_error_text_and_change_nothing(name: str) -> None:
    tasks = DESKS[3][name]
    scenario = tasks.scenario(tasks.held_out(1)[0])
    for tool in tasks.domain.tools.tools.values():
        right: dict[str, Any] = {
            key: "?" if key in ("email", *tasks.domain.tools.choices) else 1
            for key in tool.arguments
        }
        for arguments in (right, {}, {**right, "more": 1}, {key: [1] for key in right}):
            env = DeskEnv(scenario, iter(()))
            turn = asyncio.run(env.step(call(tool.name, **arguments)))
            assert turn.messages[0].role == "tool"
            assert turn.messages[0].content.startswith("Error: "), (tool.name, arguments)
            assert turn.facts["tool_errors"] == 1.0 and not turn.done
            assert not env.desk.changes(scenario.desk) and not env.desk.writes


@every_desk
def test_a_call_that_repeats_itself_is_an_error_or_no_success(name: str) -> None:
    """The right call, made twice, must not be a better answer than once."""
    tasks = DESKS[1][name]
    for task in tasks.held_out(30):
        scenario = tasks.scenario(task)
        tool, arguments = correct_call(scenario, scenario.requests[0])
        env = DeskEnv(scenario, iter(()))
        first = asyncio.run(env.step(call(tool, **arguments)))
        assert not first.messages[0].content.startswith("Error"), tool
        assert env.desk.changes(scenario.desk), tool


@every_desk
def test_conversations_fit_into_the_context(name: str) -> None:
    """Short conversations suit the small policy, whose tokenizer knows few words."""
    for level, limit in ((1, CONTEXT), (2, 2 * CONTEXT), (3, 2 * CONTEXT)):
        tasks = DESKS[level][name]
        chat = Chat(AutoTokenizer.from_pretrained(SHIPPED_POLICY), tasks.tools)
        for task in tasks.held_out(25):
            replies = expert_replies(tasks.scenario(task))
            turns = episode(tasks, task, replies)
            length = len(chat.encode_prompt(turns[0].messages))
            for reply, turn in zip(replies, turns[1:], strict=False):
                length += len(chat.encode_continuation([reply, *turn.messages], ended=True))
            assert length < limit, (level, task.key)


@every_desk
def test_the_tools_are_schemas_with_json_arguments(name: str) -> None:
    assert 6 <= len(DESKS[1][name].tools) + 1 == len(DESKS[3][name].tools) <= 10
    for tool in DESKS[3][name].tools:
        function = tool["function"]
        wanted = DESKS[3][name].domain.tools.tools[function["name"]].arguments
        assert tuple(function["parameters"]["required"]) == wanted
        assert function["description"]
        assert all(each["description"] for each in function["parameters"]["properties"].values())
        json.dumps(tool)


@every_desk
def test_the_written_policy_grows_with_the_level(name: str) -> None:
    domain = DESKS[1][name].domain
    assert len(domain.prompt(1)) < 40
    for reason in domain.tools.choices["reason"]:
        assert f'"{reason}"' in domain.prompt(2)
    assert "find_user" in domain.prompt(3)
    assert "find_user" not in domain.prompt(2)


def test_latency_is_log_normal_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def record(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    tasks = shipped_desks(latency_s=0.02, latency_sigma=1.0)["retail"]

    async def wait(seed: int, times: int) -> list[float]:
        waited.clear()
        env = tasks.env(tasks.held_out(1)[0], seed)
        await env.begin()
        for _ in range(times):
            await env.step(call("get_order", order_id=1))
        return list(waited)

    many = asyncio.run(wait(1, 2000))
    assert asyncio.run(wait(1, 3)) == many[:3]
    assert asyncio.run(wait(2, 3)) != many[:3]
    assert sum(many) / len(many) == pytest.approx(0.02, rel=0.15)
    logs = sorted(math.log(seconds) for seconds in many)
    assert logs[1000] == pytest.approx(
        math.log(0.02) - 0.5, abs=0.1
    )  # the median lies sigma^2 / 2 below the mean


def test_latency_is_really_waited() -> None:
    async def timed() -> float:
        tasks = shipped_desks(latency_s=0.02, latency_sigma=0.0)["retail"]
        env = tasks.env(tasks.held_out(1)[0], 0)
        await env.begin()
        start = time.perf_counter()
        await env.step(call("get_order", order_id=1))
        return time.perf_counter() - start

    assert asyncio.run(timed()) >= 0.019


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": 9}, r"level must be one of \(1, 2, 3\), got 9"),
        ({"latency_s": -1.0}, "latency_s"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DeskTasks(DESKS[1]["retail"].domain, **options)
