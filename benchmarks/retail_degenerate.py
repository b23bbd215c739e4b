"""Measure the success of policies that do not understand the customer.

    python benchmarks/retail_degenerate.py [--tasks 1000]

Each policy follows the form of a conversation: it looks up the order, asks fixed questions, makes
one call that ignores the answers, and ends. A success above 15% at any level would mean that the
environment can be gamed, so it fails the benchmark. The scripted expert must reach 100%. The table
is written to `results/<date>-retail-degenerate.md`.
"""

import argparse
import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from random import Random

from unstale.envs import Message, ToolCall
from unstale.envs.retail import LEVELS, RetailEnv, RetailTasks
from unstale.envs.retail.database import REASONS
from unstale.envs.retail.rules import expert_replies
from unstale.envs.retail.tools import ARGUMENTS, READS
from unstale.records import Task

CEILING = 0.15
MAX_TURNS = 20
NUMBER = re.compile(r"(?<![\w.])(?:\d{4}|\d{2})(?!\w)")


@dataclass(slots=True)
class Conversation:
    """The input of a degenerate policy: the messages so far, and random numbers."""

    random: Random
    messages: list[Message] = field(default_factory=list)

    def numbers(self, role: str) -> list[str]:
        return [
            number for m in self.messages if m.role == role for number in NUMBER.findall(m.content)
        ]

    @property
    def order(self) -> str:
        return self.numbers("user")[0]

    def listed(self, key: str) -> list[str]:
        """Return the numbers of the order's items, payments or pick-up point, as last shown."""
        record = next(
            m.content for m in reversed(self.messages) if m.role == "tool" and "point" in m.content
        )
        if record.startswith("{"):
            return re.findall(rf'"{key}_id": (\d+)', record)
        part = {"item": "items: (.*?);", "payment": "pay: (.*?);", "point": "point (.*)"}[key]
        return NUMBER.findall("".join(re.findall(part, record)))

    @property
    def other_variant(self) -> str:
        """The first number in the last record that is not that of the order's first item."""
        record = next(m.content for m in reversed(self.messages) if m.role == "tool")
        numbers = (
            re.findall(r'"item_id": (\d+)', record)
            if '"item_id"' in record
            else NUMBER.findall(record)
        )
        return next((number for number in numbers if number != self.listed("item")[0]), numbers[0])


Act = Callable[[Conversation], Message]


def call(name: str, *values: str) -> Message:
    return Message(
        "assistant", "", (ToolCall(name, dict(zip(ARGUMENTS[name], values, strict=True))),)
    )


def random_call(conversation: Conversation) -> Message:
    """Call a random tool that writes, with arguments drawn from all numbers so far."""
    name = conversation.random.choice([name for name in ARGUMENTS if name not in READS])
    numbers = conversation.numbers("tool") + conversation.numbers("user")
    values = {"order_id": conversation.order, "reason": conversation.random.choice(REASONS)}
    return call(
        name, *[values.get(key) or conversation.random.choice(numbers) for key in ARGUMENTS[name]]
    )


def random_valid_call(conversation: Conversation) -> Message:
    """Call a random tool that writes, with each argument drawn from numbers of its kind."""
    name = conversation.random.choice([name for name in ARGUMENTS if name not in READS])
    kinds = {"item_id": "item", "payment_id": "payment", "point_id": "point", "new_item_id": "item"}
    values = {"order_id": conversation.order, "reason": conversation.random.choice(REASONS)}
    picked = [
        values.get(key) or conversation.random.choice(conversation.listed(kinds[key]))
        for key in ARGUMENTS[name]
    ]
    return call(name, *picked)


def look_at_variants(conversation: Conversation) -> Message:
    return call("list_variants", conversation.listed("item")[0])


def last_numbers(conversation: Conversation) -> Message:
    seen = [number for m in conversation.messages for number in NUMBER.findall(m.content)]
    return call("return_item", conversation.order, seen[-1], seen[-1])


