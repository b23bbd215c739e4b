"""Episodes: the policy and an environment take turns until the environment or a limit ends them.

A weight update interrupts generation. The reply then continues after its last token under the next
version. An episode whose environment fails is repeated with the same seed, up to `rollout.retries`
times. Then it counts as failed. Any error outside of environment code ends the run.
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
    is_unrepeated,
)
from unstale.rollout import More, no_more
from unstale.rollout.failures import FailureLimit, TooManyFailures
from unstale.rollout.generator import Generator
from unstale.rollout.rounds import NO_FORK, Pruned, Rounds, Start
from unstale.rollout.seeds import derive_seed
from unstale.rollout.segments import BudgetUse, EpisodeSlot, EpisodeSlots
from unstale.rollout.states import EnvStates
from unstale.rollout.timeouts import Attempt, PersistentTimeout, in_turn
from unstale.rollout.transcript import NotReplayed, NullWriter, OpenWriter, Transcript
from unstale.rollout.turn_limit import AllowedTurns
from unstale.stop_signals import SecondSignal
from unstale.threads import in_thread

OnFailure = Callable[[int, Failure, bool], None]
"""A function `(episode, failure, is_last)` that is called after a failed attempt. `episode` is the
attempt's number. `is_last` is True if the episode is not tried again.
"""
OnRestart = Callable[[int, Failure], None]
"""A function `(episode, failure)` that is called when a resumed episode starts again from its
beginning, because its environment did not repeat the recorded text.
"""
OnBlocked = Callable[[str, float], None]
"""A function `(name, seconds)` that is called when the user's code `name` has blocked the event
loop for this many seconds. It is called again when a later call blocks more than twice as long.
"""

CLOSE_S = 5.0
"""Largest number of seconds that `close` of an environment may take."""
ENTER_S = 120.0
"""Largest number of seconds that `__aenter__` of a task set may take. It may start servers."""
EXIT_S = 30.0
"""Largest number of seconds that `__aexit__` of a task set may take. It may stop servers."""


class EpisodeFailed(Exception):
    """Error: the code of an environment failed or took too long.

    The text names the stage of the episode, such as "begin" or "step 2". `__cause__` is the
    original error.
    """


@contextmanager
def stage(name: str, timeout_s: float) -> Iterator[PersistentTimeout]:
    """Return a context that raises `EpisodeFailed` if environment code fails or exceeds
    `timeout_s`.

    `name` is the stage that the error names, such as "step 2". Even SystemExit raised by the code
    becomes `EpisodeFailed`. Cancellation of the episode and the end of the program are raised
    unchanged.
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
    """A runner of episodes of the policy in the environments of a task set.

    `on_piece` is called with newly sampled tokens as soon as the engine returns them. `on_end` is
    called with the number of each episode that has ended without failure, and with the number of
    each branch (further conversation of the agent) in it.
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
        forks: bool = False,
    ) -> None:
        """Create a rollout.

        `slots` limits how many episodes run at the same time, if a technique divides episodes into
        segments. `deterministic` avoids threads, so that episodes repeat exactly. With `forks`, the
        states of environments are kept until their group ends, for episodes that continue from
        them.
        """
        self.generator = generator
        self.taskset = taskset
        self.roles: Sequence[str] = getattr(taskset, "roles", ())
        """Roles that the policy takes in an episode. Its main conversation has the first one."""
        self.config = config
        self._timeout_s = max(config.timeout_s, getattr(taskset, "longest_call_s", 0.0))
        self.turn_limit: TurnLimit | None = None
        """A technique's limit of turns for episodes outside of groups, which `episode` or a server
        runs. None for no such limit.
        """
        self.on_piece = on_piece
        self.on_end = on_end
        self.on_failure = on_failure
        self.on_restart = on_restart
        self._on_blocked = on_blocked
        self._slots = slots
        self._deterministic = deterministic
        self._forks = forks
        self._longest_blocked: dict[str, float] = {}
        self.wait_times = Stopwatch(
            "generation_wait", "tool_wait", *(["slot_wait"] if slots else [])
        )
        self._taskset_name = getattr(taskset, "name", type(taskset).__name__)
        self._identities = Identities(taskset)
        self._has_tools = implements(taskset, HasTaskTools)
        self._combines = implements(taskset, RewardCombiner)
        self._may_begin_anew = bool(getattr(taskset, "several_conversations", False))
        self.resources: AbstractAsyncContextManager[Any] = (
            _Opened(taskset, self._taskset_name)
            if isinstance(taskset, AbstractAsyncContextManager)
            else nullcontext()
        )
        """A context that must be open while episodes run. It enters and leaves the task set, if
        that is a context manager.
        """
        self.quarantined: set[str] = set()
        """Identities of tasks on which an episode failed in every attempt. An identity is a name
        that all repetitions of a task share. These tasks get no further episodes.
        """
        self._num_episodes = 0
        self._failures = FailureLimit(config.max_failed_share)

    def restore(
        self, episodes: int, quarantined: Iterable[Task], failed_shares: Iterable[float] = ()
    ) -> None:
        """Restore the counts of a run that is resumed.

        `episodes` is the number of episodes begun so far. `quarantined` are the tasks that get no
        further episodes. `failed_shares` has the share of failed episodes in each of the last
        groups, in the order in which the groups started.
        """
        self._num_episodes = episodes
        self.quarantined = {self._identities(task) for task in quarantined}
        self._failures.restore(failed_shares)

    def next_episode(self) -> int:
        """Return the number of a new episode. Successive calls count up."""
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

        Episodes recorded before a resume continue from their record, even if there are more than
        `size`. When all have ended, `more` is called with their results. It returns the start of
        each further episode, until it returns none. With `rounds`, a strategy forks and ends
        episodes while they run. `more` is then not called, and an episode about which the strategy
        has decided is not repeated after a failure.

        All episodes use the same environment seed, and different seeds for sampling. `open_writer`
        gets the number of the group and the episode's index in it, and opens the episode's record
        in the journal. Raises `TooManyFailures` if the share of failed episodes is too large.
        """
        if request.finished:
            return _group(request, [record.outcome for record in request.past])
        results: list[Trajectory | Failure] = []
        # More than `size` if episodes were added to the group before a resume.
        forks = [record.fork for record in request.past]
        forks += [None] * (size - len(forks))
        states = EnvStates() if self._forks else None
        number = self._failures.begin()
        try:
            if rounds:
                results = await self._in_rounds(request, size, open_writer, rounds, states)
                forks = [None] * len(results)
            while len(results) < len(forks):
                starts = _starts(request, results, forks, states)
                indices = range(len(results), len(forks))
                past = enumerate(request.past)
                records = {index: record for index, record in past if index in indices}
                results += await self.run_episodes(
                    request, indices, records, open_writer, starts=starts
                )
                forks += await more(results)
            self._failures.count(number, [each for each in results if not is_unrepeated(each)])
        finally:
            self._failures.end(number)
            # A copy's failure to close is none of an episode. Each is closed in a task of its own,
            # because a time limit has no effect in a task that was cancelled.
            closing = map(_close, states.copies() if states else ())
            await asyncio.shield(asyncio.gather(*closing, return_exceptions=True))
        return _group(request, results)

    async def _in_rounds(
        self,
        request: GroupRequest,
        size: int,
        open_writer: OpenWriter,
        rounds: Rounds,
        states: EnvStates | None,
    ) -> list[Trajectory | Failure]:
        records = dict(enumerate(request.past))

        async def episode(index: int, start: Start) -> Trajectory | Failure:
            start = start._replace(states=states)
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
        """Run the episodes of a group that have these indices, concurrently. Return their results
        in order.

        `records` has the record of each episode that was begun before a resume, by index. The
        episode continues from there. `starts` has the start of each forked episode, by index. If an
        episode fails, its task gets no further episodes.
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
        """Run the episode with this index in its group. If it fails, start no more episodes of its
        task.
        """
        outcome = await self._sibling(request, index, record, open_writer, start)
        if isinstance(outcome, Failure) and not is_unrepeated(outcome):
            await self.quarantine(request.task)
        return outcome

    async def quarantine(self, task: Task) -> None:
        """Exclude a task from further episodes."""
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

        If a technique divides the episode into segments, the coroutine first waits until the
        episode may run (`EpisodeSlots`). A technique's limit of turns does not hold for an episode
        that begins with text of a strategy, because this text may have more turns.
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
            limit=None if start.fork and start.fork.text else request.turn_limit,
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
        """Run one episode that counts as a group of its own.

        Return its trajectory, or the failure of its last attempt. Raises `TooManyFailures` if the
        share of failed episodes is too large.
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
        """Run one episode. If its environment fails, repeat the episode up to `rollout.retries`
        times.

        An episode with a `record` continues from the record's end. If the environment does not
        repeat the recorded text, the episode starts again from its beginning or its fork. This
        counts as a failure only if text before the fork, or text of the fork, differs. Two kinds of
        episodes are not repeated: those whose environment does not repeat the answers in the text
        of the fork (`is_unrepeated`), and those about which a strategy has decided (`Looks`).
        `limit` is a technique's limit of turns. Each attempt may use the whole `budget`.
        """
        fork, prefix, looks, _, states = start
        failures = record.failures if record else 0
        if record and record.outcome:
            if looks:
                await looks.repeat(record)
            if looks and looks.visited:
                return record.outcome
            is_final = failures > self.config.retries or is_unrepeated(record.outcome)
            if isinstance(record.outcome, Trajectory) or is_final:
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
                states=states,
                task_set=task.env,
            )
            past, record = record, None
            try:
                trajectory = await _outcome(
                    Attempt(
                        self.attempt(transcript, task, env_seed, limit, BudgetUse(budget, slot))
                    )
                )
            except (EpisodeFailed, NotReplayed) as error:
                text = await self._describe(error, task)
                failure = failure_of(error, task, transcript.all_pieces, text)
                failure = replace(failure, fork=fork)
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
            final = decided or failures > self.config.retries or is_unrepeated(failure)
            self.on_failure(number, failure, final)
            _require_few_hung(failure)
            if final:
                return failure

    async def _describe(self, error: EpisodeFailed | NotReplayed, task: Task) -> str:
        """Return the text of an error, which code of the user may produce.

        So it is produced in a thread, except in a deterministic run, where a thread would take
        virtual time.
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

        `limit` is a technique's limit of turns, and `budget_use` counts against the episode's
        budget. Raises `EpisodeFailed` if the environment fails, and `NotReplayed` if it does not
        repeat the recorded text.
        """
        async with _OpenEnvironment() as opened:
            with stage("begin", self._timeout_s) as timeout:
                fork = transcript.fork
                chat = await self.chat(task)
                if fork and fork.writes:
                    chat = chat.with_tools(())
                state = transcript.start
                copied = state.copy if state else None
                caller = opened.caller = await (
                    copied.fork() if copied else self.make_env(task, env_seed, fork)
                )
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
        for each in (transcript, *transcript.branches):
            each.require_replayed()
        # the rewards of replies before a fork belong to the episode that sampled them
        own_rewards = turn_rewards[len(turn_rewards) - count_turns(transcript.pieces) :]
        branches = [each for each in transcript.branches if each.has_reply]
        all_pieces = [each.pieces for each in (transcript, *branches)]
        num_cut = sum(count_cut_replies(each, chat.stop_tokens) for each in all_pieces)
        facts = {**turn.facts, **budget_use.facts(), **transcript.weight()}
        facts |= {CUT_REPLIES: float(num_cut)} if num_cut else {}
        facts |= {"branches": float(len(branches))} if branches else {}

        def ended(each: Transcript, **more: Any) -> Trajectory:
            return Trajectory(
                pieces=tuple(each.pieces),
                rewards=dict(turn.rewards),
                stop=stop,
                task=task,
                seed=each.seed,
                episode=each.episode,
                facts=facts,
                **more,
            )

        further = tuple(map(ended, branches))
        for branch, trajectory in zip(branches, further, strict=True):
            branch.write_outcome(trajectory)
        own = tuple(own_rewards) if any(own_rewards) else ()
        return ended(transcript, turn_rewards=own, fork=transcript.fork, branches=further)

    async def make_env(self, task: Task, seed: int, fork: Fork | None = None) -> EnvCaller:
        """Create the environment of a task. Return the `EnvCaller` that calls its methods.

        `fork` may add a note to the environment's prompt. The caller must close the `thread` of the
        returned object.
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
        """Return the chat format, with the tools that the task set defines for this task."""
        if not self._has_tools:
            return self.generator.chat
        taskset: Any = self.taskset
        return self.generator.chat.with_tools(await self._hook("tools_of", taskset.tools_of, task))

    async def combine(self, turn: Turn) -> Turn:
        """Return a turn whose rewards are combined by the task set. Unchanged if the task set has
        no method for it.
        """
        if not (turn.rewards and self._combines):
            return turn
        return await self._hook("combine", combine_rewards, self.taskset, turn)

    async def _hook(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the task set, without a time limit."""
        name = f"{method}() of {self._taskset_name}"
        return await call_hook(name, function, *arguments, on_loop=is_own(self.taskset))

    async def _begin(
        self, transcript: Transcript, caller: EnvCaller, chat: Chat
    ) -> tuple[Turn, list[float]]:
        restored = await transcript.restore(caller)
        if restored is not None:
            return restored
        turn = await self.wait_times.on("tool_wait", caller.turn(caller.env.begin))
        await in_turn()
        self._check_size(turn)
        encode = partial(chat.encode_prompt, turn.messages)
        transcript.add_context(context_piece(chat, await self._encoded(turn, encode)))
        await transcript.save_state(caller, turn, ())
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

        The returned turn has the facts (reported numbers) of all turns, the latest value of each
        name. `begun` has the first turn and the list of earlier rewards, to which later rewards are
        appended. A new conversation (`Turn.fresh`) becomes a branch of `transcript`. `limit` is a
        technique's limit of turns, and `budget_use` counts against the episode's budget.
        """
        turn, turn_rewards = begun
        env = caller.env
        ended = True
        current = transcript
        recorded = [*transcript.branches]  # of a resumed episode, in the order of their start
        allowed = AllowedTurns(limit, most=self.config.max_turns, transcript=transcript, chat=chat)
        await transcript.look(going=False)  # at places before a restored snapshot
        while not turn.done:
            if len(turn_rewards) == allowed.number(turn_rewards):
                return turn, "max_turns"
            if self.generator.reply_budget(len(current.tokens)) < 1:
                return turn, "max_tokens"
            if stop := budget_use.stop(len(current.tokens)):
                return turn, stop
            try:
                reply, ended = await self._generate(current, budget_use)
            except Pruned:
                return replace(turn, rewards={}), "pruned"
            with stage(f"step {len(turn_rewards) + 1}", self._timeout_s):
                if HasSimulatedDelays in caller.kinds:
                    await caller.hook("replaying", setattr, env, "replaying", transcript.replaying)
                message = await self._parse(chat, reply)
                budget_use.count_calls(len(message.tool_calls))
                step = caller.turn(env.step, message)
                facts = turn.facts
                turn = await self.wait_times.on("tool_wait", step)
                await in_turn()
                turn = await self.combine(turn)
                if facts:
                    turn = replace(turn, facts={**facts, **turn.facts})
                turn_rewards.append(turn.reward)
                if turn.fresh or current is not transcript:
                    self._check_anew(turn_rewards)
                if not turn.done:
                    turn = allowed.remind(turn, turn_rewards)
                    self._check_size(turn)
                    encode = partial(
                        chat.encode_continuation,
                        turn.messages,
                        ended=ended,
                        calls=message.tool_calls,
                    )
                    if turn.fresh:
                        chat = chat if turn.tools is None else chat.with_tools(turn.tools)
                        encode = partial(chat.encode_prompt, turn.messages)
                        current = (
                            recorded.pop(0)
                            if recorded
                            else transcript.add_branch(self.next_episode())
                        )
                    text = await self._encoded(turn, encode)
                    self._check_size(turn, len(text))
                    current.add_context(context_piece(chat, text))
                    if current is transcript:
                        await transcript.save_state(caller, turn, turn_rewards)
        return turn, "done" if ended else "cut_reply"

    async def _encoded(self, turn: Turn, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tokens of a turn's messages. `encode` runs in a thread if there are pictures.

        A deterministic run uses no thread, because a thread takes virtual time.
        """
        if self._deterministic or not any(message.images for message in turn.messages):
            return encode()
        return await in_thread(encode)

    async def _parse(self, chat: Chat, reply: Sequence[int]) -> Message:
        """Return a reply's tokens as a message. A long reply is decoded in a thread.

        A deterministic run uses no thread, because a thread takes virtual time.
        """
        if self._deterministic or len(reply) < LONG_REPLY_TOKENS:
            return chat.parse(reply)
        return chat.reader.message(await in_thread(chat.text, reply))

    async def _generate(
        self, transcript: Transcript, budget_use: BudgetUse
    ) -> tuple[list[int], bool]:
        """Sample a reply. Return its tokens, and True if the last one is a stop token.

        Pauses in which other episodes run do not count as waiting for generation.
        """
        waited_s = budget_use.slot_wait_s
        reply = self.generator.generate(transcript, budget_use=budget_use)
        try:
            found = await self.wait_times.on("generation_wait", reply)
            await transcript.look(going=False)
            return found
        finally:
            self.wait_times.add("generation_wait", waited_s - budget_use.slot_wait_s)

    def _check_anew(self, turn_rewards: Sequence[float]) -> None:
        """Raise `EnvError` if the task set may not begin new conversations (`Turn.fresh`), or if
        single replies of such an episode have rewards.
        """
        if not self._may_begin_anew:
            raise EnvError(
                f"Turn.fresh begins a new conversation: give {self._taskset_name} the attribute "
                "several_conversations = True"
            )
        if any(turn_rewards):
            raise EnvError(
                "Turn.reward must be 0 in an episode of several conversations (Turn.fresh), got "
                f"{max(turn_rewards, key=abs):g}: give rewards of the whole episode in Turn.rewards"
            )

    def _check_size(self, turn: Turn, num_tokens: int = 0) -> None:
        """Raise `EnvError` if the environment's messages are certainly longer than the context.

        This is checked before tokenizing, which would block the event loop for long messages.
        `num_tokens` is a known number of tokens, 0 if not known.
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
    """A context that enters and leaves a task set, each within a time limit.

    One separate asyncio task does both, because some libraries require it. Code that exceeds the
    limit and ignores cancellation is abandoned.
    """

    def __init__(self, taskset: AbstractAsyncContextManager[Any], name: str) -> None:
        self._taskset = taskset
        self._name = name

    async def __aenter__(self) -> None:
        """Enter the task set. Raises `EnvError` if that fails or takes longer than `ENTER_S`
        seconds.
        """
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
        """Wait up to `limit_s` seconds for `awaited`. Return the error of `method`, or None."""
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
    """A context that closes the environment `caller`, if there is one.

    It takes a tenth of the memory of an `AsyncExitStack`.
    """

    __slots__ = ("caller",)

    def __init__(self) -> None:
        self.caller: EnvCaller | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Close the environment. Raises `EpisodeFailed` if that fails, unless the episode has
        failed before.
        """
        try:
            if self.caller:
                await _close(self.caller)
        except EpisodeFailed:
            if error is None:
                raise


