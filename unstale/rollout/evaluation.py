"""Evaluation: measure success on held-out tasks."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from unstale.records import Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.seeds import derive_seed

MAX_CONCURRENT = 512
"""Number of held-out episodes that run at the same time. More would wait for the engine, and the
environments of many episodes need a thread or a process each.
"""

Attempt = tuple[str, int]
"""The key of a task, and the number of an attempt at it, from 0."""


class FinishedEpisodes:
    """The successes and rewards of the attempts whose episodes ended without a failure."""

    def __init__(self) -> None:
        self.successes: dict[Attempt, bool] = {}
        self.rewards: dict[Attempt, float] = {}

    def add(self, attempt: Attempt, success: bool, reward: float) -> None:
        """Record an attempt."""
        self.successes[attempt] = success
        self.rewards[attempt] = reward

    def mean_reward(self, attempts: Iterable[Attempt]) -> float:
        """Return the mean reward of those of the attempts that are finished.

        It is NaN if none is, or if the reward of one is not known.
        """
        ended = [attempt for attempt in attempts if attempt in self.successes]
        if not ended or any(attempt not in self.rewards for attempt in ended):
            return math.nan
        return fmean(self.rewards[attempt] for attempt in ended)


def attempts_at(tasks: Iterable[Task]) -> list[Attempt]:
    """Return the attempts that a list of tasks means. A task that is listed twice has two."""
    counts = Counter[str]()
    attempts: list[Attempt] = []
    for task in tasks:
        attempts.append((task.key, counts[task.key]))
        counts[task.key] += 1
    return attempts


async def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    seed: int,
    progress: Callable[..., None],
    finished: FinishedEpisodes | None = None,
) -> list[bool | None]:
    """Run one episode on each task. Return the success of each episode, or None if it failed.

    `seed` affects only the replies, because the seed of an environment depends on the task alone. A
    task that is listed twice is attempted twice, with different replies. After each episode,
    `progress` is called with a text and the numbers `done` and `total`. Attempts in `finished` are
    not run again, and the others are added to it, except those that failed. At most
    `MAX_CONCURRENT` episodes run at the same time.
    """
    finished = finished or FinishedEpisodes()
    num_done = 0
    places = asyncio.Semaphore(MAX_CONCURRENT)

    def count_episode() -> None:
        nonlocal num_done
        num_done += 1
        progress("held-out tasks", done=num_done, total=len(tasks))

    async def run_attempt(task: Task, attempt: Attempt) -> bool | None:
        if attempt in finished.successes:
            count_episode()
            return finished.successes[attempt]
        noise_seed = derive_seed(seed, "examination", task.key)
        if attempt[1]:
            noise_seed = derive_seed(noise_seed, attempt[1])
        env_seed = derive_seed("examination", task.key)
        async with places:
            outcome = await rollout.episode(task, env_seed=env_seed, noise_seed=noise_seed)
        count_episode()
        if not isinstance(outcome, Trajectory):
            return None
        finished.add(attempt, outcome.success, outcome.reward)
        return outcome.success

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(run_attempt(task, attempt))
            for task, attempt in zip(tasks, attempts_at(tasks), strict=True)
        ]
    return [attempt.result() for attempt in running]