POLICIES: dict[str, tuple[Act, tuple[str | Act, ...]]] = {
    **{
        f"always refuse ({reason})": ((lambda s, r=reason: call("refuse", s.order, r)), ())
        for reason in REASONS
    },
    "always hand over": (lambda s: call("hand_over", s.order), ()),
    "always cancel": (lambda s: call("cancel_order", s.order), ()),
    "return the first item to the first payment": (
        lambda s: call("return_item", s.order, s.listed("item")[0], s.listed("payment")[0]),
        ("Which item?", "Refund to what?"),
    ),
    "return the last item to the last payment": (
        lambda s: call("return_item", s.order, s.listed("item")[-1], s.listed("payment")[-1]),
        ("Which item?", "Refund to what?"),
    ),
    "return any item to any payment": (
        lambda s: call(
            "return_item",
            s.order,
            s.random.choice(s.listed("item")),
            s.random.choice(s.listed("payment")),
        ),
        ("Which item?", "Refund to what?"),
    ),
    "exchange the first item for its first variant": (
        lambda s: call("exchange_item", s.order, s.listed("item")[0], s.other_variant),
        ("Which item?", "Which colour?", look_at_variants),
    ),
    "redirect to the last number said": (
        lambda s: call("redirect_order", s.order, s.numbers("user")[-1]),
        ("Where to?",),
    ),
    "copy the last number": (last_numbers, ("Which item?", "Refund to what?")),
    "any call, any numbers": (random_call, ("Which item?", "Refund to what?", "Where to?")),
    "any call, numbers of the right kind": (
        random_valid_call,
        ("Which item?", "Refund to what?", "Where to?"),
    ),
    "only talk": (lambda s: Message("assistant", "Done."), ()),
}


async def replies(
    conversation: Conversation, level: int, act: Act, questions: Sequence[str | Act]
) -> AsyncIterator[Message]:
    """Yield the policy's replies in a conversation."""
    if level > 2:
        yield Message("assistant", "Your email?")
        yield call(
            "find_user", re.findall(r"[\w.]+@[\w.]+\w", conversation.messages[-1].content)[0]
        )
    for _ in range(3):
        start = len(conversation.messages)
        yield Message("assistant", "Which order?")
        fresh = Conversation(conversation.random, conversation.messages[start:])
        yield call("get_order", fresh.order)
        for question in questions:
            fresh.messages = conversation.messages[start:]
            yield Message("assistant", question) if isinstance(question, str) else question(fresh)
        fresh.messages = conversation.messages[start:]
        yield act(fresh)
        yield Message("assistant", "Done.")


async def score(tasks: RetailTasks, index: int, act: Act, questions: Sequence[str | Act]) -> float:
    task = Task(tasks.name, "held_out", index)
    env: RetailEnv = tasks.env(task, 0)
    turn = await env.begin()
    conversation = Conversation(Random(index), list(turn.messages))
    async for reply in replies(conversation, tasks.level, act, questions):
        turn = await env.step(reply)
        conversation.messages += [reply, *turn.messages]
        if turn.done:
            break
    return turn.rewards.get("success", 0.0)


async def expert(tasks: RetailTasks, index: int) -> float:
    task = Task(tasks.name, "held_out", index)
    env = tasks.env(task, 0)
    turn = await env.begin()
    for reply in expert_replies(tasks.scenario(task)):
        turn = await env.step(reply)
    return turn.rewards.get("success", 0.0)


async def measure(count: int) -> dict[str, list[float]]:
    """Return the success of every policy, one number per level."""
    table: dict[str, list[float]] = {"scripted expert": [], **{name: [] for name in POLICIES}}
    for level in LEVELS:
        tasks = RetailTasks(level=level)
        table["scripted expert"].append(sum([await expert(tasks, i) for i in range(count)]) / count)
        for name, (act, questions) in POLICIES.items():
            table[name].append(
                sum([await score(tasks, i, act, questions) for i in range(count)]) / count
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", type=int, default=1000, help="held-out tasks per policy and level"
    )
    count = parser.parse_args().tasks
    table = asyncio.run(measure(count))
    command = f"python benchmarks/retail_degenerate.py --tasks {count}"
    lines = [f"# What degenerate policies score at the retail desk, {date.today()}", ""]
    lines += [f"Success on {count} held-out tasks, {date.today()}, `{command}`.", ""]
    lines += [
        "| policy | " + " | ".join(f"level {level}" for level in LEVELS) + " |",
        "|---|" + "---|" * len(LEVELS),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{value:.1%}" for value in row) + " |"
        for name, row in table.items()
    ]
    text = "\n".join(lines) + "\n"
    print(text)  # noqa: T201
    Path(__file__).parent.joinpath("results", f"{date.today()}-retail-degenerate.md").write_text(
        text
    )
    worst = max(value for name, row in table.items() if name != "scripted expert" for value in row)
    if worst > CEILING or min(table["scripted expert"]) < 1.0:
        raise SystemExit(
            f"out of bounds: the best degenerate policy scores {worst:.1%}, the expert "
            f"{table['scripted expert']}"
        )


if __name__ == "__main__":
    main()
