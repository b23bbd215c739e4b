"""Environments of Gymnasium that can be played in text: `--task.env gymnasium:FrozenLake-v1`.

Actions are text (`Text`) or a choice (`Discrete`: the last whole number of a reply); after a reply that is none the
policy is asked again. It reads the observation where that is text, else what `render` draws, else its numbers. Steps
run in the event loop, and should be quick.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from unstale.config import ConfigError
from unstale.envs import EnvError, Message, NumberedTasks, Turn
from unstale.records import Task

_WHOLE = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w]|\.\d)", re.ASCII)
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
"""Usually where the player stands."""


class GymnasiumTasks(NumberedTasks):
    """One registered environment, with options of its own. Training and held-out episodes never begin with one seed."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, environment: str, *, instructions: str = "", **options: Any) -> None:
        self.name, self.environment, self.options = f"gymnasium:{environment}", environment, options
        try:
            probe = self.make()
        except gymnasium.error.Error as error:
            raise ConfigError(f"task.env {self.name!r} cannot be made: {error}") from error
        if not isinstance(probe.observation_space, Text) and "ansi" in probe.metadata.get(
            "render_modes", ()
        ):
            self.options = {"render_mode": "ansi", **options}
        match probe.action_space:
            case Text():
                told = ""
            case Discrete(n=n, start=start):
                told = f"Answer with the number of your action, {start} to {start + n - 1}."
            case other:
                raise ConfigError(
                    f"{self.name} takes actions of {other}; only Text and Discrete can be said"
                )
        probe.close()
        self.instructions = instructions or told

    def make(self) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.environment, **self.options)

    def env(self, task: Task, seed: int) -> "GymnasiumEnv":
        """Everything random comes from the task: `seed` changes nothing."""
        return GymnasiumEnv(self, self.seed_of(task))


class GymnasiumEnv:
    """One episode. Its reward is the sum of what the steps gave."""

    def __init__(self, tasks: GymnasiumTasks, seed: int) -> None:
        self._env, self._seed, self._instructions = tasks.make(), seed, tasks.instructions
        self._state = "new"
        self._total, self._refused = 0.0, 0

    async def begin(self) -> Turn:
        if self._state != "new":
            raise EnvError("an episode begins once; make a new environment")
        self._state = "open"
        told = self._seen(self._env.reset(seed=self._seed)[0])
        system = (Message("system", self._instructions),) if self._instructions else ()
        return Turn((*system, Message("user", told)))

    async def step(self, reply: Message) -> Turn:
        if self._state != "open":
            raise EnvError(f"step() in an episode that is {self._state}")
        action = self._action(reply.content)
        if action is None:
            self._refused += 1
            return Turn(
                (Message("user", f"That is no action. {self._instructions}".strip()),),
                facts=self._facts(),
            )
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        if not (terminated or truncated):
            return Turn((Message("user", self._seen(observation)),), facts=self._facts())
        self._state = "over"
        self._env.close()
        return Turn(
            (), done=True, rewards=MappingProxyType({"return": self._total}), facts=self._facts()
        )

    async def close(self) -> None:
        """Of an episode that was cut short or failed."""
        if self._state != "over":
            self._state = "over"
            with suppress(gymnasium.error.Error, AttributeError, OSError, RuntimeError):
                self._env.close()

    def _action(self, text: str) -> Any:
        """None for what is none."""
        space = self._env.action_space
        action: Any = text
        if isinstance(space, Discrete):
            numbers = _WHOLE.findall(text)
            action = space.dtype.type(numbers[-1]) if numbers else None
        return action if action is not None and space.contains(action) else None

    def _seen(self, observation: Any) -> str:
        drawn = self._env.render() if self._env.render_mode == "ansi" else observation
        return _COLOURED.sub(r"[\1]", str(drawn)).strip() or "(nothing)"

    def _facts(self) -> Mapping[str, float]:
        return MappingProxyType({"refused": float(self._refused)})


TASKSET = GymnasiumTasks
