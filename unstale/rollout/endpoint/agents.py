"""Episodes of agents that ask by themselves: an agent gets an address, and what it says there becomes trajectories."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from unstale.engines import GenerationOptions
from unstale.envs import EnvError, Turn, combine_rewards
from unstale.envs.external import ExternalEnv
from unstale.records import ContextPiece, Failure, Piece, Sampled, Task, Trajectory, count_turns
from unstale.rollout.endpoint.conversation import Fork
from unstale.rollout.endpoint.server import Endpoint
from unstale.rollout.endpoint.session import NotAgain, Script, Session
from unstale.rollout.episode import (
    EpisodeFailed,
    EpisodeWriter,
    NotReplayed,
    NullWriter,
    Rollout,
    _Script,
    derive_seed,
    stage,
)


class AgentRollout(Rollout):
    """`Rollout` whose episodes are agents behind the endpoint, its `door`. `told` hears of every fork."""

    def __init__(
        self,
        *parts: Any,
        endpoint: Endpoint,
        told: Callable[..., None] = lambda kind, **_: None,
        **options: Any,
    ) -> None:
        super().__init__(*parts, **options)
        self.door = self.endpoint = endpoint
        self.told = told

    async def _attempt(self, script: _Script, task: Task, seeds: tuple[int, int]) -> Trajectory:
        """The agent's own course, until it says what it was worth."""
        env_seed, noise_seed = seeds
        env = cast(ExternalEnv, self.taskset.env(task, env_seed))
        blank = Trajectory((), {}, "done", task, noise_seed)
        failed, verdict = None, Turn(())
        async with env.slot, asyncio.TaskGroup() as calls:
            voice = AgentGenerator(self, script, noise_seed)
            session = Session(
                voice, calls, voice.recorded(), self.config.timeout_s, passed=self.spent.add
            )
            try:
                with stage("agent", env.timeout_s), self.endpoint.opened(session) as address:
                    async with session.watched():
                        verdict = combine_rewards(
                            self.taskset, await env.drive(address, self.endpoint.token)
                        )
            except EpisodeFailed as error:
                failed = error
        try:
            return _course(
                script,
                session,
                replace(blank, rewards=verdict.rewards, facts=verdict.facts),
                failed,
            )
        except EpisodeFailed as error:
            for branch in script.branches:
                self._gave_up(branch.episode, _lost(error, task, branch.said), False)
            raise
        finally:
            failed = None  # its traceback holds this frame, and so all of the attempt

    def number_episode(self) -> int:
        """For a branch, which is written down as an episode of its own."""
        self._begun += 1
        return self._begun - 1


def _course(
    script: _Script, session: Session, blank: Trajectory, failed: EpisodeFailed | None
) -> Trajectory:
    """What was said, with its branches. An agent that fails after a limit refused it has come to its end."""
    if session.broken:
        raise EpisodeFailed("replay") from session.broken
    if failed and session.stop == "done":
        try:
            raise failed
        finally:
            del failed  # as its traceback holds this frame
    scripts = (script, *script.branches)
    for one in scripts:
        one.require_end()
    spoken = [one for one in scripts if any(isinstance(piece, Sampled) for piece in one.pieces)]
    if not spoken:
        raise EpisodeFailed("agent") from EnvError("it ended without an answer to any call")
    stop = session.stop if failed else "done"
    blank = replace(blank, stop=stop, facts={**blank.facts, "branches": float(len(spoken) - 1)})
    also = []
    for number, branch in enumerate(script.branches, 1):
        if branch in spoken:
            seed = _noise(blank.seed, number)
            also.append(
                replace(blank, pieces=tuple(branch.pieces), seed=seed, episode=branch.episode)
            )
            branch.page.ended(also[-1])
    whole = replace(
        blank, pieces=tuple(script.pieces), episode=script.episode, branches=tuple(also)
    )
    if script not in spoken:  # it is written down as it was, and a branch is what becomes of it
        script.page.ended(whole)
        script.page = NullWriter(episode=script.episode, seed=blank.seed)
    return whole.led()


def _noise(seed: int, number: int) -> int:
    """The seed of a branch. The first has the episode's."""
    return derive_seed(seed, "branch", number) if number else seed


def _lost(failed: EpisodeFailed, task: Task, pieces: Sequence[Piece]) -> Failure:
    sampled = sum(len(piece.tokens) for piece in pieces if isinstance(piece, Sampled))
    return Failure(
        task, str(failed), "the attempt that it is a branch of failed", count_turns(pieces), sampled
    )


class AgentGenerator:
    """What a session speaks with: `Rollout._speak`, a script a branch, and noise of its own for each."""

    def __init__(self, rollout: AgentRollout, script: _Script, seed: int) -> None:
        self.chat = rollout.speaker.chat
        self.temperature = rollout.speaker.config.temperature
        self.max_turns = rollout.config.max_turns
        self.room = rollout.speaker.room
        self._rollout, self._script, self._seed = rollout, script, seed

    def recorded(self) -> list[Script]:
        """Every branch that an earlier life has written down, the first one also when it is new."""
        for number, past in enumerate(self._script.past.branches if self._script.past else (), 1):
            begin = partial(
                self._script.begin, episode=past.episode, seed=self._noise(number), again=True
            )
            page = _BranchPage(begin, ended=past.outcome is not None)
            self._script.branches.append(_Script(past.episode, page, past))
        return [self._script, *self._script.branches]

    def begin(self, number: int) -> Script:
        episode = self._rollout.number_episode()
        page = _BranchPage(partial(self._script.begin, episode=episode, seed=self._noise(number)))
        self._script.branches.append(_Script(episode, page))
        return self._script.branches[-1]

    def give(self, script: Script, pieces: Sequence[ContextPiece]) -> None:
        with _again():
            for piece in pieces:
                cast(_Script, script).give(piece)

    async def speak(
        self, script: Script, number: int, how: GenerationOptions, since: int
    ) -> tuple[list[int], bool]:
        with _again():
            return await self._rollout._speak(
                cast(_Script, script), self._noise(number), how, since=since
            )

    def forked(self, script: Script, parent: Script, fork: Fork) -> None:
        if not cast(_Script, script).replaying:
            told = {"at": fork.at, "shared_replies": fork.exchanges, "reason": fork.reason}
            self._rollout.told("forked", episode=script.episode, parent=parent.episode, **told)

    def _noise(self, number: int) -> int:
        return _noise(self._seed, number)


@contextmanager
def _again() -> Iterator[None]:
    """Calls that are not those on record are no error of the call."""
    try:
        yield
    except (NotReplayed, EpisodeFailed) as error:
        raise NotAgain(str(error)) from error.__cause__ or error


class _BranchPage:
    """The page of a branch, begun with its first reply: one without any is not written down."""

    def __init__(self, begin: Callable[[], EpisodeWriter], *, ended: bool = False) -> None:
        self._begin = begin
        self._page: EpisodeWriter | None = None
        self._waiting: list[tuple[int, Piece]] = []
        self._ended = ended

    def piece(self, position: int, piece: Piece) -> None:
        self._waiting.append((position, piece))
        if self._page is None and isinstance(piece, ContextPiece):
            return
        self._page = self._page or self._begin()
        for place, held in self._waiting:
            self._page.piece(place, held)
        self._waiting.clear()

    def snapshot(self, num_pieces: int, state: str) -> None:
        """An agent has none."""

    def ended(self, outcome: Trajectory | Failure) -> None:
        if not self._ended and not self._page:
            self._page = self._begin()
        if self._page and not self._ended:
            self._page.ended(outcome)

    def restarted(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        """The attempt is, not the branch."""
