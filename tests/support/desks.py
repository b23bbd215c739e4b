"""Episodes at a customer-service desk with given replies."""

import asyncio

from unstale.envs import Message, ToolCall, Turn
from unstale.envs.desk import DeskTasks
from unstale.records import Task


def episode(tasks: DeskTasks, task: Task, replies: list[Message]) -> list[Turn]:
    """Return the turns of an episode with these replies."""

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
    """Return a reply that makes one tool call."""
    return Message("assistant", "", (ToolCall(name, arguments),))


def say(text: str) -> Message:
    """Return a reply without a tool call."""
    return Message("assistant", text)
