"""Test the retail desk: its rules, and the customer. `test_desks.py` tests what all desks promise.

Refusals, hand-overs and actions leave different databases. Wrong calls get an error message.
"""

import pytest

from tests.support.desks import call, episode, say
from unstale.envs import Message, ToolCall
from unstale.envs.desk.domain import LEVELS
from unstale.envs.desk.expert import correct_call, expert_replies
from unstale.envs.retail import KINDS, Item, Order, RetailTasks
from unstale.records import Task


def task_of(kind: str, level: int = 1) -> Task:
    tasks = RetailTasks(level=level)
    return next(
        task for task in tasks.held_out(400) if tasks.scenario(task).requests[0].kind == kind
    )


def test_a_pickup_point_has_plain_digits() -> None:
    """Digits that `str.isdigit` accepts and `int` refuses would break the order's record."""
    task = task_of("redirect", level=2)
    order = next(iter(RetailTasks(level=2).scenario(task).desk[Order]))
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
        wrong = expert_replies(tasks.scenario(task), {fault: 1.0})
        assert episode(tasks, task, wrong)[-1].rewards["success"] == 0.0, fault


def test_no_single_outcome_is_right_in_more_than_fifteen_percent() -> None:
    tasks = RetailTasks()
    names = [correct_call(s, s.requests[0])[0] for s in map(tasks.scenario, tasks.held_out(1000))]
    for name in ("refuse", "hand_over", "cancel_order"):
        assert 0.05 < names.count(name) / 1000 <= 0.15


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
    assert request.case not in heard[0]
    assert request.case in heard[1]
    assert facts.desk[Item][request.wants["item"]].name in heard[2]
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
    order = tasks.scenario(task).requests[0].case
    turns = episode(tasks, task, [call("cancel_order", order_id=order), say("Done.")])
    assert turns[-1].rewards["success"] == 1.0


def test_a_hand_over_ends_the_episode_at_once() -> None:
    tasks, task = RetailTasks(), task_of("business")
    order = tasks.scenario(task).requests[0].case
    last = episode(tasks, task, [call("hand_over", order_id=order)])[-1]
    assert last.done
    assert last.rewards["success"] == 1.0
