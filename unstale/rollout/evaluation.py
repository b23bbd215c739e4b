"""Evaluation: success on held-out tasks."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from unstale.records import Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.seeds import derive_seed


class ReportProgress(Protocol):
    """A callback for a display: the current activity, and how much of it is done."""

    def __call__(self, text: str, *, done: int = 0, total: int = 0) -> None: ...


async def evaluate(
    rollout: Rollout, tasks: Sequence[Task], *, seed: int, progress: ReportProgress
) -> list[bool | None]:
    """Run one episode on each task. Return its success, or None if it failed.

    `seed` varies the replies; the seed of the environment depends on the task alone. A task that is
    listed n times is attempted n times, each time with other replies.
    """
    num_done = 0
    attempts = Counter[str]()

    async def attempt_task(task: Task, attempt: int) -> bool | None:
        nonlocal num_done
        noise_seed = derive_seed(seed, "examination", task.key)
        if attempt:
            noise_seed = derive_seed(noise_seed, attempt)
        env_seed = derive_seed("examination", task.key)
        outcome = await rollout.episode(task, env_seed=env_seed, noise_seed=noise_seed)
        num_done += 1
        progress("held-out tasks", done=num_done, total=len(tasks))
        return outcome.success if isinstance(outcome, Trajectory) else None

    async with asyncio.TaskGroup() as group:
        running = []
        for task in tasks:
            running.append(group.create_task(attempt_task(task, attempts[task.key])))
            attempts[task.key] += 1
    return [attempt.result() for attempt in running]
