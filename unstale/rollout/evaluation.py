"""Evaluation: measure success on held-out tasks."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from unstale.records import Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.seeds import derive_seed

Attempt = tuple[str, int]
"""The key of a task, and the number of an attempt at it, from 0."""


class FinishedEpisodes:
    """The successes of the attempts whose episodes ended without a failure."""

    def __init__(self) -> None:
        self.successes: dict[Attempt, bool] = {}

    def add(self, attempt: Attempt, success: bool) -> None:
        """Record an attempt."""
        self.successes[attempt] = success


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
    not run again, and the others are added to it, except those that failed.
    """
    finished = finished or FinishedEpisodes()
    num_done = 0
    attempts = Counter[str]()
    listed: list[tuple[Task, Attempt]] = []
    for task in tasks:
        listed.append((task, (task.key, attempts[task.key])))
        attempts[task.key] += 1

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
        outcome = await rollout.episode(task, env_seed=env_seed, noise_seed=noise_seed)
        count_episode()
        if not isinstance(outcome, Trajectory):
            return None
        finished.add(attempt, outcome.success)
        return outcome.success

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(run_attempt(task, attempt)) for task, attempt in listed]
    return [attempt.result() for attempt in running]
