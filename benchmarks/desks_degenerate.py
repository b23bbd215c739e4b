"""Measure the success of policies that do not understand the customer, at every desk.

    python -m benchmarks.desks_degenerate [--tasks 1000]

Each policy follows the form of a conversation: it looks up the case, reads all lists, asks all
questions that the customer can answer, makes one call that ignores the answers, and ends. Most of
them try calls on a copy of the database first, so that their arguments always belong together. A
success of 15% or more at any level would mean that the environment can be gamed, so it fails the
benchmark. The scripted expert must reach 100%. The table is written to
`results/desks-degenerate.md`.
"""

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from random import Random

from unstale.durability.machine import commit, machine
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.desk import DeskEnv, DeskTasks, shipped_desks
from unstale.envs.desk.database import DeskError
from unstale.envs.desk.domain import EMAIL, LEVELS, Domain, Scenario
from unstale.envs.desk.expert import expert_replies
from unstale.envs.desk.tools import Tool

CEILING = 0.15
NUMBER = re.compile(r"(?<![\w.])(?:\d{4}|\d{2})(?!\w)")


class Conversation:
    """An episode as a degenerate policy sees it."""

    def __init__(self, env: DeskEnv, seed: int) -> None:
        self.env = env
        self.random = Random(seed)
        self.turn = Turn(())
        self.messages: list[Message] = []
        self.case = ""
        """Number of the case of the present request."""

    @property
    def domain(self) -> Domain:
        return self.env.scenario.domain

    async def send(self, reply: Message) -> str:
        """Send a reply unless the episode is done. Return the last answer."""
        if not self.turn.done:
            self.turn = await self.env.step(reply)
            self.messages += self.turn.messages
        return self.messages[-1].content if self.messages else ""

    async def look_up(self, known: Mapping[str, str]) -> None:
        """Find the case, read every list, and ask everything that the customer knows."""
        tools = self.domain.tools
        self.messages.clear()
        heard = await self.send(say(self.domain.facts[tools.case_name].question))
        self.case = (NUMBER.findall(heard) or ["0"])[-1]
        await self.send(call(f"get_{tools.case_name}", {tools.case_id: self.case}))
        for tool in tools.tools.values():
            if not tool.writes and tool.name not in ("find_user", f"get_{tools.case_name}"):
                await self.send(next(self.accepted(tool), say("Done.")))
        for kind in known:
            await self.send(say(self.domain.facts[kind].question))

    def values(self, key: str, words: Sequence[str] = ()) -> list[str]:
        """Return the values that an argument could have, in the order in which they were seen."""
        if key == self.domain.tools.case_id:
            return [self.case]
        if key.endswith("_id"):
            texts = (message.content for message in self.messages)
            return list(dict.fromkeys(number for text in texts for number in NUMBER.findall(text)))
        return list(self.domain.tools.choices.get(key, words))

    def accepted(
        self, tool: Tool, order: Callable[[list[str]], Sequence[str]] = list
    ) -> Iterator[Message]:
        """Yield the calls of a tool that are no error. `order` orders the values of arguments."""
        words = [word for each in self.env.scenario.requests for word in each.known.values()]
        values = [order(self.values(key, words)) for key in tool.arguments]
        for chosen in product(*values):
            arguments = dict(zip(tool.arguments, chosen, strict=True))
            try:
                self.domain.tools.call(self.env.desk.copy(), tool.name, arguments)
            except DeskError:
                continue
            yield call(tool.name, arguments)


Act = Callable[[Conversation], Message]


def say(text: str) -> Message:
    return Message("assistant", text)


def call(name: str, arguments: Mapping[str, str]) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


def always(tool: Tool, which: str) -> Act:
    """Return a policy that always calls the same tool, with the first, last or any arguments."""

    def act(talk: Conversation) -> Message:
        def order(values: list[str]) -> Sequence[str]:
            if which == "any":
                return talk.random.sample(values, len(values))
            return values if which == "first" else values[::-1]

        return next(talk.accepted(tool, order), say("Done."))

    return act


def refuse(reason: str) -> Act:
    return lambda talk: call("refuse", {talk.domain.tools.case_id: talk.case, "reason": reason})


def writers(domain: Domain) -> list[Tool]:
    return [tool for tool in domain.tools.tools.values() if tool.writes]


def any_call(talk: Conversation) -> Message:
    """Call any tool that writes, with arguments that belong together."""
    return always(talk.random.choice(writers(talk.domain)), "any")(talk)


