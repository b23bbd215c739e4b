"""Episodes of agents that call the endpoint: their calls become trajectories."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from unstale.envs import EnvError, Turn, combine_rewards
from unstale.envs.external import ExternalEnv
from unstale.records import Failure, Sampled, Task, Trajectory, count_turns
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.episode import EpisodeFailed, Rollout, stage
from unstale.rollout.transcript import NotReplayed, NullWriter, Transcript


class AgentRollout(Rollout):
    """A `Rollout` in which agents run the episodes, and call the policy through `endpoint`.

    `on_event` is called when an agent's edited history begins a branch.
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
        self.resources = endpoint
        self.on_event = on_event

    async def attempt(self, transcript: Transcript, task: Task, env_seed: int) -> Trajectory:
        """Run the agent until it returns its reward."""
        env = cast(ExternalEnv, self.taskset.env(task, env_seed))
        failed = None
        turn = Turn(())
        async with env.slot, asyncio.TaskGroup() as calls:
            session = AgentSession(self, transcript, calls, self.on_event)
            try:
                with stage("agent", env.timeout_s), self.endpoint.opened(session) as address:
                    async with session.watched():
                        turn = await env.drive(address, self.endpoint.token)
                        turn = combine_rewards(self.taskset, turn)
            except EpisodeFailed as error:
                failed = error
        try:
            return _trajectory(transcript, session, task, turn, failed)
        except (EpisodeFailed, NotReplayed) as error:
            stage_name = str(error) if isinstance(error, EpisodeFailed) else "replay"
            for branch in transcript.branches:
                self.on_failure(branch.episode, _lost_branch(branch, task, stage_name), False)
            raise
        finally:
            failed = None  # its traceback refers to this frame: a reference cycle


def _trajectory(
    transcript: Transcript,
    session: AgentSession,
    task: Task,
    turn: Turn,
    failed: EpisodeFailed | None,
) -> Trajectory:
    """Return the attempt as a trajectory with branches.

    An agent may fail because a limit refused its call: its episode then ends there, without reward.
    """
    if session.broken:
        raise NotReplayed(session.broken)
    if failed and session.stop == "done":
        try:
            raise failed
        finally:
            del failed  # its traceback refers to this frame: a reference cycle
    for each in session.transcripts:
        each.require_replayed()
    with_replies = [
        each
        for each in session.transcripts
        if any(isinstance(piece, Sampled) for piece in each.pieces)
    ]
    if not with_replies:
        raise EpisodeFailed("agent") from EnvError("the agent ended without an answer to any call")
    blank = Trajectory(
        pieces=(),
        rewards=turn.rewards,
        stop=session.stop if failed else "done",
        task=task,
        seed=transcript.seed,
        facts={**turn.facts, "branches": float(len(with_replies) - 1)},
    )
    branches = []
    for branch in transcript.branches:
        if branch in with_replies:
            trajectory = _fill(blank, branch)
            branch.writer.write_outcome(trajectory)
            branches.append(trajectory)
    main = replace(_fill(blank, transcript), branches=tuple(branches))
    if transcript not in with_replies:
        # The record of the attempt ends here; a branch takes its place in the group.
        transcript.writer.write_outcome(main)
        transcript.writer = NullWriter(episode=transcript.episode, seed=transcript.seed)
    return main.led()


def _fill(blank: Trajectory, transcript: Transcript) -> Trajectory:
    return replace(
        blank,
        pieces=tuple(transcript.pieces),
        seed=transcript.seed,
        episode=transcript.episode,
    )


def _lost_branch(branch: Transcript, task: Task, stage_name: str) -> Failure:
    pieces = branch.all_pieces
    sampled = sum(len(piece.tokens) for piece in pieces if isinstance(piece, Sampled))
    reason = "the attempt that it is a branch of failed"
    return Failure(task, stage_name, reason, count_turns(pieces), sampled)
