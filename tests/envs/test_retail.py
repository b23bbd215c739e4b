"""Test the retail service desk.

The scripted expert succeeds at every level; each blind policy succeeds in at most 15% of tasks.
Tasks are functions of their seed. Refusals, hand-overs and actions leave different databases. Wrong
calls get an error message. Tool latency is real, log-normal and seeded.
"""

import asyncio
import importlib.util
import json
import math
import time
from pathlib import Path
from types import ModuleType

import pytest

from unstale.envs import Message, ToolCall, Turn
from unstale.envs.retail import LEVELS, RetailTasks, system_text
from unstale.envs.retail.rules import Faults, correct_call, expert_replies
from unstale.envs.retail.tasks import KINDS
from unstale.envs.retail.tools import ARGUMENTS
from unstale.records import Task


def episode(tasks: RetailTasks, task: Task, replies: list[Message]) -> list[Turn]:
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


def say(text: str) -> Message:
    return Message("assistant", text)


def task_of(kind: str, level: int = 1) -> Task:
    tasks = RetailTasks(level=level)
    return next(
        task for task in tasks.held_out(400) if tasks.scenario(task).requests[0].kind == kind
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_always_succeeds_and_never_errs(level: int) -> None:
    tasks = RetailTasks(level=level)
    for task in tasks.held_out(200):
        last = episode(tasks, task, expert_replies(tasks.scenario(task)))[-1]
        assert last.done
        assert dict(last.rewards) == {"success": 1.0}
        assert last.facts["tool_errors"] == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_blind_policies_stay_below_fifteen_percent(level: int) -> None:
    bench = _benchmark()
    tasks = RetailTasks(level=level)
    for name, (act, questions) in bench.POLICIES.items():
        scores = [asyncio.run(bench.score(tasks, index, act, questions)) for index in range(120)]
        assert sum(scores) / len(scores) <= 0.15, name


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "retail_degenerate.py"
    spec = importlib.util.spec_from_file_location("retail_degenerate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pickup_point_has_plain_digits() -> None:
    """Digits that `str.isdigit` accepts and `int` refuses would break the order's record."""
    task = task_of("redirect", level=2)
    order = next(iter(RetailTasks(level=2).scenario(task).desk.orders))
    turns = episode(
        RetailTasks(level=2), task, [call("redirect_order", order_id=order, point_id="²²")]
    )
    assert turns[-1].messages[0].content == "Error: no pickup point ²²"


CALLS = {
    "cancel": {"cancel_order"},
    "cancel_instead": {"cancel_order"},
    "return": {"return_item"},
    "return_sale": {"return_item"},
    "exchange": {"exchange_item"},
    "redirect": {"redirect_order"},
    "refuse_status": {"refuse status"},
    "refuse_final": {"refuse final", "refuse stock", "refuse window"},
    "business": {"hand_over"},
    "redirect_shipped": {"hand_over"},
}


@pytest.mark.parametrize("level", LEVELS)
def test_each_kind_of_request_has_its_call(level: int) -> None:
    tasks = RetailTasks(level=level)
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for scenario in map(tasks.scenario, tasks.held_out(800)):
        if len(scenario.requests) > 1:  # the second may change the product of the first
            continue
        (request,) = scenario.requests
        name, arguments = correct_call(scenario, request)
        found[request.kind].add(f"{name} {arguments.get('reason', '')}".strip())
        if request.kind == "return_sale":
            kinds = {payment.id: payment.kind for payment in scenario.user.payments}
            assert kinds[arguments["payment_id"]] == "gift"
    assert found == CALLS | ({"refuse_final": {"refuse final"}} if level == 1 else {})


def test_every_fault_costs_success_where_its_rule_decides() -> None:
    tasks = RetailTasks()
    decides = {
        "status": "refuse_status",
        "account": "business",
        "final": "refuse_final",
        "sale": "return_sale",
        "point": "redirect",
        "cancel": "cancel",
    }
    for fault, kind in decides.items():
        task = task_of(kind)
        wrong = expert_replies(tasks.scenario(task), Faults(**{fault: 1.0}))
        assert episode(tasks, task, wrong)[-1].rewards["success"] == 0.0, fault


def test_kinds_come_in_the_shares_that_are_promised() -> None:
    tasks = RetailTasks()
    found = [tasks.scenario(task).requests[0].kind for task in tasks.held_out(2000)]
    for kind, share in KINDS.items():
        assert found.count(kind) / 2000 == pytest.approx(share, abs=0.03)
    assert sum(KINDS.values()) == pytest.approx(1.0)


def test_no_single_outcome_is_right_in_more_than_fifteen_percent() -> None:
    tasks = RetailTasks()
    names = [correct_call(s, s.requests[0])[0] for s in map(tasks.scenario, tasks.held_out(1000))]
    for name in ("refuse", "hand_over", "cancel_order"):
        assert 0.05 < names.count(name) / 1000 <= 0.15


def test_tasks_are_functions_of_their_seed() -> None:
    tasks = RetailTasks(level=3)
    task = tasks.held_out(5)[4]
    assert tasks.scenario(task) == tasks.scenario(task)
    assert episode(tasks, task, [])[0] == episode(tasks, task, [])[0]
    first, second = tasks.train(0), tasks.train(1)
    assert {next(first).key for _ in range(50)}.isdisjoint({next(second).key for _ in range(50)})
    assert {task.split for task in tasks.held_out(10)} == {"held_out"}


def test_the_customer_tells_what_is_asked_and_nothing_else() -> None:
    task = task_of("return")
    facts = RetailTasks().scenario(task)
    request = facts.requests[0]
    turns = episode(
        RetailTasks(),
        task,
        [say("Which order?"), say("Which item?"), say("Refund to what?"), say("Which colour?")],
    )
    heard = [turn.messages[-1].content for turn in turns]
    assert request.order not in heard[0]
    assert request.order in heard[1]
    assert facts.desk.items[request.item].name in heard[2]
    assert heard[4] == "I do not know."


def test_a_customer_nobody_helps_leaves_and_that_fails() -> None:
    turns = episode(RetailTasks(), task_of("cancel"), [say("Done.")] * 9)
    assert len(turns) == 4
    assert turns[-1].done
    assert turns[-1].rewards["success"] == 0.0


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (call("get_order", order_id=1), "no order 1"),
        (call("get_order"), "get_order takes order_id; got nothing"),
        (call("get_order", order_id=[1]), "order_id must be an integer"),
        (call("open_door", order_id=1), "unknown tool 'open_door'; tools are find_user"),
        (
            Message("assistant", "", (ToolCall("", {}, error="the call is not JSON"),)),
            "the call is not JSON",
        ),
    ],
)
def test_wrong_calls_get_an_error_text_and_the_episode_goes_on(reply: Message, text: str) -> None:
    turn = episode(RetailTasks(), task_of("cancel"), [reply])[-1]
    assert turn.messages[0].role == "tool"
    assert turn.messages[0].content.startswith(f"Error: {text}")
    assert not turn.done
    assert turn.facts["tool_errors"] == 1.0