def any_numbers(talk: Conversation) -> Message:
    """Call any tool that writes, with any numbers."""
    tool = talk.random.choice(writers(talk.domain))
    return call(
        tool.name, {key: talk.random.choice(talk.values(key) or ["0"]) for key in tool.arguments}
    )


def last_number(talk: Conversation) -> Message:
    """Call any tool that writes, with the last number as every argument."""
    tool = talk.random.choice(writers(talk.domain))
    return call(tool.name, {key: (talk.values(key) or ["0"])[-1] for key in tool.arguments})


def policies(domain: Domain) -> dict[str, Act | None]:
    """Return the degenerate policies of a desk by name. None asks the same question for ever."""
    found: dict[str, Act | None] = {}
    for tool in writers(domain):
        if tool.name == "refuse":
            for reason in domain.tools.choices["reason"]:
                found[f"always refuse ({reason})"] = refuse(reason)
        elif tool.arguments == (domain.tools.case_id,):
            found[f"always {tool.name}"] = always(tool, "first")
        else:
            for which in ("first", "last", "any"):
                found[f"always {tool.name}, {which} arguments"] = always(tool, which)
    return found | {
        "any call, arguments that belong together": any_call,
        "any call, any numbers": any_numbers,
        "any call, the last number": last_number,
        "only talk": lambda talk: say("Done."),
        "ask for ever": None,
    }


async def score(scenario: Scenario, act: Act | None) -> float:
    """Return the reward of a degenerate policy in an episode."""
    env = DeskEnv(scenario, iter(()))
    talk = Conversation(env, scenario.seed)
    talk.turn = await env.begin()
    if scenario.level > 2:
        answer = await talk.send(say(EMAIL.question))
        await talk.send(call("find_user", {"email": re.findall(r"[\w.]+@[\w.]+\w", answer)[0]}))
    for request in scenario.requests:
        await talk.look_up(request.known)
        await talk.send(act(talk) if act else say("Which?"))
        await talk.send(say("Done."))
    while not talk.turn.done:
        await talk.send(say("Done." if act else "Which?"))
    return talk.turn.rewards["success"]


async def expert(scenario: Scenario) -> float:
    """Return the reward of the scripted expert in an episode."""
    env = DeskEnv(scenario, iter(()))
    turn = await env.begin()
    for reply in expert_replies(scenario):
        turn = await env.step(reply)
    return turn.rewards.get("success", 0.0)


async def measure(tasks: DeskTasks, count: int) -> dict[str, float]:
    """Return the success of the expert and of every degenerate policy."""
    scenarios = [tasks.scenario(task) for task in tasks.held_out(count)]
    table = {"scripted expert": sum([await expert(each) for each in scenarios]) / count}
    for name, act in policies(tasks.domain).items():
        table[name] = sum([await score(each, act) for each in scenarios]) / count
    return table


def table_of(desk: str, count: int) -> tuple[list[str], bool]:
    """Return the lines of a desk's table, and whether it is within bounds."""
    levels = [
        asyncio.run(measure(shipped_desks(level=str(level))[desk], count)) for level in LEVELS
    ]
    lines = [f"## {desk}", ""]
    lines += ["| policy | " + " | ".join(f"level {level}" for level in LEVELS) + " |"]
    lines += ["|---|" + "---|" * len(LEVELS)]
    for name in levels[0]:
        values = " | ".join(f"{level[name]:.1%}" for level in levels)
        lines.append(f"| {name} | {values} |")
    fair = all(
        (success == 1.0) if name == "scripted expert" else (success < CEILING)
        for level in levels
        for name, success in level.items()
    )
    return [*lines, ""], fair


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", type=int, default=1000, help="held-out tasks per policy, desk and level"
    )
    count = parser.parse_args().tasks
    command = f"python -m benchmarks.desks_degenerate --tasks {count}"
    lines = [f"# What degenerate policies score at the desks, {date.today()}", ""]
    lines += [
        f"Success on {count} held-out tasks of each desk and level, `{command}` at commit "
        f"{commit()}, {machine()}.",
        "",
    ]
    unfair = []
    for desk in shipped_desks():
        table, fair = table_of(desk, count)
        lines += table
        unfair += [] if fair else [desk]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)  # noqa: T201
    results = Path(__file__).parent / "results"
    results.joinpath("desks-degenerate.md").write_text(text)
    if unfair:
        raise SystemExit(
            f"out of bounds at {', '.join(unfair)}: the expert must score 100%, every other policy "
            f"less than {CEILING:.0%}"
        )


if __name__ == "__main__":
    main()
