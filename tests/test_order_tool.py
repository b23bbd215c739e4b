"""Test the example `examples/order_tool.py`: one result for each call, errors as text, a reward.

The page docs/your-own-task.md shows the file as it is.
"""

import asyncio
from itertools import islice
from pathlib import Path

from examples.order_tool import OrderTasks
from unstale.envs import Message, ToolCall, Turn
from unstale.testing import check_env

ROOT = Path(__file__).parent.parent
TASKS = OrderTasks()
TASK = next(iter(TASKS.train(0)))
ENV = TASKS.env(TASK, 0)


def play(*replies: Message) -> list[Turn]:
    async def episode() -> list[Turn]:
        env = TASKS.env(TASK, 0)
        await env.begin()
        return [await env.step(reply) for reply in replies]

    return asyncio.run(episode())


def calling(*calls: ToolCall) -> Message:
    return Message("assistant", "", calls)


def test_it_keeps_the_contract() -> None:
    check_env(TASKS)


def test_tasks_differ_and_cover_all_statuses() -> None:
    envs = [TASKS.env(task, 0) for task in islice(TASKS.train(0), 50)]
    assert len({env.order_id for env in envs}) > 25
    assert len({env.status for env in envs}) == 4


def test_the_status_in_the_last_reply_is_rewarded() -> None:
    good = ToolCall("get_order", {"order_id": ENV.order_id})
    looked_up, ended = play(calling(good), Message("assistant", f"It was {ENV.status}."))
    assert looked_up.messages == (Message("tool", f"order {ENV.order_id}: {ENV.status}"),)
    assert not looked_up.done and looked_up.facts == {"tool_errors": 0}
    assert ended.done and ended.rewards == {"answer": 1.0}
    (ended,) = play(Message("assistant", "I do not know."))
    assert ended.done and ended.rewards == {"answer": 0.0}


def test_each_call_gets_one_result_in_order_and_errors_are_texts() -> None:
    calls = (
        ToolCall("get_order", {"order_id": 1}),
        ToolCall("get_order", {}, error="the arguments are not JSON"),
        ToolCall("get_order", {"order_id": ENV.order_id}),
        ToolCall("cancel", {}),
        ToolCall("get_order", {"number": ENV.order_id}),
    )
    (turn,) = play(calling(*calls))
    assert [message.role for message in turn.messages] == ["tool"] * 5
    texts = [message.content for message in turn.messages]
    assert texts[0] == "Error: there is no such order"
    assert texts[1] == "Error: the arguments are not JSON"
    assert texts[2] == f"order {ENV.order_id}: {ENV.status}"
    assert texts[3].startswith("Error: unknown tool 'cancel'")
    assert texts[4] == "Error: get_order takes order_id"
    assert turn.facts == {"tool_errors": 4}


def test_the_page_shows_the_example() -> None:
    code = (ROOT / "examples" / "order_tool.py").read_text().partition('"""\n\n')[2]
    page = (ROOT / "docs" / "your-own-task.md").read_text()
    assert f"```python\n{code}```" in page
