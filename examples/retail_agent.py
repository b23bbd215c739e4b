"""An agent with tools for the retail tasks, written with the OpenAI SDK.

    unstale train retail --task.env examples.retail_agent:tasks

`agent` gets a base URL, a task, a seed and a key. It calls tools, talks to the customer and returns
whether the database has the right content at the end. Training and held-out tasks are those of the
recipe `retail` at its demo level.
"""

import asyncio
import json
import math
from random import Random
from typing import Any

import openai

from unstale.envs.desk.customer import Customer
from unstale.envs.desk.database import Desk, DeskError
from unstale.envs.desk.expert import goal
from unstale.envs.external import ExternalAgent
from unstale.envs.retail import RetailTasks
from unstale.records import Task

DESK = RetailTasks(level=1)
LATENCY_S = 0.6
"""Mean of the log-normal duration of a tool call."""


async def agent(base_url: str, task: Task, seed: int, api_key: str) -> dict[str, float]:
    """Serve one customer until the conversation ends or the customer is handed over."""
    scenario, random = DESK.scenario(task), Random(seed)
    desk, customer = scenario.desk.copy(), Customer(scenario)
    messages: list[Any] = [
        {"role": "system", "content": DESK.domain.prompt(DESK.level)},
        {"role": "user", "content": customer.opening()},
    ]
    # On loopback: loading certificates would block the event loop.
    http = openai.DefaultAsyncHttpxClient(verify=False, timeout=None)
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, http_client=http
    ) as client:
        while not customer.gone and "hand_over" not in desk.writes:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=DESK.tools
            )
            reply = completion.choices[0].message
            messages.append(reply)
            for call in reply.tool_calls or ():
                await asyncio.sleep(LATENCY_S * math.exp(random.gauss(0, 1) - 0.5))
                result = answer(desk, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not reply.tool_calls:
                text = customer.answer(reply.content, writes=len(desk.writes))
                messages.append({"role": "user", "content": text})
    return {"success": float(not desk.changes(goal(scenario)))}


def answer(desk: Desk, call: Any) -> str:
    """Return the result of a tool call as text."""
    try:
        return DESK.domain.tools.call(desk, call.name, json.loads(call.arguments))
    except DeskError as error:
        return f"Error: {error}"


def tasks() -> ExternalAgent:
    """Return the recipe's tasks, enough for a long run."""
    train = [Task(DESK.name, "train", index) for index in range(10_000)]
    return ExternalAgent(
        agent, train, held_out=DESK.held_out(1000), name=DESK.name, concurrency=400
    )
