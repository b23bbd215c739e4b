"""Evaluation: measure the policy's success on held-out tasks."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

from unstale.records import Failure, Task, Trajectory
from unstale.rollout import activity
from unstale.rollout.episode import Rollout
from unstale.rollout.failures import TooManyFailures
from unstale.rollout.seeds import derive_seed

MAX_CONCURRENT = 512
"""Number of held-out episodes that run at the same time. More would only wait for the engine, and
each environment may need a thread or a process.
"""

MAX_TRIALS = 3
"""Number of tasks on which the trial episode may fail before the run stops. The trial is one
held-out episode that runs before all others.
"""

Attempt = tuple[str, int]
"""The key of an evaluation episode: (key of the task, number of the attempt at this task, from
0).
"""

FIGURES = ("reward", "turns", "tokens")
"""The figures of an evaluation episode that are recorded beside its success: the reward, and the
numbers of turns and of sampled tokens.
"""


class FinishedEpisodes:
    """The successes and figures of those evaluation episodes that have ended without a failure."""

    def __init__(self) -> None:
        self.successes: dict[Attempt, bool] = {}
        self.figures: dict[Attempt, Mapping[str, float]] = {}
        """The `FIGURES` of each episode, those of them that are known."""
        self.waits: dict[str, float] = {}
        """Metrics: the seconds for which the episodes waited for generation and for tools."""

    def add(self, attempt: Attempt, episode: Trajectory) -> None:
        """Record the success and the figures of an attempt's episode."""
        self.successes[attempt] = episode.success
        self.figures[attempt] = {
            "reward": episode.reward,
            "turns": sum(each.num_turns for each in episode.conversations),
            "tokens": episode.num_sampled_in_all,
        }

    def means(self, attempts: Iterable[Attempt]) -> dict[str, float]:
        """Return the mean of each figure over those of the `attempts` that are finished, by name.

        NaN if none is finished, or if the figure of a finished one is not known.
        """
        known = [self.figures.get(each, {}) for each in attempts if each in self.successes]
        rows = {name: [each.get(name, math.nan) for each in known] for name in FIGURES}
        return {name: fmean(row) if row else math.nan for name, row in rows.items()}


def attempts_at(tasks: Iterable[Task]) -> list[Attempt]:
    """Return one attempt for each listed task. Repetitions of a task get the numbers 0, 1, and so
    on.
    """
    counts = Counter[str]()
    attempts: list[Attempt] = []
    for task in tasks:
        attempts.append((task.key, counts[task.key]))
        counts[task.key] += 1
    return attempts


def measure_success(outcomes: Sequence[bool | None], samples: int) -> dict[str, float]:
    """Return the metrics of an evaluation.

    `outcomes` has whether each episode succeeded, or None for one that failed. The `samples`
    episodes of a task follow each other. The success rate is the mean over all episodes, where
    failed ones count as 0. It is NaN if all failed, because the policy's success is then not known.

    >>> measure_success([True, False, None, False], samples=2)["eval/success_rate"]
    0.25
    """
    tasks = [outcomes[at : at + samples] for at in range(0, len(outcomes), samples)]
    is_known = any(each is not None for each in outcomes)
    metrics = {
        "eval/success_rate": outcomes.count(True) / len(outcomes) if is_known else math.nan,
        "eval/tasks": float(len(tasks)),
        "eval/failed_tasks": float(sum(None in each for each in tasks)),
    }
    if samples > 1:
        solved = sum(True in each for each in tasks) / len(tasks)
        metrics["eval/any_success_rate"] = solved if is_known else math.nan
    return metrics


async def evaluate(  # noqa: PLR0913 - two of them say what is done already
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    seed: int,
    progress: Callable[..., None],
    finished: FinishedEpisodes | None = None,
    trial: bool = False,
) -> list[bool | None]:
    """Run one episode on each listed task. Return whether each succeeded, or None for one that
    failed.

    `seed` affects only the replies: the environment's seed depends on the task. A task that is
    listed twice is attempted twice, with different replies. `progress` is called at the start and
    after each episode, with a text, the numbers `done` and `total`, and a function `detail` that
    returns what the episodes wait for. Attempts in `finished` are not run again, and new ones are
    added to it unless they fail. At most `MAX_CONCURRENT` episodes run at the same time.

    With `trial`, one episode runs before the others. Raises `TooManyFailures` if it fails on each
    of the first `MAX_TRIALS` tasks.
    """
    finished = finished or FinishedEpisodes()
    failures: list[Failure] = []
    num_done = 0
    rollout.wait_times.read("")
    show = partial(
        progress, "held-out tasks", total=len(tasks), detail=partial(activity, rollout.wait_times)
    )
    show(done=0)
    places = asyncio.Semaphore(MAX_CONCURRENT)

    def count_episode() -> None:
        nonlocal num_done
        num_done += 1
        show(done=num_done)

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
            failures.append(outcome)
            return None
        finished.add(attempt, outcome)
        return outcome.success

    attempts = list(zip(tasks, attempts_at(tasks), strict=True))
    tried: list[bool | None] = []
    for task, attempt in attempts[: MAX_TRIALS if trial else 0]:
        tried.append(await run_attempt(task, attempt))
        if tried[-1] is not None:
            break
    if tried and not any(each is not None for each in tried):
        last = failures[-1]
        raise TooManyFailures(
            f"the trial episodes before the first evaluation failed, on {len(tried)} tasks; the "
            f"last one in {last.stage} of {last.task.key}: {last.error}"
        )
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(run_attempt(task, attempt))
            for task, attempt in attempts[len(tried) :]
        ]
    finished.waits |= rollout.wait_times.read("eval")
    return [*tried, *(attempt.result() for attempt in running)]
