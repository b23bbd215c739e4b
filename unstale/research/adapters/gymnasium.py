"""Environments of Gymnasium that can be played in text: `--task.env gymnasium:FrozenLake-v1`.

An action is the text of a reply (action space `Text`) or the last integer in it (`Discrete`). After
an invalid reply, the policy is asked again. The policy reads the observation if it is text, else
the output of `render`, else the numbers of the observation. Steps run on the event loop and should
be fast.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from unstale.config import ConfigError
from unstale.envs import Message, NumberedTasks, Turn
from unstale.records import Task

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w]|\.\d)", re.ASCII)
_COLOURED_TEXT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
"""Pattern of coloured terminal text, with which games usually mark the player's position."""


class GymnasiumTasks(NumberedTasks):
    """The tasks of an environment that is registered in Gymnasium, with its options.

    Training and held-out tasks have different seeds.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, environment: str, *, instructions: str = "", **options: Any) -> None:
        self.name = f"gymnasium:{environment}"
        self.environment = environment
        self.options = options
        try:
            probe = self.make()
        except gymnasium.error.Error as error:
            raise ConfigError(f"task.env {self.name!r} cannot be made: {error}") from error
        render_modes = probe.metadata.get("render_modes", ())
        if not isinstance(probe.observation_space, Text) and "ansi" in render_modes:
            self.options = {"render_mode": "ansi", **options}
        match probe.action_space:
            case Text():
                default = ""
            case Discrete(n=n, start=start):
                default = f"Answer with the number of your action, {start} to {start + n - 1}."
            case other:
                raise ConfigError(
                    f"{self.name} takes actions of {other}; only Text and Discrete are supported"
                )
        probe.close()
        self.instructions = instructions or default

    def make(self) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.environment, **self.options)

    def env(self, task: Task, seed: int) -> "GymnasiumEnv":
        """Return the environment of a task.

        `seed` is not used: the task's number decides everything.
        """
        return GymnasiumEnv(self, self.seed_of(task))


class GymnasiumEnv:
    """One episode of a Gymnasium environment. Its reward is the sum of all step rewards."""

    def __init__(self, tasks: GymnasiumTasks, seed: int) -> None:
        self._env = tasks.make()
        self._seed = seed
        self._instructions = tasks.instructions
        self._total = 0.0
        self._num_invalid = 0

    async def begin(self) -> Turn:
        observation = self._text(self._env.reset(seed=self._seed)[0])
        system = (Message("system", self._instructions),) if self._instructions else ()
        return Turn((*system, Message("user", observation)))

    async def step(self, reply: Message) -> Turn:
        action = self._action(reply.content)
        if action is None:
            self._num_invalid += 1
            text, done = f"That is no action. {self._instructions}".strip(), False
        else:
            observation, reward, terminated, truncated, _ = self._env.step(action)
            self._total += float(reward)
            done = terminated or truncated
            text = "" if done else self._text(observation)
        facts = {"refused": float(self._num_invalid)}
        messages = () if done else (Message("user", text),)
        return Turn(messages, done, {"return": self._total}, facts=facts)

    async def close(self) -> None:
        with suppress(gymnasium.error.Error, AttributeError, OSError, RuntimeError):
            self._env.close()

    def _action(self, text: str) -> Any:
        """Return the action that a reply's text names, or None if it names no valid action."""
        space = self._env.action_space
        action: Any = text
        if isinstance(space, Discrete):
            numbers = _INTEGER.findall(text)
            action = space.dtype.type(numbers[-1]) if numbers else None
        return action if action is not None and space.contains(action) else None

    def _text(self, observation: Any) -> str:
        shown = self._env.render() if self._env.render_mode == "ansi" else observation
        return _COLOURED_TEXT.sub(r"[\1]", str(shown)).strip() or "(nothing)"


TASKSET = GymnasiumTasks