def test_an_error_can_be_made_good() -> None:
    tasks, task = RetailTasks(), task_of("cancel")
    replies = expert_replies(tasks.scenario(task))
    wrong = [call("cancel_order", order_id=7), *replies]
    assert episode(tasks, task, wrong)[-1].rewards["success"] == 1.0


def test_numbers_may_be_strings_of_digits() -> None:
    tasks, task = RetailTasks(), task_of("cancel")
    order = tasks.scenario(task).requests[0].order
    turns = episode(tasks, task, [call("cancel_order", order_id=order), say("Done.")])
    assert turns[-1].rewards["success"] == 1.0


def test_a_hand_over_ends_the_episode_at_once() -> None:
    tasks, task = RetailTasks(), task_of("business")
    order = tasks.scenario(task).requests[0].order
    last = episode(tasks, task, [call("hand_over", order_id=order)])[-1]
    assert last.done
    assert last.rewards["success"] == 1.0


def test_the_written_policy_grows_with_the_level() -> None:
    assert len(system_text(1)) < 40
    assert "out of stock" in system_text(2)
    assert "find_user" in system_text(3)
    assert "find_user" not in system_text(2)


def test_the_tools_are_schemas_with_json_arguments() -> None:
    assert [len(RetailTasks(level=level).tools) for level in LEVELS] == [8, 8, 9]
    for tool in RetailTasks(level=3).tools:
        function = tool["function"]
        assert tuple(function["parameters"]["required"]) == ARGUMENTS[function["name"]]
        json.dumps(tool)


def test_latency_is_log_normal_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def record(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)

    async def wait(seed: int, times: int) -> list[float]:
        waited.clear()
        env = RetailTasks(latency_s=0.02).env(task_of("cancel"), seed)
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
        env = RetailTasks(latency_s=0.02, latency_sigma=0.0).env(task_of("cancel"), 0)
        await env.begin()
        start = time.perf_counter()
        await env.step(call("get_order", order_id=1))
        return time.perf_counter() - start

    assert asyncio.run(timed()) >= 0.019


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"level": 9}, r"level must be one of \(1, 2, 3\), got 9"),
        ({"latency_s": -1.0}, "latency_s"),
    ],
)
def test_bad_knobs_are_one_clear_line(knobs: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RetailTasks(**knobs)  # type: ignore[arg-type]
