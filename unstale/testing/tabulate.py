"""Find all states of a small environment, by playing every sequence of given replies."""

from collections.abc import Sequence

import torch

from unstale.algorithms.effective_horizon import END, Tabular
from unstale.envs import (
    Closable,
    HasSimulatedDelays,
    Message,
    Taskset,
    Turn,
    combine_rewards,
    implements,
)
from unstale.envs.guard import call
from unstale.records import Task, total_reward


async def tabulate(  # noqa: PLR0913 - two of them are limits
    taskset: Taskset,
    task: Task,
    replies: Sequence[Message],
    *,
    seed: int = 0,
    max_turns: int = 5,
    max_episodes: int = 100_000,
) -> Tabular:
    """Return a task as arrays. A state is a sequence of replies so far, and an action is the next
    reply.

    The environment is played from its start for each sequence of up to `max_turns` replies, so its
    answers must be repeatable. An episode then ends, and its reward is that of its last turn.
    Raises `ValueError` if there are no replies, if more than `max_episodes` episodes may be needed,
    or if the environment answers the same replies differently.
    """
    if not replies:
        raise ValueError("at least one reply is needed")
    most = sum(len(replies) ** length for length in range(1, max_turns + 1))
    if most > max_episodes:
        raise ValueError(
            f"{len(replies)} replies in {max_turns} turns are up to {most} episodes, more than "
            f"max_episodes = {max_episodes}: give fewer replies or turns"
        )
    paths: list[tuple[int, ...]] = [()]
    answers: list[Turn | None] = [None]
    """For each state, the turn with which the environment answered its last reply. None for the
    first.
    """
    next_state, reward = [], []
    for state, path in enumerate(paths):  # grows meanwhile
        targets, rewards = [], []
        for action in range(len(replies)):
            *before, last = await _play(taskset, task, seed, [replies[i] for i in (*path, action)])
            if answers[state] not in (None, before[-1]):
                raise ValueError(
                    f"{task.key} answered the same {len(path)} replies differently: seed all "
                    "randomness"
                )
            ends = last.done or len(path) + 1 == max_turns
            rewards.append(total_reward(last.rewards) if ends else 0.0)
            targets.append(END if ends else len(paths))
            if not ends:
                paths.append((*path, action))
                answers.append(last)
        next_state.append(targets)
        reward.append(rewards)
    return Tabular(
        torch.tensor(next_state), torch.tensor(reward, dtype=torch.float64), num_steps=max_turns
    )


async def _play(taskset: Taskset, task: Task, seed: int, replies: Sequence[Message]) -> list[Turn]:
    """Return the first turn of an episode, and the environment's turn after each of the replies."""
    env = taskset.env(task, seed)
    if implements(env, HasSimulatedDelays):
        env.replaying = True
    try:
        turns: list[Turn] = [await call(env.begin)]
        for reply in replies:
            turns.append(combine_rewards(taskset, await call(env.step, reply)))
        return turns
    finally:
        if implements(env, Closable):
            await call(env.close)
