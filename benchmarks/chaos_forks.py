"""Ways of a desk's environment to continue a forked episode, for runs that are killed.

The desks have neither `fork` nor `snapshot`, because their replies take less time than a copy is
worth. `fork_by` gives them one of both, with the whole state of the environment: its database, its
customer and the random state of its delays.
"""

import base64
import copy
import io
import math
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

from unstale.envs import desk
from unstale.envs.desk import DeskEnv
from unstale.envs.desk.domain import Scenario
from unstale.records import Fork
from unstale.rollout.states import EnvState, EnvStates

WAYS = ("replies", "copy", "snapshot")
"""How a fork's environment gets to its turn: see docs/trees.md."""


class Delays:
    """The delays of a desk's tool calls, with a state that can be copied and stored."""

    def __init__(self, mean_s: float, sigma: float, random: Random) -> None:
        self._mean_s, self._sigma, self._random = mean_s, sigma, random

    def __iter__(self) -> "Delays":
        return self

    def __next__(self) -> float:
        if not self._mean_s:
            raise StopIteration
        return self._mean_s * math.exp(self._random.gauss(0, self._sigma) - self._sigma**2 / 2)


def copied(env: DeskEnv) -> DeskEnv:
    """Return an independent copy of a desk's environment. The scenario never changes."""
    return copy.deepcopy(env, {id(env.scenario): env.scenario})


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "scenario" if isinstance(obj, Scenario) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, state: bytes, scenario: Scenario) -> None:
        super().__init__(io.BytesIO(state))
        self._scenario = scenario

    def persistent_load(self, pid: Any) -> Scenario:
        return self._scenario


def state_of(env: DeskEnv) -> str:
    """Return the state of a desk's environment as text, without its scenario."""
    stored = io.BytesIO()
    _Pickler(stored).dump({**vars(env), "replaying": False})
    return base64.b64encode(stored.getvalue()).decode()


async def restored(env: DeskEnv, state: str) -> None:
    """Give a new environment of the same task a state that `state_of` returned."""
    vars(env).update(_Unpickler(base64.b64decode(state), env.scenario).load())


def fork_by(way: str, tell: Callable[..., None]) -> None:
    """Change the desks of this process so that forks continue in one of `WAYS`.

    `tell` is called for each fork that begins with a parent's state.
    """
    desk._delays = Delays
    if way == "copy":
        DeskEnv.fork = copied  # type: ignore[attr-defined]
    if way == "snapshot":
        DeskEnv.snapshot = state_of  # type: ignore[attr-defined]
        DeskEnv.resume = restored  # type: ignore[attr-defined]
    begin = EnvStates.begin

    def begun(states: EnvStates, episode: int, fork: Fork) -> EnvState | None:
        state = begin(states, episode, fork)
        if state is not None:
            tell("state", way="copy" if state.copy else "snapshot")
        return state

    EnvStates.begin = begun  # type: ignore[method-assign,assignment]
