"""States of the environments of a group, from which forked episodes continue."""

from collections.abc import Iterator
from typing import NamedTuple

from unstale.envs.hooks import EnvCaller
from unstale.records import Fork


class EnvState(NamedTuple):
    """The state of an episode's environment after one of its turns."""

    num_tokens: int
    """Number of tokens of the episode so far."""
    text: str
    """The state from which `Transcript.restore` continues, as JSON."""
    copy: EnvCaller | None
    """A copy of a `Forkable` environment, which answers no reply itself. None for others."""


class EnvStates:
    """The states of the environments of a group, after each turn of each episode.

    An environment is forked by a copy if it is `Forkable`, or else by a snapshot if it is
    `Resumable`. No others have states here: a new environment gets their replies again.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[EnvState]] = {}

    def add(self, episode: int, state: EnvState) -> None:
        self._of.setdefault(episode, []).append(state)

    def begin(self, episode: int, fork: Fork) -> EnvState | None:
        """Return the newest state before a fork, with which `episode` begins. None if there is
        none.
        """
        known = [each for each in self._of.get(fork.parent, ()) if each.num_tokens <= fork.at]
        self._of[episode] = known
        return known[-1] if known else None

    def copies(self) -> Iterator[EnvCaller]:
        """Yield each copy of an environment once. The caller must close them in the end."""
        found = (each.copy for states in self._of.values() for each in states)
        yield from {id(copy): copy for copy in found if copy}.values()