async def _close(caller: EnvCaller) -> None:
    """Close an environment and the thread of its calls. Raises `EpisodeFailed` if that fails."""
    try:
        if Closable in caller.kinds:
            with stage("close", CLOSE_S):
                await caller(caller.env.close)
    finally:
        caller.thread.close()


async def _in_slot(
    slot: EpisodeSlot, episode: Callable[[], Awaitable[Trajectory | Failure]]
) -> Trajectory | Failure:
    async with slot:
        return await episode()


async def _outcome(attempt: Attempt) -> Trajectory:
    try:
        trajectory: Trajectory = await attempt.outcome()
    except EnvError as error:
        raise EpisodeFailed(attempt.stage) from error
    return trajectory


def require_finished(groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups unchanged. Raises `TooManyFailures` if all their episodes failed."""
    failures = [failure for group in groups for failure in group.failures]
    if failures and not any(group.trajectories for group in groups):
        raise TooManyFailures(
            f"all {len(failures)} episodes of a batch failed; the last one in "
            f"{failures[-1].stage} of {failures[-1].task.key}: {failures[-1].error}"
        )
    return groups


def _require_few_hung(failure: Failure) -> None:
    """Raise `TooManyFailures` if too many environment calls never return. Their threads cannot be
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
    states: EnvStates | None,
) -> Mapping[int, Start]:
    """Return the start of each episode without a result, by its index in the group.

    Raises ValueError if an episode is forked from one that has not finished.
    """
    past = [record.outcome for record in request.past]
    parents = {each.episode: each for each in (*past, *results) if isinstance(each, Trajectory)}
    starts: dict[int, Start] = {}
    for index, fork in enumerate(forks[len(results) :], start=len(results)):
        if fork is None:
            if states:
                starts[index] = Start(states=states)
            continue
        if fork.parent not in parents:
            raise ValueError(f"episode {fork.parent} is not finished: it cannot be forked")
        parent = parents[fork.parent]
        seed = parent.seed if fork.repeats else None
        starts[index] = Start(fork, fork.prefix_of(parent.pieces), seed=seed, states=states)
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
    """Return the record of a failed attempt.

    `pieces` are the attempt's tokens before the failure, and `text` describes the error.
    """
    sampled = [piece for piece in pieces if isinstance(piece, Sampled)]
    return Failure(
        task=task,
        stage=str(error) if isinstance(error, EpisodeFailed) else "replay",
        error=text,
        turns=count_turns(pieces),
        sampled_tokens=sum(len(piece.tokens) for piece in sampled),
    )
