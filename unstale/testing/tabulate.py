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
    seed: int | Sequence[int] = 0,
    max_turns: int = 5,
    max_episodes: int = 100_000,
) -> Tabular:
    """Return a task as arrays. A state is a sequence of replies and answers so far, and an action
    is the next reply.

    Several seeds make a task with random outcomes: the environment's seed is one of them, each with
    the same probability, and is unknown except for the answers. The environment is played from its
    start for each seed and each sequence of up to `max_turns` replies, so its answers must be
    repeatable. An episode then ends, and its reward is that of its last turn. Raises `ValueError`
    if there are no replies or no seeds, if more than `max_episodes` episodes may be needed, or if
    the environment answers the same replies differently.
    """
    seeds = [seed] if isinstance(seed, int) else [*seed]
    if not replies or not seeds:
        raise ValueError("at least one reply and one seed are needed")
    most = len(seeds) * sum(len(replies) ** length for length in range(1, max_turns + 1))
    if most > max_episodes:
        with_seeds = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
        raise ValueError(
            f"{len(replies)} replies{with_seeds} in {max_turns} turns are up to {most} episodes, "
            f"more than max_episodes = {max_episodes}: give fewer replies or turns"
        )
    first = [(each, (await _play(taskset, task, each, []))[-1]) for each in seeds]
    states: list[tuple[tuple[int, ...], dict[int, Turn]]] = []
    states += [((), found) for found in _by_messages(first)]
    start = [len(found) / len(seeds) for _, found in states]
    rows: list[list[list[tuple[float, int, float]]]] = []
    for path, answers in states:  # grows meanwhile
        rows.append([])
        for action in range(len(replies)):
            said = [replies[i] for i in (*path, action)]
            ended: dict[float, int] = {}
            going: list[tuple[int, Turn]] = []
            for each, answer in answers.items():
                *before, last = await _play(taskset, task, each, said)
                if answer != before[-1]:
                    raise ValueError(
                        f"{task.key} answered the same {len(path)} replies differently: seed all "
                        "randomness"
                    )
                if last.done or len(said) == max_turns:
                    reward = total_reward(last.rewards)
                    ended[reward] = ended.get(reward, 0) + 1
                else:
                    going.append((each, last))
            outcomes = [(number / len(answers), END, reward) for reward, number in ended.items()]
            for found in _by_messages(going):
                outcomes.append((len(found) / len(answers), len(states), 0.0))
                states.append(((*path, action), found))
            rows[-1].append(outcomes)
    most_outcomes = max(len(each) for row in rows for each in row)
    padded = torch.tensor(
        [[each + [(0.0, END, 0.0)] * (most_outcomes - len(each)) for each in row] for row in rows],
        dtype=torch.float64,
    )
    probability, next_state, reward_of = padded.unbind(-1)
    if most_outcomes == 1 and len(start) == 1:
        return Tabular(next_state.squeeze(-1).long(), reward_of.squeeze(-1), num_steps=max_turns)
    first_state = torch.tensor(start + [0.0] * (len(states) - len(start)), dtype=torch.float64)
    return Tabular(next_state.long(), reward_of, max_turns, first_state, probability)


def _by_messages(turns: Sequence[tuple[int, Turn]]) -> list[dict[int, Turn]]:
    """Return turns `(seed, turn)` in groups of equal messages, by seed."""
    groups: list[dict[int, Turn]] = []
    for seed, turn in turns:
        for group in groups:
            if next(iter(group.values())).messages == turn.messages:
                group[seed] = turn
                break
        else:
            groups.append({seed: turn})
    return groups


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
