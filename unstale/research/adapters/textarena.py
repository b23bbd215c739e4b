"""Games of TextArena: `--task.env textarena:GuessTheNumber-v0`, `--task.env textarena:Nim-v0`.

In a game for two players, the policy plays both. Each player is a role with its own conversation
and reward, so advantages compare episodes of a group by player.

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
from unstale.engines.http import Http
from unstale.envs import Message, NumberedTasks, Turn
from unstale.envs.external import ExternalAgent, role_url
from unstale.records import Task

SEATS = ("first", "second")
"""The policy's roles in a game for two players, in the order of the players."""
_GAMES = 10_000
"""Number of training games for two players; there are as many held-out ones."""
_ERRORS = (
    AssertionError,
    ImportError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Exceptions of a game for a wrong number of players, a wrong option or missing data."""


class Game:
    """One game, with the state of the random generator that it uses."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int, players: int) -> None:
        """Start the game. Raises ValueError if it is not for this number of players."""
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game = textarena.make(name, **options)
            self._game.reset(num_players=players, seed=seed)
            wanted = textarena.SinglePlayerState if players == 1 else textarena.TwoPlayerState
            if not isinstance(self._game.state, wanted):
                raise ValueError(f"it is played with a {type(self._game.state).__name__}")

    def observation(self) -> tuple[int, str]:
        """Return the number of the player whose turn it is, and this player's observation as
        text.
        """
        with self._own_random():
            player, text = self._game.get_observation()
            return player, str(text).strip() or "(nothing)"

    def move(self, text: str) -> bool:
        """Make the move that the text of a reply names. Return True if the game is over."""
        with self._own_random():
            done, _ = self._game.step(text)
            return bool(done)

    def result(self) -> tuple[Mapping[int, float], Mapping[int, Any]]:
        """End the game. Return the reward of each player, and further information of the game about
        each player.
        """
        with self._own_random():
            rewards, info = self._game.close()
            return rewards, info

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


class TextArenaTasks(NumberedTasks):
    """The tasks of one TextArena game for one player, with its options.

    Training and held-out tasks have different seeds.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, game: str, **options: Any) -> None:
        self.name = f"textarena:{game}"
        self.game = game
        self.options = options
        _probe(self.name, game, options, 1)

    def env(self, task: Task, seed: int) -> "GameEnv":
        """Return the environment of a task.

        `seed` is not used: the task's number decides everything.
        """
        return GameEnv(self, self.seed_of(task))


class GameEnv:
    """An environment of one game for one player. Its reward is that of the game."""

    def __init__(self, tasks: TextArenaTasks, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed

    async def begin(self) -> Turn:
        self._game = Game(self._tasks.game, self._tasks.options, self._seed, 1)
        return Turn((Message("user", self._game.observation()[1]),))

    async def step(self, reply: Message) -> Turn:
        if not self._game.move(reply.content):
            return Turn((Message("user", self._game.observation()[1]),))
        rewards, info = self._game.result()
        facts = {"invalid_move": float(info[0]["invalid_move"])}
        return Turn((), done=True, rewards={"game": float(rewards[0])}, facts=facts)


class SelfPlay(ExternalAgent):
    """The tasks of one TextArena game for two players, both of which the policy plays.

    The rewards are `first/game` and `second/game`. The episode's total is their sum, which is the
    same for every winner of a zero-sum game.
    """

    def __init__(self, game: str, **options: Any) -> None:
        self.game = game
        self.options = options
        name = f"textarena:{game}"
        _probe(name, game, options, 2)
        seeds = range(1, 2 * _GAMES, 2)
        super().__init__(self.play, seeds, held_out=range(0, 2 * _GAMES, 2), name=name, roles=SEATS)

    async def play(self, base_url: str, task: int, seed: int, api_key: str) -> dict[str, float]:
        """Play the game with the seed `task`. Return the reward of each player, by role."""
        seats = [Http(role_url(base_url, seat), key=api_key) for seat in SEATS]
        talks: tuple[list[Any], list[Any]] = ([], [])
        game, done = Game(self.game, self.options, task, 2), False
        while not done:
            player, text = game.observation()
            talk = talks[player]
            talk.append({"role": "user", "content": text})
            body = {"model": "policy", "messages": talk}
            answer = await seats[player].call("POST", "/chat/completions", body)
            talk.append(answer["choices"][0]["message"])
            done = game.move(talk[-1]["content"] or "")
        rewards, _ = game.result()
        return {f"{seat}/game": float(rewards[player]) for player, seat in enumerate(SEATS)}


def _probe(name: str, game: str, options: Mapping[str, Any], players: int) -> None:
    """Raise `ConfigError` if a game does not exist, or is not for this number of players."""
    if game not in ENV_REGISTRY:
        raise ConfigError(f"textarena has no {game!r}{nearest(game, sorted(ENV_REGISTRY))}")
    try:
        Game(game, options, 0, players).observation()
    except _ERRORS as error:
        number = ("one player", "two players")[players - 1]
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"task.env {name!r} cannot be played by {number} here: {why}") from error


def tasks_of(game: str, **options: Any) -> TextArenaTasks | SelfPlay:
    """Return the tasks of a game for one player or for two.

    Raises `ConfigError` if the game can be played by neither number.
    """
    try:
        return TextArenaTasks(game, **options)
    except ConfigError as error:
        if game not in ENV_REGISTRY:
            raise
        try:
            return SelfPlay(game, **options)
        except ConfigError as other:
            raise ConfigError(f"{error}; {other}") from other


TASKSET = tasks_of
