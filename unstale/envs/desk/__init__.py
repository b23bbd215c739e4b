"""Customer-service desks: the policy serves a simulated customer, with tools and by fixed rules.

A desk is a `Domain`: its records, tools, rules, requests and wordings. This package has what all
desks share: the database, tool calls, the customer, a scripted expert and the reward.

The reward is 1 if the database ends as the rules require. The scripted expert always succeeds. An
agent that ignores the customer and always makes the same call, or a random one, succeeds in less
than 15% of episodes (`benchmarks/desks_degenerate.py`). Refusing a request or handing it to a human
changes the database, so it is right only where the rules require it.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, Literal

from unstale.config import TaskConfig
from unstale.config.checks import NonNegative
from unstale.config.tasks import EnvSpec, shipped_envs
from unstale.envs import Message, NumberedTasks, ToolCall, Turn
from unstale.envs.desk.customer import Customer
from unstale.envs.desk.database import DeskError
from unstale.envs.desk.domain import LEVELS, Domain, Scenario
from unstale.envs.desk.expert import expert_replies, goal
from unstale.envs.desk.tools import unknown_tool
from unstale.records import Task


class DeskTasks(NumberedTasks):
    """The tasks of a customer-service desk.

    A tool call takes `latency_s` seconds on average. `latency_sigma` is the standard deviation of
    the logarithm of this time.
    """

    def __init__(
        self,
        domain: Domain,
        *,
        level: int = 1,
        latency_s: float = 0.0,
        latency_sigma: float = 0.5,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {level}")
        if latency_s < 0 or latency_sigma < 0:
            raise ValueError(
                f"latency_s and latency_sigma must be >= 0, got {latency_s} and {latency_sigma}"
            )
        self.domain = domain
        self.name = domain.name
        self.level = level
        self.latency_s = latency_s
        self.latency_sigma = latency_sigma
        names = domain.tool_names(level)
        self.tools: tuple[Mapping[str, Any], ...] = tuple(map(domain.tools.schema, names))

    def scenario(self, task: Task) -> Scenario:
        """Return the customer, the requests and the database of a task."""
        return self.domain.scenario(self.level, task.split, task.index)

    def text(self, task: Task) -> str:
        """Return the customer's first message."""
        return Customer(self.scenario(task)).opening()

    def env(self, task: Task, seed: int) -> "DeskEnv":
        random = Random(f"{task.key}/{seed}/latency")
        return DeskEnv(self.scenario(task), _delays(self.latency_s, self.latency_sigma, random))

    def demonstration(self, task: Task) -> list[Message]:
        """Return the conversation of the scripted expert, which solves the task."""
        scenario = self.scenario(task)
        env = DeskEnv(scenario, iter(()))
        messages = [*env.opening()]
        for reply in expert_replies(scenario):
            messages += [reply, *env.answer(reply).messages]
        return messages


def _delays(mean_s: float, sigma: float, random: Random) -> Iterator[float]:
    while mean_s:
        yield mean_s * math.exp(random.gauss(0, sigma) - sigma**2 / 2)


class DeskEnv:
    """The environment of one episode, in which the policy serves one customer."""

    def __init__(self, scenario: Scenario, delays: Iterator[float]) -> None:
        self.replaying = False
        self.scenario = scenario
        self.desk = scenario.desk.copy()
        self._delays = delays
        self._customer = Customer(scenario)
        self._is_identified = scenario.level < 3
        self._counts = {"turns": 0, "tool_calls": 0, "tool_errors": 0}

    async def begin(self) -> Turn:
        return Turn(self.opening())

    async def step(self, reply: Message) -> Turn:
        for _ in reply.tool_calls:
            delay = next(self._delays, 0.0)
            if delay and not self.replaying:
                await asyncio.sleep(delay)
        return self.answer(reply)

    def opening(self) -> tuple[Message, ...]:
        """Return the prompt of the episode."""
        system = Message("system", self.scenario.domain.prompt(self.scenario.level))
        return system, Message("user", self._customer.opening())

    def answer(self, reply: Message) -> Turn:
        """Return the environment's answer to a reply, without the delays of its tool calls."""
        self._counts["turns"] += 1
        if not reply.tool_calls:
            text = self._customer.answer(reply.content, writes=len(self.desk.writes))
            return self._turn((Message("user", text),), done=self._customer.gone)
        answers = tuple(Message("tool", self._carry_out(call)) for call in reply.tool_calls)
        over = bool(self.desk.writes) and self.desk.writes[-1] == "hand_over"
        return self._turn(answers, done=over)

    def _carry_out(self, call: ToolCall) -> str:
        self._counts["tool_calls"] += 1
        try:
            if call.error:
                raise DeskError(call.error)
            if not self.scenario.domain.earlier_replies:
                self._check_allowed(call.name)
            answer = self.scenario.domain.tools.call(self.desk, call.name, call.arguments)
        except DeskError as error:
            self._counts["tool_errors"] += 1
            return f"Error: {error}"
        if call.name == "find_user":
            email = str(call.arguments["email"]).strip().lower()
            self._is_identified |= email == self.scenario.user.email
        return answer

    def _check_allowed(self, tool: str) -> None:
        """Raise `DeskError` if the tool belongs to another level, or the customer is not identified
        yet.
        """
        names = self.scenario.domain.tool_names(self.scenario.level)
        if tool not in names:
            raise unknown_tool(tool, names)
        if tool != "find_user" and not self._is_identified:
            raise DeskError("identify the customer first, by email with find_user")

    def _turn(self, messages: tuple[Message, ...], *, done: bool) -> Turn:
        facts = {name: float(count) for name, count in self._counts.items()}
        if not done:
            return Turn(messages, facts=facts)
        success = not self.desk.changes(goal(self.scenario))
        return Turn(messages, done=True, rewards={"success": float(success)}, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskConfig(TaskConfig):
    """The tasks of a customer-service desk."""

    reward_names: ClassVar[tuple[str, ...]] = ("success",)

    env: str = "retail"
    level: Literal["1", "2", "3"] = "1"
    """Level of difficulty. 1 suits a small model, 2 and 3 larger ones."""
    latency_s: NonNegative = 0.0
    """Mean duration of a tool call in seconds (log-normal distribution); 0 turns delays off."""
    latency_sigma: NonNegative = 0.5
    """Standard deviation of the logarithm of a tool call's duration."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the desks that these tasks belong to. A single desk has one name."""
        return (self.env,)

    @property
    def largest_reward(self) -> float:
        return 1.0


def desk_spec(domain: Domain) -> EnvSpec:
    """Return the declaration by which `task.env` can name a desk."""
    return EnvSpec(domain.name, partial(_make, domain), DeskConfig)


def _make(domain: Domain, options: DeskConfig) -> DeskTasks:
    return DeskTasks(
        domain,
        level=int(options.level),
        latency_s=options.latency_s,
        latency_sigma=options.latency_sigma,
    )


def shipped_desks(**options: Any) -> dict[str, DeskTasks]:
    """Return name -> task set, for all desks of this package.

    `options` are fields of `DeskConfig`.
    """
    desks = {}
    for name in desk_names():
        tasks = shipped_envs()[name].make(DeskConfig(env=name, **options))
        assert isinstance(tasks, DeskTasks)
        desks[name] = tasks
    return desks


def desk_names() -> tuple[str, ...]:
    """Return the names of all desks of this package."""
    return tuple(name for name, spec in shipped_envs().items() if spec.options is DeskConfig)
