"""The choice of training tasks, and of the number of episodes for each.

By default, tasks come in the order of the task set. With `selection.pool`, only the first tasks of
the task set (the pool) are used, again and again: in turn, or as a technique's sampler chooses. A
task is drawn when its group begins.

After a resume, groups that had begun keep their tasks. Later draws depend on the number of the
group, on the journal (visits of each task) and on the checkpoint (state of the sampler after the
last trained batch). So a resumed run draws the same tasks if it is deterministic, or if no step was
trained after the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from unstale.config import ConfigError, RunConfig, SelectionConfig
from unstale.config.techniques import chosen
from unstale.envs import Taskset, task_identity, task_text
from unstale.envs.hooks import Identities, tasks_of
from unstale.records import NO_BUDGET, Failure, Group, GroupRequest, Task, Trajectory
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import (
    Draw,
    DrawContext,
    GroupSoFar,
    StatesQuery,
    TaskNamer,
    Techniques,
    TextReader,
    VectorReader,
)

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.durability.resume import ResumeState

MAX_SKIPPED = 100_000
"""Number of tasks skipped in a row after which no more requests come, because probably no usable
task remains. A task is skipped if its episodes failed before.
"""
MAX_COMPARED = 100_000
"""Largest number of training tasks that are searched for one that repeats. This takes about 0.1
s.
"""


async def training_requests(
    taskset: Taskset,
    seed: int,
    start: ResumeState,
    *,
    identify: Identities,
    skipped: Collection[str],
) -> AsyncIterator[GroupRequest]:
    """Yield a request for a group of episodes for each training task, in the task set's order.

    `start` is the state from which the run continues. Tasks before `start.place` were used already
    and get no request. Nor do tasks whose identity (a name that repetitions share) is in `skipped`.
    After `MAX_SKIPPED` skipped tasks in a row, the requests end. If a task comes again, its request
    has another seed, so that its episodes differ.
    """
    number = start.admitted
    num_skipped = 0
    visits: Counter[Task] = Counter()
    place = -1
    async for task in tasks_of(taskset, seed):
        place += 1
        visit = visits[task]
        visits[task] += 1
        if place < start.place:
            continue
        num_skipped += 1
        if await identify.find(task) not in skipped:
            group_seed = derive_seed(seed, "visit", visit) if visit else seed
            yield GroupRequest(number, task, group_seed, place)
            number += 1
            num_skipped = 0
        elif num_skipped > MAX_SKIPPED:
            return


def make_pool(
    taskset: Taskset,
    seed: int,
    options: SelectionConfig,
    identify: Callable[[Task], str] | None = None,
) -> dict[str, tuple[int, Task]]:
    """Return the tasks of a pool as identity -> (index in the task set, task).

    An identity is a name that repetitions of a task share. The pool has the first `options.pool`
    training tasks, or held-out tasks with `options.test_time`. Raises `ConfigError` if two of them
    are the same, or if the task set has fewer.
    """
    identify = identify or Identities(taskset)
    size = options.pool
    tasks = taskset.held_out(size) if options.test_time else islice(taskset.train(seed), size)
    pool: dict[str, tuple[int, Task]] = {}
    for place, task in enumerate(tasks):
        pool.setdefault(identify(task), (place, task))
    if len(pool) < size:
        raise ConfigError(
            f"selection.pool must be at most {len(pool)}, the number of different tasks among the "
            f"first {size} of {taskset.name}; got {size}"
        )
    return pool


def require_repeats(config: RunConfig, taskset: Taskset) -> None:
    """Raise `ConfigError` if a technique needs repeated tasks, but the run uses each task once."""
    options = config.technique_options
    names = [each.needs_repeats(options[each.name]) for each in chosen(config.techniques)]
    if config.selection.pool or not any(names):
        return
    seen: set[str] = set()
    planned = config.max_steps * config.schedule.groups_per_step
    for task in islice(taskset.train(config.seed), min(planned, MAX_COMPARED)):
        if (name := task_identity(taskset, task)) in seen:
            return
        seen.add(name)
    raise ConfigError(
        f"{' and '.join(filter(None, names))} needs tasks that come again, but the first "
        f"{len(seen)} training tasks of {taskset.name} are all different. Set --selection.pool to "
        "a number of tasks"
    )


def read_texts(taskset: Taskset, pool: Mapping[str, tuple[int, Task]]) -> dict[str, str]:
    """Return the text of each task in a pool, by the task's identity.

    Raises `ConfigError` if a task has no text.
    """
    texts = {name: task_text(taskset, task) for name, (_, task) in pool.items()}
    missing = next((name for name, text in texts.items() if not text), None)
    if missing is not None:
        raise ConfigError(
            f"a technique compares the texts of tasks, and {missing} of {taskset.name} has none. "
            "Give the task set a method text(task) that returns the words of a task, or choose "
            "another technique"
        )
    return texts


class Selection:
    """The choice of training tasks, and of the number of episodes for each.

    All methods must be called on the event loop.
    """

    def __init__(  # noqa: PLR0913 - two of them are not the selection's own
        self,
        config: RunConfig,
        taskset: Taskset,
        start: ResumeState,
        techniques: Techniques,
        *,
        skipped: Collection[str],
        encode: Callable[[Sequence[str], StatesQuery], Tensor] | None = None,
    ) -> None:
        """Create the selection of a run that continues from the state `start`.

        `skipped` has the identities of tasks that are not used again. The caller may add to it
        later. `encode` turns texts into vectors `[n, H]`, for samplers that compare tasks.
        """
        self._config = config
        self._taskset = taskset
        self._start = start
        self._techniques = techniques
        self._skipped = skipped
        self.identify = Identities(taskset)
        if isinstance(techniques.strategy, TaskNamer):
            techniques.strategy.name_tasks(self.identify)
        self._pool: dict[str, tuple[int, Task]] = {}
        self._visits: Counter[str] = Counter()
        if config.selection.pool:
            self._pool = make_pool(taskset, config.seed, config.selection, self.identify)
            for task, count in start.visits.items():
                self._visits[self.identify(task)] += count
            if isinstance(techniques.sampler, TextReader):
                techniques.sampler.read(read_texts(taskset, self._pool))
            if isinstance(techniques.sampler, VectorReader) and encode:
                techniques.sampler.read_vectors(encode)
        self._names = list(self._pool)
        self._live = {each.number: self.identify(each.task) for each in start.requests}
        """Number of a group in flight -> identity of its task. A sampler draws other tasks if it
        can.
        """

    async def requests(self) -> AsyncIterator[GroupRequest]:
        """Yield a request for each further group of episodes. End when no usable task remains."""
        config = self._config
        if not self._pool:
            requests = training_requests(
                self._taskset,
                config.seed,
                self._start,
                identify=self.identify,
                skipped=self._skipped,
            )
            async for request in requests:
                yield self._sized(request)
            return
        number = self._start.admitted
        while usable := self._candidates(number):
            draw = self._draw(usable, number)
            place, task = self._pool[draw.task]
            visit = self._visits[draw.task]
            self._visits[draw.task] += 1
            self._live[number] = draw.task
            seed = derive_seed(config.seed, "visit", visit) if visit else config.seed
            request = GroupRequest(number, task, seed, place)
            yield self._sized(request, draw.size, draw.reply_tokens)
            number += 1

    def _draw(self, usable: Sequence[str], number: int) -> Draw:
        sampler = self._techniques.sampler
        if sampler is None:
            return Draw(usable[0])
        config = self._config
        step = number // config.schedule.groups_per_step + 1
        random = Random(derive_seed(config.seed, "draw", number))
        context = DrawContext(number, step, random, config.schedule.groups_per_step)
        draw = sampler.draw(usable, context)
        if draw.task not in usable:
            raise ValueError(f"a sampler drew {draw.task!r}, which is none of its {len(usable)}")
        return draw

    def _candidates(self, number: int) -> Sequence[str]:
        """Return the identities of the tasks from which the task of group `number` is drawn.

        Without a sampler, this is only the next task in turn. Empty if no usable task remains.
        """
        count = len(self._names)
        if self._techniques.sampler is None:
            in_turn = (self._names[(number + i) % count] for i in range(count))
            return list(islice(filter(self._is_usable, in_turn), 1))
        live = set(self._live.values())
        wanted = self._config.selection.candidates
        random = Random(derive_seed(self._config.seed, "candidates", number))
        # So many that enough are left if every one in flight or skipped is among them.
        drawn = min(count, wanted + len(live) + len(self._skipped))
        names = [name for name in random.sample(self._names, drawn) if self._is_usable(name)]
        if not names:
            names = [name for name in self._names if self._is_usable(name)]
        return ([name for name in names if name not in live] or names)[:wanted]

    def _is_usable(self, name: str) -> bool:
        return name not in self._skipped

    def _sized(self, request: GroupRequest, size: int = 0, reply_tokens: int = 0) -> GroupRequest:
        """Return the request with its number of episodes and their limits of turns and tokens.

        With `size` 0, techniques or `schedule.group_size` set the number. `reply_tokens` is the
        limit of each reply (0: none).
        """
        allocator, strategy = self._techniques.allocator, self._techniques.strategy
        group_size = self._config.schedule.group_size
        if allocator is not None:
            size = allocator.first(self.identify(request.task)) or group_size
        if strategy is not None:
            size = strategy.roots(size or group_size)
        limiter = self._techniques.limiter
        task = self.identify(request.task)
        limit = limiter.turn_limit(request.number, task) if limiter else None
        budgeter = self._techniques.budgeter
        budget = budgeter.episode_budget() if budgeter else NO_BUDGET
        return replace(
            request,
            sizes=(size,) if size else (),
            turn_limit=limit,
            budget=replace(budget, reply_tokens=reply_tokens),
        )

    def more(
        self, request: GroupRequest, results: Sequence[Trajectory | Failure], begun: int
    ) -> int:
        """Return the number of further episodes to run in a group whose episodes have all ended.

        The first `begun` episodes were not added by an allocator.
        """
        allocator = self._techniques.allocator
        ended = (each for each in results if isinstance(each, Trajectory))
        rewards = tuple(each.reward for each in ended if each.fork is None)
        if allocator is None or not rewards:
            return 0
        task = self.identify(request.task)
        return allocator.more(GroupSoFar(task, rewards, len(results), begun))

    def ended(self, groups: Sequence[Group]) -> None:
        """Record that these groups are no longer in flight. Their tasks may be drawn again."""
        for group in groups:
            self._live.pop(group.number, None)
