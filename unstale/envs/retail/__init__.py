"""The environment `retail`: a customer-service desk with tools, a policy and a simulated customer.

The reward is 1 if the database at the end is as the policy requires. A scripted expert succeeds in
every episode. Agents that ask for the order and then always make the same call, or a random one,
succeed in at most 12.4% (`benchmarks/retail_degenerate.py`). Refusing a request or handing it over
changes the database, so it is right only where the rules require it.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from unstale.config import TaskConfig
from unstale.config.checks import NonNegative
from unstale.envs import Message, NumberedTasks, ToolCall, Turn
from unstale.envs.registry import EnvSpec
from unstale.envs.retail.customer import Customer
from unstale.envs.retail.database import DeskError
from unstale.envs.retail.rules import goal
from unstale.envs.retail.tasks import Scenario, scenario
from unstale.envs.retail.tools import ARGUMENTS, call_tool
from unstale.envs.retail.wording import BRIEF, IDENTIFY, POLICY, STOCK, TRUST, WINDOW, schema
from unstale.records import Task

LEVELS = (1, 2, 3)
"""Levels of difficulty. 1 has short lines and one request, for the demo. 2 has free wording, JSON
records and all rules, which are in the prompt. 3 is like 2, but the agent must identify the
customer by email, and some customers have a second request.
"""


class RetailTasks(NumberedTasks):
    """The tasks of the desk. Tool calls take `latency_s` seconds on average (log-normal)."""

    name = "retail"

    def __init__(
        self, *, level: int = 1, latency_s: float = 0.0, latency_sigma: float = 1.0
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {level}")
        if latency_s < 0 or latency_sigma < 0:
            raise ValueError(
                f"latency_s and latency_sigma must be >= 0, got {latency_s} and {latency_sigma}"
            )
        self.level = level
        self.latency_s = latency_s
        self.latency_sigma = latency_sigma
        names = [name for name in ARGUMENTS if level > 2 or name != "find_user"]
        self.tools: tuple[Mapping[str, Any], ...] = tuple(schema(name) for name in names)

    def scenario(self, task: Task) -> Scenario:
        """Return the facts of a task, for the expert, tests and statistics."""
        return scenario(self.level, task.split, task.index)

    def env(self, task: Task, seed: int) -> "RetailEnv":
        random = Random(f"{task.key}/{seed}/latency")
        return RetailEnv(self.scenario(task), _delays(self.latency_s, self.latency_sigma, random))


def _delays(mean_s: float, sigma: float, random: Random) -> Iterator[float]:
    """Yield log-normal delays in seconds, with mean `mean_s`."""
    while mean_s:
        yield mean_s * math.exp(random.gauss(0, sigma) - sigma**2 / 2)


class RetailEnv:
    """One episode: the policy serves one customer at the help desk of a shop."""

    def __init__(self, scenario: Scenario, delays: Iterator[float]) -> None:
        self.replaying = False
        self._scenario = scenario
        self._delays = delays
        self._desk = scenario.desk.copy()
        self._customer = Customer(scenario)
        self._counts = {"turns": 0, "tool_calls": 0, "tool_errors": 0}

    async def begin(self) -> Turn:
        system = Message("system", system_text(self._scenario.level))
        return Turn((system, Message("user", self._customer.opening())))

    async def step(self, reply: Message) -> Turn:
        self._counts["turns"] += 1
        if not reply.tool_calls:
            text = self._customer.answer(reply.content, writes=len(self._desk.writes))
            return self._turn((Message("user", text),), done=self._customer.gone)
        answers = []
        for call in reply.tool_calls:
            delay = next(self._delays, 0.0)
            if delay and not self.replaying:
                await asyncio.sleep(delay)
            answers.append(Message("tool", self._carry_out(call)))
        over = bool(self._desk.writes) and self._desk.writes[-1] == "hand_over"
        return self._turn(tuple(answers), done=over)

    def _carry_out(self, call: ToolCall) -> str:
        self._counts["tool_calls"] += 1
        try:
            if call.error:
                raise DeskError(call.error)
            return call_tool(self._desk, call.name, call.arguments)
        except DeskError as error:
            self._counts["tool_errors"] += 1
            return f"Error: {error}"

    def _turn(self, messages: tuple[Message, ...], *, done: bool) -> Turn:
        facts = {name: float(count) for name, count in self._counts.items()}
        rewards = {"success": float(self._desk.orders == goal(self._scenario))} if done else {}
        return Turn(messages, done=done, rewards=rewards, facts=facts)


def system_text(level: int) -> str:
    """Return the system prompt of a level."""
    if level == 1:
        return BRIEF
    return POLICY.format(identify=IDENTIFY if level > 2 else TRUST, stock=STOCK, window=WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetailConfig(TaskConfig):
    """The tasks of the customer-service desk."""

    env: str = "retail"
    level: Literal["1", "2", "3"] = "1"
    """Level of difficulty. 1 suits a small model, 2 and 3 larger ones."""
    latency_s: NonNegative = 0.0
    """Mean duration of a tool call in seconds (log-normal distribution); 0 turns delays off."""
    latency_sigma: NonNegative = 0.5
    """Standard deviation of the logarithm of a tool call's duration."""


def _make(options: RetailConfig) -> RetailTasks:
    return RetailTasks(
        level=int(options.level), latency_s=options.latency_s, latency_sigma=options.latency_sigma
    )


ENV = EnvSpec("retail", _make, RetailConfig)
