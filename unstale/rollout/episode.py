"""engine x environment -> Trajectory.

A weight update interrupts generation; the same reply then continues from the same tokens under the next version.
A failed episode is data: begun again with the same seed, then reported. Any other failure ends the run.
"""

import asyncio
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import DEFAULT_OPTIONS, Engine, GenerationOptions, SamplingParams, Stopwatch
from unstale.envs import (
    Closable,
    Env,
    HasSimulatedDelays,
    Resumable,
    Taskset,
    Turn,
    combine_rewards,
)
from unstale.envs.chat import Chat
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    Group,
    GroupRequest,
    PendingPiece,
    Piece,
    Sampled,
    Stop,
    Task,
    Trajectory,
    count_turns,
)
from unstale.rollout.timeouts import PersistentTimeout

FAILED_LEAST, FAILED_WINDOW = 20, 100
"""Episodes over which the share of failures is judged: not before the first number, and the last of the second."""


class EpisodeFailed(Exception):
    """An environment broke in a named stage; the cause is its `__cause__`."""


class TooManyFailures(RuntimeError):
    """More episodes fail than the run allows."""


@contextmanager
def stage(name: str, timeout_s: float) -> Iterator[None]:
    """The one broad except: what environment code raises, or its time-out, becomes EpisodeFailed(name)."""
    patience = PersistentTimeout(timeout_s)
    try:
        with patience:
            yield
    except Exception as error:
        raise EpisodeFailed(name) from error
    except asyncio.CancelledError as error:
        if patience.task.cancelling():
            raise
        raise EpisodeFailed(
            name
        ) from error  # something inside the environment was cancelled, not this episode


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part.

    >>> derive_seed(0, "train", 1) == derive_seed(0, "train", 1) != derive_seed(0, "train", 2)
    True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Generator:
    """Where replies come from: an engine, how it samples, and how its tokens become messages."""

    engine: Engine
    chat: Chat
    config: EngineConfig

    def room(self, length: int) -> int:
        """Tokens the next reply may have after a context of `length`."""
        return min(self.config.max_completion_tokens, self.config.max_context - length)


GaveUp = Callable[[int, Failure, bool], None]
"""Told of a failed attempt: its episode number, what happened, and whether it was the last one."""


