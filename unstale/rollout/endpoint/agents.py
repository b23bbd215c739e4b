"""Episodes of external agents: programs that call the policy through the recording endpoint.

The calls of one run of an agent become a trajectory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from unstale.envs import EnvError, HasWorker, Turn, implements
from unstale.envs.external import ExternalEnv
from unstale.records import Stop, Task, Trajectory, TurnLimit
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.episode import EpisodeFailed, Rollout, stage
from unstale.rollout.segments import BudgetUse
from unstale.rollout.transcript import NotReplayed, Transcript


class AgentRollout(Rollout):
    """A rollout of external agents, which call the policy through an HTTP `endpoint`.

    A branch is a further conversation of an episode. It begins when an agent edits the history that
    it sends. `on_event` is then called with `"forked"` and details as keyword arguments.
    """

    def __init__(
        self,
        *parts: Any,
        endpoint: RecordingEndpoint,
        on_event: Callable[..., None] = lambda kind, **_: None,
        **options: Any,
    ) -> None:
        super().__init__(*parts, **options)
        self.endpoint = endpoint
        self.resources = _open_both(self.resources, endpoint)
        self.on_event = on_event

    async def attempt(
        self,
        transcript: Transcript,
        task: Task,
        env_seed: int,
        limit: TurnLimit | None,
        budget_use: BudgetUse,
    ) -> Trajectory:
        """Run an agent to its end. Return its calls as one trajectory, with further conversations
        as branches.

        Of the limits that techniques set, only the one on the tokens of a reply (`budget_use`)
        applies. The others, such as `limit` on turns, are refused in runs of agents. Raises
        `EpisodeFailed` if the agent fails, and `NotReplayed` if a resumed agent does not repeat its
        recorded calls.
        """
        with stage("begin", self.config.timeout_s):
            caller = await self.make_env(task, env_seed)
        env = cast(ExternalEnv, caller.env)
        failed = None
        turn = Turn(())
        async with env.slot, self._worker_of(env), asyncio.TaskGroup() as calls:
            reply_tokens = budget_use.budget.reply_tokens
            session = AgentSession(self, transcript, calls, self.on_event, reply_tokens)
            try:
                with stage("agent", env.timeout_s), self.endpoint.opened(session) as address:
                    async with session.watched():
                        turn = await caller.turn(env.drive, address, self.endpoint.token)
                        _require_roles(turn, self.roles)
                        turn = await self.combine(turn)
            except EpisodeFailed as error:
                failed = error
        try:
            if session.broken:
                raise NotReplayed(session.broken)
            if failed and session.stop == "done":
                raise failed
            # A limit that refuses a call may make the agent fail. This only ends the episode.
            return _trajectory(
                session, task, turn, stop=session.stop if failed else session.own_end
            )
        finally:
            # the error's traceback refers to this frame, which would be a reference cycle
            failed = None

    @asynccontextmanager
    async def _worker_of(self, env: ExternalEnv) -> AsyncIterator[None]:
        """Return a context in which the worker process of an isolated agent runs.

        `rollout.timeout_s` does not include the start of the process.
        """
        if not implements(env, HasWorker):
            yield
            return
        try:
            with stage("begin", self.config.timeout_s) as timeout:
                if start := env.worker_start():
                    await timeout.without_limit(start)
            yield
        finally:
            await env.close()


def _require_roles(turn: Turn, roles: Sequence[str]) -> None:
    """Raise `EnvError` if a reward belongs to a role that the task set does not have."""
    for name in turn.rewards if roles else ():
        if "/" in name and name.partition("/")[0] not in roles:
            raise EnvError(
                f"the reward {name!r} is of a role that does not exist; the roles are "
                f"{', '.join(roles)}"
            )


@asynccontextmanager
async def _open_both(
    one: AbstractAsyncContextManager[Any], other: AbstractAsyncContextManager[Any]
) -> AsyncIterator[None]:
    async with one, other:
        yield


def _trajectory(session: AgentSession, task: Task, turn: Turn, *, stop: Stop) -> Trajectory:
    """Return the attempt as a trajectory, and write the outcome of each conversation to the
    journal.
    """
    for transcript in session.transcripts:
        transcript.require_replayed()
    num_with_reply = sum(transcript.has_reply for transcript in session.transcripts)
    if not num_with_reply:
        raise EpisodeFailed("agent") from EnvError("the agent ended without an answer to any call")

    def finish(transcript: Transcript, *branches: Trajectory) -> Trajectory:
        trajectory = Trajectory(
            pieces=tuple(transcript.pieces),
            rewards=turn.rewards,
            stop=stop,
            task=task,
            seed=transcript.seed,
            episode=transcript.episode,
            role=transcript.role,
            facts={
                **turn.facts,
                **{name: float(count) for name, count in session.facts.items()},
                "branches": float(num_with_reply - 1),
            },
            branches=branches,
        )
        transcript.write_outcome(trajectory)
        return trajectory

    main, *branches = session.transcripts
    ended = [finish(branch) for branch in branches if branch.has_reply]
    return finish(main, *ended).led()
