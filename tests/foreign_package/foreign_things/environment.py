"""The environment `echo`: repeat a number."""

from dataclasses import dataclass
from typing import Any

from unstale.config import TaskConfig
from unstale.config.checks import PositiveInt
from unstale.config.tasks import EnvSpec
from unstale.envs import Message, NumberedTasks, Turn
from unstale.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig(TaskConfig):
    """The tasks of the echo."""

    env: str = "echo"
    digits: PositiveInt = 2
    """Digits of the number to repeat."""


class EchoTasks(NumberedTasks):
    name = "echo"
    tools: tuple[Any, ...] = ()

    def __init__(self, options: EchoConfig) -> None:
        self.digits = options.digits

    def env(self, task: Task, seed: int) -> "Echo":
        return Echo(str(self.seed_of(task))[: self.digits])


class Echo:
    def __init__(self, number: str) -> None:
        self.number = number

    async def begin(self) -> Turn:
        return Turn((Message("user", self.number),))

    async def step(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"right": float(self.number in reply.content)})


ENV = EnvSpec("echo", EchoTasks, EchoConfig)
