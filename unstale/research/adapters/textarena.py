"""Games of TextArena for one player: `--task.env textarena:GuessTheNumber-v0`.

The games use Python's global random generator. Each episode saves and restores the generator's
state, so that concurrent episodes do not affect each other. Moves run on the event loop.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from unstale.config import ConfigError, nearest
from unstale.envs import Message, NumberedTasks, Turn
from unstale.records import Task


class TextArenaTasks(NumberedTasks):
    """The tasks of one TextArena game, with its options.

    Training and held-out tasks have different seeds.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, game: str, **options: Any) -> None:
        if game not in ENV_REGISTRY:
            raise ConfigError(f"textarena has no {game!r}{nearest(game, sorted(ENV_REGISTRY))}")
        self.name = f"textarena:{game}"
        self.game = game
        self.options = options
        try:
            GameEnv(self, 0).reset()
        except (
            AssertionError,
            ImportError,
            LookupError,
            OSError,
            SyntaxError,
            TypeError,
            ValueError,
        ) as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"task.env {self.name!r} cannot be played by one player here: {why}"
            ) from error

    def env(self, task: Task, seed: int) -> "GameEnv":
        """Return the environment of a task.

        `seed` is not used: the task's number decides everything.
        """
        return GameEnv(self, self.seed_of(task))


class GameEnv:
    """An environment of one game. Its reward is the reward that the game gives to its player."""

    def __init__(self, tasks: TextArenaTasks, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._random = random.Random(seed).getstate()

    def reset(self) -> str:
        """Start the game and return the first observation."""
        with self._episode_random():
            self._game = textarena.make(self._tasks.game, **self._tasks.options)
            self._game.reset(num_players=1, seed=self._seed)
            if not isinstance(self._game.state, textarena.SinglePlayerState):
                raise ValueError(f"it is played with a {type(self._game.state).__name__}")
            return self._observation()

    async def begin(self) -> Turn:
        return Turn((Message("user", self.reset()),))

    async def step(self, reply: Message) -> Turn:
        with self._episode_random():
            done, _ = self._game.step(reply.content)
            if not done:
                return Turn((Message("user", self._observation()),))
            rewards, info = self._game.close()
        facts = {"invalid_move": float(info[0]["invalid_move"])}
        return Turn((), done=True, rewards={"game": float(rewards[0])}, facts=facts)

    def _observation(self) -> str:
        _, observation = self._game.get_observation()
        return str(observation).strip() or "(nothing)"

    @contextmanager
    def _episode_random(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


TASKSET = TextArenaTasks
