"""Evaluation: measure success on held-out tasks."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from unstale.records import Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.seeds import derive_seed


async def evaluate(
    rollout: Rollout, tasks: Sequence[Task], *, seed: int, progress: Callable[..., None]
) -> list[bool | None]:
    """Run one episode on each task. Return the success of each episode, or None if it failed.

    `seed` affects only the replies, because the seed of an environment depends on the task alone. A
    task that is listed twice is attempted twice, with different replies. After each episode,
    `progress` is called with a text and the numbers `done` and `total`.
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