class EpisodeWriter(Protocol):
    """Where one attempt at an episode is written down while it happens."""

    def piece(self, position: int, piece: Piece) -> None: ...

    def snapshot(self, num_pieces: int, state: str) -> None: ...

    def ended(self, outcome: Trajectory | Failure) -> None: ...

    def restarted(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


Restarted = Callable[[int, Failure], None]
"""Told of an attempt whose environment did not replay: its episode number, and what it said instead."""
Begin = Callable[..., EpisodeWriter]
"""Told of an attempt that begins, as `(group number, sibling, episode=, seed=, again=)`; returns its page. `again` if
its page has been begun already."""


class NullWriter:
    """The page of an episode that nobody keeps."""

    def __init__(self, *_: int, episode: int, seed: int, again: bool = False) -> None: ...

    def piece(self, position: int, piece: Piece) -> None: ...

    def snapshot(self, num_pieces: int, state: str) -> None: ...

    def ended(self, outcome: Trajectory | Failure) -> None: ...

    def restarted(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


class Rollout:
    """Runs episodes. `arrived` is told of each piece the moment it comes back; `gave_up` of failed episodes."""

    def __init__(  # noqa: PLR0913 - three of them are who is told of what
        self,
        speaker: Generator,
        taskset: Taskset,
        config: RolloutConfig,
        *,
        arrived: Callable[[PendingPiece], None] = lambda piece: None,
        gave_up: GaveUp = lambda episode, failure, final: None,
        restarted: Restarted = lambda episode, failure: None,
    ) -> None:
        self.speaker = speaker
        self.taskset = taskset
        self.config = config
        self._arrived = arrived
        self._gave_up = gave_up
        self._restarted = restarted
        self._begun = 0
        self._outcomes: deque[bool] = deque(maxlen=FAILED_WINDOW)
        self.spent = Stopwatch("replies", "tools")
        self.door: AbstractAsyncContextManager[Any] = nullcontext()
        """What has to be open while episodes run."""
        self.quarantined: set[str] = set()
        """Keys of tasks that no attempt at an episode could finish: they are not to be handed out again."""

    def restore(
        self, episodes: int, quarantined: Iterable[str], outcomes: Iterable[bool] = ()
    ) -> None:
        """Go on after so many episodes, of which the last were finished or given up so."""
        self._begun, self.quarantined = episodes, set(quarantined)
        self._outcomes.extend(outcomes)

    async def group(self, handout: GroupRequest, *, size: int, begin: Begin = NullWriter) -> Group:
        """`size` siblings at once: the same task and environment seed, each with sampling noise of its own.

        Each goes on from its past, if it has one.
        """
        if handout.finished:
            return _group(handout, [past.outcome for past in handout.past])
        env_seed = derive_seed(handout.seed, handout.task.key)
        past = (*handout.past, *[None] * (size - len(handout.past)))
        async with asyncio.TaskGroup() as siblings:
            running = [
                siblings.create_task(
                    self.episode(
                        handout.task,
                        env_seed=env_seed,
                        noise_seed=derive_seed(env_seed, index),
                        begin=partial(begin, handout.number, index),
                        past=past[index],
                    )
                )
                for index in range(size)
            ]
        return _group(handout, [episode.result() for episode in running])

    async def episode(
        self,
        task: Task,
        *,
        env_seed: int,
        noise_seed: int,
        begin: Begin = NullWriter,
        past: EpisodeRecord | None = None,
    ) -> Trajectory | Failure:
        """One episode, begun again after a failure of its environment, `retries` times.

        One that has a past goes on from it. Where the environment does not say again what it said, the episode is
        begun anew; that is no failure, and is counted apart.
        """
        failures = past.failures if past else 0
        if (
            past
            and past.outcome
            and (isinstance(past.outcome, Trajectory) or failures > self.config.retries)
        ):
            return past.outcome
        while True:
            if past and past.outcome is None:
                script = _Script(
                    past.episode, begin(episode=past.episode, seed=noise_seed, again=True), past
                )
            else:
                script = _Script(self._begun, begin(episode=self._begun, seed=noise_seed))
                self._begun += 1
            script.begin = begin
            past = None
            try:
                trajectory = await self._attempt(script, task, (env_seed, noise_seed))
            except EpisodeFailed as failed:
                failure = _describe(failed, task, script.said)
                if script.replaying:
                    script.page.restarted(
                        f"{failure.stage}: {failure.error}",
                        turns=failure.turns,
                        sampled_tokens=failure.sampled_tokens,
                    )
                    self._restarted(script.episode, failure)
                    continue
                script.page.ended(failure)
                failures += 1
                final = failures > self.config.retries
                self._gave_up(script.episode, failure, final)
                if final:
                    self.quarantined.add(task.key)
                    self._judge(failure)
                    return failure
            else:
                script.page.ended(trajectory)
                self._outcomes.append(True)
                return trajectory
            finally:
                if isinstance(script.env, Closable):
                    await script.env.close()

    async def _attempt(self, script: "_Script", task: Task, seeds: tuple[int, int]) -> Trajectory:
        """begin, then reply and step by turns, until the environment or a limit ends it."""
        env_seed, noise_seed = seeds
        chat, timeout_s = self.speaker.chat, self.config.timeout_s
        turn_rewards: list[float] = []
        with stage("begin", timeout_s):
            env = script.pose(self.taskset.env(task, env_seed))
            turn = await script.resume(turn_rewards)
            if turn is None:
                turn = await env.begin()
                script.give(ContextPiece(chat.encode_prompt(turn.messages)))
                script.keep(turn_rewards)
        if self.speaker.room(len(script.text)) < 1:
            raise ValueError(
                f"the opening prompt of {task.key} has {len(script.text)} tokens, engine.max_context is "
                f"{self.speaker.config.max_context}: no reply fits; raise engine.max_context"
            )
        stop: Stop = "done"
        while not turn.done:
            if len(turn_rewards) == self.config.max_turns:
                stop = "max_turns"
                break
            if self.speaker.room(len(script.text)) < 1:
                stop = "max_tokens"
                break
            reply, ended = await self.spent.on("replies", self._speak(script, noise_seed))
            if script.pretending is not None:
                script.pretending.replaying = script.replaying
            with stage(f"step {len(turn_rewards) + 1}", timeout_s):
                turn = combine_rewards(
                    self.taskset, await self.spent.on("tools", env.step(chat.parse(reply)))
                )
                turn_rewards.append(turn.reward)
                if not turn.done:
                    script.give(ContextPiece(chat.encode_continuation(turn.messages, ended=ended)))
                    script.keep(turn_rewards)
        script.require_end()
        return _finish(
            script.pieces,
            turn,
            turn_rewards,
            Trajectory((), {}, stop, task, noise_seed, script.episode),
        )

    async def _speak(
        self,
        script: "_Script",
        seed: int,
        how: GenerationOptions = DEFAULT_OPTIONS,
        *,
        since: int | None = None,
    ) -> tuple[list[int], bool]:
        """One reply, over as many versions as it takes. Its tokens, and whether it ended by a stop token.

        `since` is the piece that it begins with, where some of it has been said before.
        """
        before = script.pieces[since:] if since is not None else ()
        spoken = [token for piece in (*before, *script.reply()) for token in piece.tokens]
        room = min(self.speaker.room(len(script.text) - len(spoken)), how.max_tokens)
        stop_tokens = self.speaker.chat.stop_tokens
        while True:
            if spoken and (spoken[-1] in stop_tokens or len(spoken) >= room or how.is_over(spoken)):
                return spoken, spoken[-1] in stop_tokens
            script.require_end()
            params = SamplingParams(
                max_tokens=min(room - len(spoken), how.chunk),
                stop_tokens=stop_tokens,
                temperature=self.speaker.config.temperature,
                seed=seed,
            )
            reply = await self.speaker.engine.sample(script.text, params)
            if reply.piece.tokens:
                start, cut = len(script.text), how.cut(spoken, reply.piece)
                spoken.extend(cut.tokens)
                script.say(cut)
                self._arrived(PendingPiece(script.episode, script.text, start, cut))
            if reply.stop == "length" and len(reply.piece.tokens) < params.max_tokens:
                return spoken, False

    def _judge(self, failure: Failure) -> None:
        """Count a failure; too many of them are the machinery's problem."""
        self._outcomes.append(False)
        failed = self._outcomes.count(False)
        if len(self._outcomes) >= FAILED_LEAST and failed > self.config.max_failed_share * len(
            self._outcomes
        ):
            raise TooManyFailures(
                f"{failed} of the last {len(self._outcomes)} episodes failed, more than rollout.max_failed_share = "
                f"{self.config.max_failed_share:g} allows; the last one in {failure.stage}: {failure.error}"
            )


class NotReplayed(Exception):
    """An environment says something else than what is recorded of it."""


class _Script:
    """What was said in an attempt so far. Its page is told of each piece before anybody else.

    With a past, the environment is asked again and has to say the same, until what is recorded has been said.
    """

    def __init__(
        self, episode: int, page: EpisodeWriter, past: EpisodeRecord | None = None
    ) -> None:
        self.episode = episode
        self.page = page
        self.pieces: list[Piece] = []
        self.text: list[int] = []
        """The tokens of all pieces. It only ever grows."""
        self.past = past
        self.begin: Begin = NullWriter
        self.env: Env | None = None
        self.pretending: HasSimulatedDelays | None = None
        self.branches: list[_Script] = []
        """What else is said in the attempt, in contexts of its own."""
        self._recorded = deque(past.pieces if past else ())
        self._snapshot = past.snapshot if past else None
        self._resumable: Resumable | None = None

    @property
    def replaying(self) -> bool:
        """Whether there is more on record than was said again."""
        return bool(self._recorded) or any(branch.replaying for branch in self.branches)

    @property
    def said(self) -> list[Piece]:
        """All pieces there are."""
        return [*self.pieces, *self._recorded]

    def pose(self, env: Env) -> Env:
        """The attempt's environment. What it can do is asked once: Python takes as long for that as for half a turn."""
        self.env = env
        self.pretending = env if isinstance(env, HasSimulatedDelays) else None
        self._resumable = env if isinstance(env, Resumable) else None
        return env

    async def resume(self, turn_rewards: list[float]) -> Turn | None:
        """Put the environment where its snapshot was made. None if there is none."""
        if self._snapshot is None or self._resumable is None:
            return None
        count, state = self._snapshot
        rewards, own = json.loads(state)
        await self._resumable.resume(own)
        turn_rewards.extend(rewards)
        for _ in range(count):
            self._again()
        return Turn(())

    def keep(self, turn_rewards: Sequence[float]) -> None:
        """Write the environment down, if it can be and was not."""
        if self._resumable is not None and not self._recorded:
            self.page.snapshot(
                len(self.pieces), json.dumps([list(turn_rewards), self._resumable.snapshot()])
            )

    def give(self, piece: ContextPiece) -> None:
        """What the environment says."""
        if self._recorded:
            told = self._recorded[0]
            if told != piece:
                raise NotReplayed(
                    f"piece {len(self.pieces)} has other tokens than the {len(told.tokens)} on record"
                )
            self._again()
            return
        self.say(piece)

    def reply(self) -> Iterator[Sampled]:
        """What is on record of the reply that comes next."""
        while self._recorded and isinstance(piece := self._recorded[0], Sampled):
            self._again()
            yield piece

    def require_end(self) -> None:
        """Raises unless everything on record was said again."""
        if self._recorded:
            raise EpisodeFailed("replay") from NotReplayed(
                f"{len(self._recorded)} pieces on record were not asked for"
            )

    def say(self, piece: Piece) -> None:
        self.page.piece(len(self.pieces), piece)
        self._add(piece)

    def _again(self) -> None:
        self._add(self._recorded.popleft())

    def _add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.text.extend(piece.tokens)


class Progress(Protocol):
    """Told what the run is busy with, and how far it got."""

    def __call__(self, text: str, *, done: int = 0, total: int = 0) -> None: ...


async def examine(
    rollout: Rollout, tasks: Sequence[Task], *, seed: int, progress: Progress
) -> list[bool | None]:
    """Success on each task, one episode each; None where that failed, which counts as no success.

    The environment's seed is the task's own: `seed` varies the replies. A task that stands there several
    times is attempted as often, with other replies.
    """
    done, stood = 0, Counter[str]()

    async def grade(task: Task, attempt: int) -> bool | None:
        nonlocal done
        first = derive_seed(seed, "examination", task.key)
        noise_seed = derive_seed(first, attempt) if attempt else first
        outcome = await rollout.episode(
            task, env_seed=derive_seed("examination", task.key), noise_seed=noise_seed
        )
        done += 1
        progress("held-out tasks", done=done, total=len(tasks))
        return outcome.success if isinstance(outcome, Trajectory) else None

    async with asyncio.TaskGroup() as group:
        running = []
        for task in tasks:
            running.append(group.create_task(grade(task, stood[task.key])))
            stood[task.key] += 1
    return [task.result() for task in running]


def _group(handout: GroupRequest, results: Sequence[Trajectory | Failure | None]) -> Group:
    return Group(
        task=handout.task,
        trajectories=tuple(result for result in results if isinstance(result, Trajectory)),
        failures=tuple(result for result in results if isinstance(result, Failure)),
        number=handout.number,
    )


def _length(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)


def _finish(
    pieces: list[Piece], turn: Turn, turn_rewards: list[float], blank: Trajectory
) -> Trajectory:
    rewards = dict(turn.rewards) if turn.done else {}
    spoken = tuple(turn_rewards) if any(turn_rewards) else ()
    return replace(
        blank, pieces=tuple(pieces), rewards=rewards, turn_rewards=spoken, facts=dict(turn.facts)
    )


def _describe(failed: EpisodeFailed, task: Task, pieces: Sequence[Piece]) -> Failure:
    cause = failed.__cause__
    sampled = [piece for piece in pieces if isinstance(piece, Sampled)]
    return Failure(
        task=task,
        stage=str(failed),
        error=f"{type(cause).__name__}: {cause}",
        turns=count_turns(pieces),
        sampled_tokens=_length(sampled),
    )


def require_finished(groups: Sequence[Group]) -> Sequence[Group]:
    """These groups. Raises `TooManyFailures` when no episode of a batch was finished: there is nothing to train on."""
    failures = [failure for group in groups for failure in group.failures]
    if failures and not any(group.trajectories for group in groups):
        raise TooManyFailures(
            f"all {len(failures)} episodes of a batch failed; the last one in {failures[-1].stage}: "
            f"{failures[-1].error}"
        )
    return groups


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """What the consumed groups were like, as metrics. Failed episodes are counted, never hidden."""
    finished = [trajectory for group in groups for trajectory in group.trajectories]
    failures = sum(len(group.failures) for group in groups)
    facts = {name for trajectory in finished for name in trajectory.facts}

    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(len(finished), 1)

    return {
        "rollout/episodes": len(finished),
        "rollout/failed": failures,
        "rollout/success": mean(trajectory.success for trajectory in finished),
        "rollout/reward_mean": mean(trajectory.reward for trajectory in finished),
        "rollout/turns_mean": mean(trajectory.num_turns for trajectory in finished),
        "rollout/tokens_mean": mean(len(trajectory) for trajectory in finished),
        "rollout/sampled_tokens": sum(
            one.num_sampled for whole in finished for one in (whole, *whole.branches)
        ),
        "rollout/cut_short_share": mean(trajectory.stop != "done" for trajectory in finished),
        "rollout/uniform_groups_share": sum(
            len({t.reward for t in group.trajectories}) <= 1 for group in groups
        )
        / max(len(groups), 1),
        **{
            f"env/{name}": mean(t.facts.get(name, 0.0) for t in finished)
            for name in sorted(facts - {"success"})
        },
    }
