"""Episodes: the policy and an environment alternate until the environment or a limit ends them.

A weight update interrupts generation. The reply then continues from the same tokens under the next
version. An episode whose environment fails is repeated with the same seed. If it fails again, it is
counted as failed. Any other error ends the run.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from unstale.config import RolloutConfig
from unstale.engines import Stopwatch
from unstale.envs import (
    Closable,
    EnvError,
    HasSimulatedDelays,
    HasTaskTools,
    HasWorker,
    Message,
    Resumable,
    RewardCombiner,
    Taskset,
    Turn,
    combine_rewards,
    implements,
)
from unstale.envs.chat import Chat, context_piece
from unstale.envs.guard import (
    CANCEL_INTERVAL_S,
    MAX_HUNG,
    OCCUPANCY,
    Watched,
    abandon,
    describe,
    describe_apart,
    num_hung,
)
from unstale.envs.hooks import EnvCaller, Identities, call_hook, is_own, make_env, with_place
from unstale.envs.notes import with_note
from unstale.envs.tokens import LONG_REPLY_TOKENS
from unstale.records import (
    CUT_REPLIES,
    NO_BUDGET,
    EpisodeBudget,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    PendingPiece,
    Piece,
    Sampled,
    Stop,
    Task,
    Trajectory,
    TurnLimit,
    count_cut_replies,
    count_turns,
)
from unstale.rollout import More, no_more
from unstale.rollout.failures import FailureLimit, TooManyFailures
from unstale.rollout.generator import Generator
from unstale.rollout.rounds import NO_FORK, Pruned, Rounds, Start
from unstale.rollout.seeds import derive_seed
from unstale.rollout.segments import BudgetUse, EpisodeSlot, EpisodeSlots
from unstale.rollout.timeouts import Attempt, PersistentTimeout
from unstale.rollout.transcript import NotReplayed, NullWriter, OpenWriter, Transcript
from unstale.rollout.turn_limit import AllowedTurns
from unstale.stop_signals import SecondSignal
from unstale.threads import in_thread

OnFailure = Callable[[int, Failure, bool], None]
"""A function `(episode, failure, is_last)`, called after a failed attempt at the episode with this
number. `is_last` is True if the episode is not tried again.
"""
OnRestart = Callable[[int, Failure], None]
"""A function `(episode, failure)`, called when a resumed episode starts again from its beginning,
because its environment did not repeat the recorded text.
"""
OnBlocked = Callable[[str, float], None]
"""A function `(name, seconds)`, called when the user's code `name` has blocked the event loop for
this many seconds, and again each time this duration doubles.
"""

CLOSE_S = 5.0
"""Seconds within which `close` of an environment must return."""
ENTER_S = 120.0
"""Seconds within which `__aenter__` of a task set must return. It may start servers."""
EXIT_S = 30.0
"""Seconds within which `__aexit__` of a task set must return. It may stop servers."""


class EpisodeFailed(Exception):
    """Error: the code of an environment failed or took too long.

    The text names the stage of the episode, such as "begin" or "step 2". `__cause__` is the
    original error.
    """


@contextmanager
def stage(name: str, timeout_s: float) -> Iterator[PersistentTimeout]:
    """Return a context that turns errors and time-outs of environment code into `EpisodeFailed`.

    `name` is the stage named in the error. SystemExit and similar exceptions of this code are
    included. The cancellation of the episode and the end of the program are raised unchanged.
    """
    timeout = PersistentTimeout(timeout_s)
    task = timeout.task
    if isinstance(task, Attempt):
        task.stage = name
    try:
        with timeout:
            yield timeout
    except EpisodeFailed:
        raise  # an inner context has already named the stage
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            raise
        if isinstance(error, SecondSignal):
            raise
        if isinstance(error, GeneratorExit) and not _is_current(task):
            # The event loop ends and closes the coroutine. A CancelledError here comes from inside
            # the environment, not from this episode.
            raise
        # A CancelledError here is of something inside the environment, not of this episode.
        raise EpisodeFailed(name) from error
    else:
        if isinstance(task, Attempt) and task.ending:
            raise asyncio.CancelledError("the environment ignored an earlier cancellation")
    finally:
        del task, timeout  # the task holds the error, whose traceback refers to this frame


def _is_current(task: asyncio.Task[Any]) -> bool:
    with suppress(RuntimeError):  # no event loop is running
        return asyncio.current_task() is task
    return False


class Rollout:
    """Runs episodes of the policy in the environments of a task set.

    `on_piece` is called with newly sampled tokens, as soon as they are known. `on_end` is called
    with the number of each episode that has ended with a trajectory, and of each further
    conversation of its agent.
    """

    def __init__(  # noqa: PLR0913 - five of them are callbacks
        self,
        generator: Generator,
        taskset: Taskset,
        config: RolloutConfig,
        *,
        on_piece: Callable[[PendingPiece], None] = lambda piece: None,
        on_end: Callable[[int], None] = lambda episode: None,
        on_failure: OnFailure = lambda episode, failure, final: None,
        on_restart: OnRestart = lambda episode, failure: None,
        on_blocked: OnBlocked = lambda name, seconds: None,
        slots: EpisodeSlots | None = None,
        deterministic: bool = False,
    ) -> None:
        """Create a rollout.

        `slots` limits how many episodes are active at once, if episodes run in segments, between
        which they may pause.
        """
        self.generator = generator
        self.taskset = taskset
        self.roles: Sequence[str] = getattr(taskset, "roles", ())
        """Roles of the policy in an episode. The main conversation has the first one."""
        self.config = config
        self.turn_limit: TurnLimit | None = None
        """A limit of turns for the episodes that `episode` runs, and for those of a server."""
        self.on_piece = on_piece
        self.on_end = on_end
        self.on_failure = on_failure
        self.on_restart = on_restart
        self._on_blocked = on_blocked
        self._slots = slots
        self._deterministic = deterministic
        self._longest_blocked: dict[str, float] = {}
        self.wait_times = Stopwatch(
            "generation_wait", "tool_wait", *(["slot_wait"] if slots else [])
        )
        self._taskset_name = getattr(taskset, "name", type(taskset).__name__)
        self._identities = Identities(taskset)
        self._has_tools = implements(taskset, HasTaskTools)
        self._combines = implements(taskset, RewardCombiner)
        self.resources: AbstractAsyncContextManager[Any] = (
            _Opened(taskset, self._taskset_name)
            if isinstance(taskset, AbstractAsyncContextManager)
            else nullcontext()
        )
        """A context that must be open while episodes run. It opens and closes the task set, if that
        has such methods.
        """
        self.quarantined: set[str] = set()
        """Identities of tasks with an episode that failed in every attempt. No further episodes are
        started on these tasks.
        """
        self._num_episodes = 0
        self._failures = FailureLimit(config.max_failed_share)

    def restore(
        self, episodes: int, quarantined: Iterable[Task], failed_shares: Iterable[float] = ()
    ) -> None:
        """Restore the counts of a resumed run: episodes begun so far, and failures.

        `quarantined` are the tasks that failed too often and are not used again. `failed_shares`
        are the shares of failed episodes in the last groups, in the order in which the groups
        started.
        """
        self._num_episodes = episodes
        self.quarantined = {self._identities(task) for task in quarantined}
        self._failures.restore(failed_shares)

    def next_episode(self) -> int:
        """Return the number for a new episode, and count the episode."""
        self._num_episodes += 1
        return self._num_episodes - 1

    async def group(
        self,
        request: GroupRequest,
        *,
        size: int,
        open_writer: OpenWriter = NullWriter,
        more: More = no_more,
        rounds: Rounds | None = None,
    ) -> Group:
        """Run `size` episodes of one task concurrently, and return them as a group.

        Episodes that were recorded before a resume continue from their record. If there are more
        records than `size`, all of them continue. When all episodes have ended, `more` returns an
        element for each further episode to run, until it returns none: the place at which the
        episode is forked from an earlier one, or None for one that starts anew.

        `rounds` fork and prune the episodes while they run. Then `more` is not called, and an
        episode that has passed a place of decision is not repeated if its environment fails.

        All episodes use the same environment seed and different sampling noise. `open_writer` is
        called with the number of the group and the index of the episode in the group, and opens the
        journal's record. Raises `TooManyFailures` if the share of failed episodes is too large.
        """
        if request.finished:
            return _group(request, [record.outcome for record in request.past])
        results: list[Trajectory | Failure] = []
        # More than `size` if episodes were added to the group before a resume.
        forks = [record.fork for record in request.past]
        forks += [None] * (size - len(forks))
        number = self._failures.begin()
        try:
            if rounds:
                results = await self._in_rounds(request, size, open_writer, rounds)
                forks = [None] * len(results)
            while len(results) < len(forks):
                starts = _starts(request, results, forks)
                indices = range(len(results), len(forks))
                past = enumerate(request.past)
                records = {index: record for index, record in past if index in indices}
                results += await self.run_episodes(
                    request, indices, records, open_writer, starts=starts
                )
                forks += await more(results)
            self._failures.count(number, results)
        finally:
            self._failures.end(number)
        return _group(request, results)

    async def _in_rounds(
        self, request: GroupRequest, size: int, open_writer: OpenWriter, rounds: Rounds
    ) -> list[Trajectory | Failure]:
        records = dict(enumerate(request.past))

        async def episode(index: int, start: Start) -> Trajectory | Failure:
            return await self._tried(request, index, records.get(index), open_writer, start)

        return await rounds.run(episode, request.sizes[0] if request.sizes else size)

    async def run_episodes(
        self,
        request: GroupRequest,
        indices: Sequence[int],
        records: Mapping[int, EpisodeRecord],
        open_writer: OpenWriter,
        *,
        starts: Mapping[int, Start] = MappingProxyType({}),
    ) -> list[Trajectory | Failure]:
        """Run the episodes of a group with these indices concurrently.

        Return their results in the same order. `records` has, by index, what was recorded of
        episodes that began before a resume. They continue from there. `starts` has the beginnings
        of forked episodes. If an episode fails, its task is not used again.
        """
        async with asyncio.TaskGroup() as siblings:
            running = [
                siblings.create_task(
                    self._tried(
                        request, index, records.get(index), open_writer, starts.get(index, NO_FORK)
                    )
                )
                for index in indices
            ]
        return [episode.result() for episode in running]

    async def _tried(
        self,
        request: GroupRequest,
        index: int,
        record: EpisodeRecord | None,
        open_writer: OpenWriter,
        start: Start,
    ) -> Trajectory | Failure:
        """Run the episode with this index in its group. If it fails, its task is not used again."""
        outcome = await self._sibling(request, index, record, open_writer, start)
        if isinstance(outcome, Failure):
            await self.quarantine(request.task)
        return outcome

    async def quarantine(self, task: Task) -> None:
        """Start no further episodes of this task."""
        self.quarantined.add(await self._identities.find(task))

    def _sibling(
        self,
        request: GroupRequest,
        index: int,
        record: EpisodeRecord | None,
        open_writer: OpenWriter,
        start: Start,
    ) -> Coroutine[Any, Any, Trajectory | Failure]:
        """Return a coroutine that runs the episode with this index in its group.

        If episodes run in segments, it first waits until the episode may run (`EpisodeSlots`).
        """
        slot = None
        if self._slots and request.budget.segments:
            age = (request.number, index)
            slot = EpisodeSlot(self._slots, age, partial(self.wait_times.add, "slot_wait"))
        env_seed = derive_seed(request.seed, request.task.key)
        episode = partial(
            self._episode,
            request.task,
            env_seed=env_seed,
            noise_seed=derive_seed(env_seed, index) if start.seed is None else start.seed,
            open_writer=partial(open_writer, request.number, index),
            record=record,
            start=start,
            limit=request.turn_limit,
            budget=request.budget,
            slot=slot,
        )
        return _in_slot(slot, episode) if slot else episode()

    async def episode(
        self,
        task: Task,
        *,
        env_seed: int,
        noise_seed: int,
        open_writer: OpenWriter = NullWriter,
        record: EpisodeRecord | None = None,
    ) -> Trajectory | Failure:
        """Run one episode as a group of its own.

        Return its trajectory, or the failure of its last attempt. Raises `TooManyFailures` if the
        episode fails and the share of failed episodes is too large.
        """
        number = self._failures.begin()
        try:
            outcome = await self._episode(
                task,
                env_seed=env_seed,
                noise_seed=noise_seed,
                open_writer=open_writer,
                record=record,
                limit=self.turn_limit,
            )
            self._failures.count(number, [outcome])
        finally:
            self._failures.end(number)
        return outcome

    async def _episode(  # noqa: PLR0913 - two of them are seeds
        self,
        task: Task,
        *,
        env_seed: int,
        noise_seed: int,
        open_writer: OpenWriter = NullWriter,
        record: EpisodeRecord | None = None,
        start: Start = NO_FORK,
        limit: TurnLimit | None = None,
        budget: EpisodeBudget = NO_BUDGET,
        slot: EpisodeSlot | None = None,
    ) -> Trajectory | Failure:
        """Run one episode. If its environment fails, repeat the episode up to `retries` times.

        An episode with a record continues from there. If the environment does not produce the
        recorded text again, the episode starts from the beginning, or from its fork. This does not
        count as a failure, unless the text before the fork differs. `start` is the place of the
        fork and the tokens before it. `limit` is a technique's limit of the episode's turns. Each
        attempt may use the whole `budget`. Between two segments, the episode lets other episodes
        run (`slot`). After a place of decision, an episode is not repeated.
        """
        fork, prefix, looks, _ = start
        failures = record.failures if record else 0
        if record and record.outcome:
            if looks:
                await looks.repeat(record)
            if looks and looks.visited:
                return record.outcome
            if isinstance(record.outcome, Trajectory) or failures > self.config.retries:
                return record.outcome
            record = None
        num_given = sum(len(piece.tokens) for piece in prefix)
        while True:
            number = record.episode if record else self.next_episode()
            transcript = Transcript(
                number,
                noise_seed,
                open_writer,
                record=record,
                on_piece=self.on_piece,
                fork=fork,
                prefix=prefix,
                role=next(iter(self.roles), ""),
                looks=looks,
            )
            past, record = record, None
            try:
                trajectory = await _outcome(
                    Attempt(
                        self.attempt(transcript, task, env_seed, limit, BudgetUse(budget, slot))
                    )
                )
            except (EpisodeFailed, NotReplayed) as error:
                failure = failure_of(
                    error, task, transcript.all_pieces, await self._describe(error, task)
                )
                OCCUPANCY.require_few_interruptions()
                reason = "the attempt that it is a branch of failed"
                of_branches = [
                    (each.episode, failure_of(error, task, each.all_pieces, reason))
                    for each in transcript.branches
                ]
            else:
                transcript.write_outcome(trajectory)
                for each in (transcript, *transcript.branches):
                    self.on_end(each.episode)
                return trajectory
            if looks and past and looks.is_recorded:
                await looks.repeat(past)  # it failed before the places of its recorded decisions
            decided = looks is not None and looks.visited > 0
            if not decided and transcript.replaying and len(transcript.tokens) >= num_given:
                transcript.writer.write_restart(
                    f"{failure.stage}: {failure.error}",
                    turns=failure.turns,
                    sampled_tokens=failure.sampled_tokens,
                )
                for branch, lost in of_branches:
                    self.on_restart(branch, lost)
                self.on_restart(number, failure)
                continue
            transcript.write_outcome(failure)
            for branch, lost in of_branches:
                self.on_failure(branch, lost, False)
            failures += 1
            final = decided or failures > self.config.retries
            self.on_failure(number, failure, final)
            _require_few_hung(failure)
            if final:
                return failure

    async def _describe(self, error: EpisodeFailed | NotReplayed, task: Task) -> str:
        """Return the text of an error. It is made in a thread, because the user's code may make it.

        A deterministic run makes it without a thread, because a call in a thread takes virtual
        time.
        """
        cause = (isinstance(error, EpisodeFailed) and error.__cause__) or error
        text = describe(cause) if self._deterministic else await describe_apart(cause)
        return await with_place(text, self.taskset, task)

    async def attempt(
        self,
        transcript: Transcript,
        task: Task,
        env_seed: int,
        limit: TurnLimit | None,
        budget_use: BudgetUse,
    ) -> Trajectory:
        """Run one attempt at an episode and return its trajectory.

        Raises `EpisodeFailed` if the environment fails, and `NotReplayed` if it does not repeat a
        recorded text.
        """
        async with _OpenEnvironment() as opened:
            with stage("begin", self.config.timeout_s) as timeout:
                fork = transcript.fork
                chat = await self.chat(task)
                if fork and fork.writes:
                    chat = chat.with_tools(())
                caller = opened.caller = await self.make_env(task, env_seed, fork)
                if HasWorker in caller.kinds and (start := caller.env.worker_start()):
                    await timeout.without_limit(start)
                turn, turn_rewards = await self._begin(transcript, caller, chat)
            begins = not turn_rewards  # else the context after a restored snapshot may be full
            if begins and self.generator.reply_budget(len(transcript.tokens)) < 1:
                raise EnvError(
                    f"the opening prompt of {task.key} has {len(transcript.tokens)} tokens, "
                    f"engine.max_context is {self.generator.config.max_context}: no reply fits; "
                    "raise engine.max_context"
                )
            if begins and budget_use.reply_limit(len(transcript.tokens)) < 1:
                raise EnvError(
                    f"the opening prompt of {task.key} has {len(transcript.tokens)} tokens, and an "
                    f"episode may have {budget_use.budget.context}: no reply fits; raise the steps "
                    "of segments.table"
                )
            budget_use.replay(transcript.pieces, chat)
            turn, stop = await self._take_turns(
                transcript, caller, chat, (turn, turn_rewards), limit, budget_use
            )
        transcript.require_replayed()
        # the rewards of replies before a fork belong to the episode that sampled them
        own_rewards = turn_rewards[len(turn_rewards) - count_turns(transcript.pieces) :]
        num_cut = count_cut_replies(transcript.pieces, chat.stop_tokens)
        cut = {CUT_REPLIES: float(num_cut)} if num_cut else {}
        return Trajectory(
            pieces=tuple(transcript.pieces),
            rewards=dict(turn.rewards),
            stop=stop,
            task=task,
            seed=transcript.seed,
            episode=transcript.episode,
            turn_rewards=tuple(own_rewards) if any(own_rewards) else (),
            facts={**turn.facts, **budget_use.facts(), **cut, **transcript.weight()},
            fork=transcript.fork,
        )

    async def make_env(self, task: Task, seed: int, fork: Fork | None = None) -> EnvCaller:
        """Create the environment of a task, with the note of an episode's `fork`.

        Return the `EnvCaller` through which its methods are called. The caller must close the
        thread of the `EnvCaller`.
        """

        def on_blocked(caller: EnvCaller, seconds: float) -> None:
            code = getattr(caller.env, "code_name", "") if is_own(caller.env) else ""
            name = f"{code or caller.code_name} of {task.env}"
            if seconds > 2 * self._longest_blocked.get(name, 0):
                self._longest_blocked[name] = seconds
                self._on_blocked(name, seconds)

        taskset = with_note(self.taskset, task, fork) if fork else self.taskset
        return await make_env(taskset, task, seed, on_blocked)

    async def chat(self, task: Task) -> Chat:
        """Return the chat format with the tools of a task."""
        if not self._has_tools:
            return self.generator.chat
        taskset: Any = self.taskset
        return self.generator.chat.with_tools(await self._hook("tools_of", taskset.tools_of, task))

    async def combine(self, turn: Turn) -> Turn:
        """Combine the rewards of a turn by the task set's method, if it has one.

        Otherwise return the turn unchanged.
        """
        if not (turn.rewards and self._combines):
            return turn
        return await self._hook("combine", combine_rewards, self.taskset, turn)

    async def _hook(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the task set, which may be the user's code.

        The caller must limit its time.
        """
        name = f"{method}() of {self._taskset_name}"
        return await call_hook(name, function, *arguments, on_loop=is_own(self.taskset))

    async def _begin(
        self, transcript: Transcript, caller: EnvCaller, chat: Chat
    ) -> tuple[Turn, list[float]]:
        is_resumable = Resumable in caller.kinds
        if is_resumable:
            restored = await transcript.restore_snapshot(caller)
            if restored is not None:
                return restored
        turn = await self.wait_times.on("tool_wait", caller.turn(caller.env.begin))
        self._check_size(turn)
        encode = partial(chat.encode_prompt, turn.messages)
        transcript.add_context(context_piece(chat, await self._encoded(turn, encode)))
        if is_resumable:
            await transcript.save_snapshot(caller, turn, ())
        return turn, []

    async def _take_turns(  # noqa: PLR0913 - two of them are limits
        self,
        transcript: Transcript,
        caller: EnvCaller,
        chat: Chat,
        begun: tuple[Turn, list[float]],
        limit: TurnLimit | None,
        budget_use: BudgetUse,
    ) -> tuple[Turn, Stop]:
        """Alternate replies and environment steps. Return the last turn and the reason to stop.

        The last turn has the facts (numbers that the environment reports) of all turns. A later
        fact replaces an earlier one of the same name. `begun` has the first turn and the list of
        rewards of earlier replies, to which later rewards are added. `limit` is a technique's limit
        of the turns, and `budget_use` counts what the episode has used of its budget.
        """
        turn, turn_rewards = begun
        env = caller.env
        ended = True
        allowed = AllowedTurns(limit, most=self.config.max_turns, transcript=transcript, chat=chat)
        await transcript.look(going=False)  # at places before a restored snapshot
        while not turn.done:
            if len(turn_rewards) == allowed.number(turn_rewards):
                return turn, "max_turns"
            if self.generator.reply_budget(len(transcript.tokens)) < 1:
                return turn, "max_tokens"
            if stop := budget_use.stop(len(transcript.tokens)):
                return turn, stop
            try:
                reply, ended = await self._generate(transcript, budget_use)
            except Pruned:
                return replace(turn, rewards={}), "pruned"
            with stage(f"step {len(turn_rewards) + 1}", self.config.timeout_s):
                if HasSimulatedDelays in caller.kinds:
                    await caller.hook("replaying", setattr, env, "replaying", transcript.replaying)
                message = await self._parse(chat, reply)
                budget_use.count_calls(len(message.tool_calls))
                step = caller.turn(env.step, message)
                facts = turn.facts
                turn = await self.combine(await self.wait_times.on("tool_wait", step))
                if facts:
                    turn = replace(turn, facts={**facts, **turn.facts})
                turn_rewards.append(turn.reward)
                if not turn.done:
                    turn = allowed.remind(turn, turn_rewards)
                    self._check_size(turn)
                    encode = partial(
                        chat.encode_continuation,
                        turn.messages,
                        ended=ended,
                        calls=message.tool_calls,
                    )
                    text = await self._encoded(turn, encode)
                    self._check_size(turn, len(text))
                    transcript.add_context(context_piece(chat, text))
                    if Resumable in caller.kinds:
                        await transcript.save_snapshot(caller, turn, turn_rewards)
        return turn, "done" if ended else "cut_reply"

    async def _encoded(self, turn: Turn, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tokens of a turn's messages. Pictures are read in a thread.

        A deterministic run uses no thread, because a call in a thread takes virtual time.
        """
        if self._deterministic or not any(message.images for message in turn.messages):
            return encode()
        return await in_thread(encode)

    async def _parse(self, chat: Chat, reply: Sequence[int]) -> Message:
        """Parse a reply's tokens as a message. A long reply is decoded in a thread.

        A deterministic run uses no thread, because a call in a thread takes virtual time.
        """
        if self._deterministic or len(reply) < LONG_REPLY_TOKENS:
            return chat.parse(reply)
        return chat.reader.message(await in_thread(chat.text, reply))

    async def _generate(
        self, transcript: Transcript, budget_use: BudgetUse
    ) -> tuple[list[int], bool]:
        """Sample a reply. Return its tokens, and True if it ended with a stop token.

        The time in which a paused episode waits to continue is not counted as waiting for
        generation.
        """
        waited_s = budget_use.slot_wait_s
        reply = self.generator.generate(transcript, budget_use=budget_use)
        try:
            found = await self.wait_times.on("generation_wait", reply)
            await transcript.look(going=False)
            return found
        finally:
            self.wait_times.add("generation_wait", waited_s - budget_use.slot_wait_s)

    def _check_size(self, turn: Turn, num_tokens: int = 0) -> None:
        """Raise `EnvError` if the environment's messages are longer than the whole context.

        The check comes before tokenization, which would block the event loop. So it uses a lower
        limit of their length in tokens. `num_tokens` is the length of the episode so far.
        """
        limit = self.generator.config.max_context
        characters = sum(len(message.content) for message in turn.messages)
        at_least = max(
            num_tokens,
            len(turn.messages),
            characters // self.generator.chat.longest_token,
        )
        if at_least > limit:
            raise EnvError(
                f"Turn.messages has {len(turn.messages):,} messages with {characters:,} characters,"
                f" at least {at_least:,} tokens; engine.max_context is {limit}: shorten the "
                "messages, or raise engine.max_context"
            )


class _Opened:
    """A context that enters and leaves a task set in a separate task, each within a time limit.

    Code that exceeds the limit and ignores cancellation is abandoned. One asyncio task does both,
    because some libraries require it.
    """

    def __init__(self, taskset: AbstractAsyncContextManager[Any], name: str) -> None:
        self._taskset = taskset
        self._name = name

    async def __aenter__(self) -> None:
        """Enter the task set. Raises `EnvError` if that fails or takes more than `ENTER_S`."""
        loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Sequence[Any]] = loop.create_future()
        self._task = loop.create_task(self._hold())
        if problem := await self._wait(self._entered, "__aenter__()", ENTER_S):
            raise problem
        for variable, value in self._context.items():  # which `__aenter__` may have set
            variable.set(value)

    async def __aexit__(self, *error: Any) -> None:
        """Leave the task set.

        Raises `EnvError` if that fails, unless another error is already being raised.
        """
        if not self._ended.done():
            self._ended.set_result(error)
        problem = await self._wait(self._task, "__aexit__()", EXIT_S)
        if problem and error[0] is None:
            raise problem

    async def _hold(self) -> None:
        async def enter() -> None:
            await self._taskset.__aenter__()

        async def leave(*error: Any) -> None:
            await self._taskset.__aexit__(*error)

        await Watched(enter(), f"__aenter__() of {self._name}", lambda seconds: None)
        self._context = copy_context()
        self._entered.set_result(None)
        error = await self._ended
        await Watched(leave(*error), f"__aexit__() of {self._name}", lambda seconds: None)

    async def _wait(
        self, awaited: asyncio.Future[Any], method: str, limit_s: float
    ) -> EnvError | None:
        """Wait until `awaited` is done, or the task has ended.

        Return the error of the task set's `method`, or None.
        """
        task = self._task
        try:
            await asyncio.wait({task, awaited}, timeout=limit_s, return_when=FIRST_COMPLETED)
        finally:
            is_late = not awaited.done() and not task.done()
            if is_late:
                task.cancel()
                await asyncio.wait([task], timeout=CANCEL_INTERVAL_S)
            if is_late and not task.done():
                abandon(task)
        problem = f"did not return within {limit_s:g} s" if is_late else ""
        cause = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(cause, EnvError) and type(cause) is not EnvError:
            return cause  # such as one that names the end of a worker process
        if cause and not is_late:
            problem = await describe_apart(cause)
        elif task.cancelled() and not is_late:
            problem = "it cancelled its own task"
        return EnvError(f"{method} of {self._name}: {problem}") if problem else None


class _OpenEnvironment:
    """A context that closes the environment of an attempt, if one was opened.

    It takes a tenth of the memory of an `AsyncExitStack`.
    """

    __slots__ = ("caller",)

    def __init__(self) -> None:
        self.caller: EnvCaller | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Close the environment.

        An error of its `close` raises `EpisodeFailed`, unless the episode has already failed.
        """
        caller = self.caller
        if caller is None:
            return
        try:
            if Closable in caller.kinds:
                with stage("close", CLOSE_S):
                    await caller(caller.env.close)
        except EpisodeFailed:
            if error is None:
                raise
        finally:
            caller.thread.close()


async def _in_slot(
    slot: EpisodeSlot, episode: Callable[[], Awaitable[Trajectory | Failure]]
) -> Trajectory | Failure:
    """Wait until the episode may run, then run it. `slot` decides when."""
    async with slot:
        return await episode()


async def _outcome(attempt: Attempt) -> Trajectory:
    """Await an attempt and return its trajectory. Raises `EpisodeFailed` if it failed."""
    try:
        trajectory: Trajectory = await attempt.outcome()
    except EnvError as error:
        raise EpisodeFailed(attempt.stage) from error
    return trajectory


def require_finished(groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups unchanged, if at least one of their episodes has finished.

    Raises `TooManyFailures` if all episodes of the groups failed.
    """
    failures = [failure for group in groups for failure in group.failures]
    if failures and not any(group.trajectories for group in groups):
        raise TooManyFailures(
            f"all {len(failures)} episodes of a batch failed; the last one in "
            f"{failures[-1].stage} of {failures[-1].task.key}: {failures[-1].error}"
        )
    return groups


def _require_few_hung(failure: Failure) -> None:
    """Raise `TooManyFailures` if too many environment calls hang in threads, which cannot be
    ended.
    """
    if (number := num_hung()) > MAX_HUNG:
        raise TooManyFailures(
            f"{number} calls of plain functions of environments never returned, and their threads "
            f"cannot be ended; the last one in {failure.stage} of {failure.task.key}: "
            f"{failure.error}. With task.isolate = process their processes are ended"
        )


def _starts(
    request: GroupRequest,
    results: Sequence[Trajectory | Failure],
    forks: Sequence[Fork | None],
) -> Mapping[int, Start]:
    """Return the start of each forked episode that has no result yet, by its index in the group.

    Raises ValueError if an episode is forked from one that is not finished.
    """
    past = [record.outcome for record in request.past]
    parents = {each.episode: each for each in (*past, *results) if isinstance(each, Trajectory)}
    starts: dict[int, Start] = {}
    for index, fork in enumerate(forks[len(results) :], start=len(results)):
        if fork is None:
            continue
        if fork.parent not in parents:
            raise ValueError(f"episode {fork.parent} is not finished: it cannot be forked")
        parent = parents[fork.parent]
        seed = parent.seed if fork.repeats else None
        starts[index] = Start(fork, fork.prefix_of(parent.pieces), seed=seed)
    return starts


def _group(request: GroupRequest, results: Sequence[Trajectory | Failure | None]) -> Group:
    first = request.sizes[0] if request.sizes else len(results)
    ended = [result for result in results if isinstance(result, Trajectory)]
    written = {each.episode for each in ended if each.fork and each.fork.writes}
    return Group(
        task=request.task,
        trajectories=tuple(each for each in ended if each.episode not in written),
        failures=tuple(result for result in results if isinstance(result, Failure)),
        number=request.number,
        added=frozenset(
            result.episode for result in results[first:] if isinstance(result, Trajectory)
        ),
        turn_limit=request.turn_limit,
        budget=request.budget,
        texts=tuple(each for each in ended if each.episode in written),
    )


def failure_of(
    error: EpisodeFailed | NotReplayed, task: Task, pieces: Sequence[Piece], text: str
) -> Failure:
    """Return the `Failure` that describes a failed attempt.

    `pieces` are the tokens before the failure, and `text` describes the error.
    """
    sampled = [piece for piece in pieces if isinstance(piece, Sampled)]
    return Failure(
        task=task,
        stage=str(error) if isinstance(error, EpisodeFailed) else "replay",
        error=text,
        turns=count_turns(pieces),
        sampled_tokens=sum(len(piece.tokens) for piece in sampled),
    )
