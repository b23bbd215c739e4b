"""A task set whose environments run in worker processes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Self

from unstale.config import ConfigError, TaskConfig
from unstale.config.given import HERE
from unstale.durability.virtual_clock import VirtualLoop
from unstale.envs import (
    Env,
    EnvError,
    HasCorrections,
    HasDemonstrations,
    HasIdentities,
    HasTaskTools,
    HasTexts,
    Message,
    Taskset,
    Turn,
    Votable,
    implements,
)
from unstale.envs.external import ExternalAgent
from unstale.envs.guard import OCCUPANCY, DescribedError
from unstale.isolation.process import (
    ConcurrentWorker,
    EpisodeWorker,
    LockstepWorker,
    WorkerEnded,
)
from unstale.isolation.wire import (
    MAX_CHARACTERS,
    Row,
    message_row,
    read_line,
    read_text,
    read_turn,
)
from unstale.records import Task

MAX_ALONE = 8
"""Largest number of workers for tasks that are suspected of having ended a worker. Each runs one
episode. Further episodes of such tasks share these workers.
"""
_ALONE = "its only episode has ended"

StartWorker = Callable[[Row, float, Callable[[EpisodeWorker], None]], EpisodeWorker]
"""A function that starts a worker process. Its arguments are options, the allowed memory in GB, and
a function to call when the process has ended. It raises `OSError` if the process cannot be started.
"""


def start_here(
    options: Row, memory_gb: float, on_end: Callable[[EpisodeWorker], None]
) -> EpisodeWorker:
    """Start a worker process on this machine.

    In a run on a virtual clock it is a `LockstepWorker`.
    """
    is_virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
    worker_class = LockstepWorker if is_virtual else ConcurrentWorker
    return worker_class(options, memory_gb, on_end)


def isolate(taskset: Taskset, config: TaskConfig, start: StartWorker = start_here) -> Taskset:
    """Return a task set whose environments run in worker processes. `start` starts a process.

    The worker processes create the task set again from `config`. If `config.isolate` is `none`,
    `taskset` itself is returned. Raises `ConfigError` if another process cannot import the task
    set's code, or if another machine cannot run it.
    """
    if config.isolate == "none":
        return taskset
    for name, value in asdict(config).items():
        if isinstance(value, str) and HERE in value:
            raise ConfigError(
                f"task.{name} = {value} cannot be used with task.isolate = {config.isolate}: "
                "worker processes cannot import __main__. Move the code to a module"
            )
    if config.isolate == "ray" and isinstance(taskset, ExternalAgent):
        raise ConfigError(
            "task.isolate = ray cannot run an ExternalAgent, which runs on the machine of the "
            "endpoint that it calls. Use task.isolate = process"
        )
    return IsolatedTasks(taskset, Workers(config, start))


class Workers:
    """The worker processes of a run. Those that have ended are replaced when they are needed.

    If a worker ends while calls run, their tasks are suspected of being the cause. The next episode
    of a suspected task gets a worker of its own, so that it can end no other episode. If that
    episode ends and the worker does not, the task is no longer suspected.
    """

    def __init__(self, config: TaskConfig, start: StartWorker = start_here) -> None:
        self.on_event: Callable[..., None] = lambda kind, **_: None
        """A function called with "worker_ended", the reason, and the number of episodes when a
        worker has ended, for the run's log.
        """
        self._config = config
        self._start_worker = start
        self._shared: list[EpisodeWorker] = []
        self._alone: list[EpisodeWorker] = []
        self._draining: list[EpisodeWorker] = []
        self._suspects: set[str] = set()
        self._is_open = False

    async def open(self) -> None:
        """Start all worker processes. Raises `WorkerEnded` if they cannot create the task set."""
        self._is_open = True
        self._fill()
        for worker in list(self._shared):
            await worker.ready()

    def close(self) -> None:
        self._is_open = False
        for worker in (*self._shared, *self._alone, *self._draining):
            worker.end("the run has ended")

    def assign(self, task: str) -> EpisodeWorker:
        """Return the worker for a new episode of `task`.

        Raises `EnvError` if none can be started.
        """
        if not self._is_open:
            raise RuntimeError("the task set is isolated: enter it before the first episode")
        try:
            if task in self._suspects:
                if len(self._alone) < MAX_ALONE:
                    self._alone.append(self._start())
                    self._alone[-1].retired = _ALONE
                workers = self._alone
            else:
                self._fill()
                workers = self._shared
        except OSError as error:
            raise EnvError(f"no worker process can be started: {error}") from error
        worker = min(workers, key=lambda each: each.num_episodes)
        worker.num_episodes += 1
        return worker

    def episode_ended(self, task: str, worker: EpisodeWorker) -> None:
        """Record that an episode of `task` has ended, and that its worker still runs."""
        if worker in self._alone:
            self._suspects.discard(task)

    def _fill(self) -> None:
        """Start workers until `task.workers` of them accept new episodes.

        Workers that are to be replaced run until their last episodes end. If they are more than
        `task.workers`, the oldest are ended at once.
        """
        retired = [worker for worker in self._shared if worker.retired]
        self._shared = [worker for worker in self._shared if not worker.retired]
        self._draining += retired
        while len(self._draining) > self._config.workers:
            self._draining[0].end(self._draining[0].retired)
        while len(self._shared) < self._config.workers:
            self._shared.append(self._start())

    def _start(self) -> EpisodeWorker:
        options = {"task": asdict(self._config)}
        return self._start_worker(options, self._config.worker_memory_gb, self._on_end)

    def _on_end(self, worker: EpisodeWorker) -> None:
        for workers in (self._shared, self._alone, self._draining):
            if worker in workers:
                workers.remove(worker)
        self._suspects |= worker.suspects
        if self._is_open and worker.ended != _ALONE:
            self.on_event("worker_ended", reason=worker.ended, episodes=worker.num_episodes)


class IsolatedTasks:
    """A task set whose environments run in worker processes. It is a context in which these run.

    `inner` is the task set in this process, which lists the tasks. Each worker has a copy of it,
    which makes the environments.
    """

    def __init__(self, inner: Taskset, workers: Workers) -> None:
        self.inner = inner
        self.workers = workers
        self.name = inner.name
        self.tools = inner.tools
        if implements(inner, HasTaskTools):
            self.tools_of = inner.tools_of
        if implements(inner, HasIdentities):
            self.identity = inner.identity
        self.roles: Sequence[str] = getattr(inner, "roles", ())
        self.several_conversations = bool(getattr(inner, "several_conversations", False))
        self.place_of = getattr(inner, "place_of", None)
        self.longest_call_s: float = getattr(inner, "longest_call_s", 0.0)
        if implements(inner, HasTexts):
            self.text = inner.text
        if implements(inner, Votable):
            self.answer_of = inner.answer_of
        if implements(inner, HasCorrections):
            self.correction = inner.correction
        if implements(inner, HasDemonstrations):
            self.demonstration = inner.demonstration
        self._episodes = count()

    def train(self, seed: int) -> Iterator[Task]:
        return self.inner.train(seed)

    def held_out(self, count: int) -> list[Task]:
        return self.inner.held_out(count)

    def env(self, task: Task, seed: int) -> Env:
        episode = next(self._episodes)
        if isinstance(self.inner, ExternalAgent):
            return IsolatedAgent(self.workers, task, seed, episode, self.inner)
        return IsolatedEnv(self.workers, task, seed, episode)

    async def __aenter__(self) -> Self:
        try:
            await self.workers.open()
        except BaseException:
            self.workers.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.workers.close()


class IsolatedEnv:
    """An environment in a worker process. The first call creates it there."""

    def __init__(self, workers: Workers, task: Task, seed: int, episode: int) -> None:
        self.replaying = False
        self.code_name = "the environment"
        """The name of this environment's user code in messages."""
        self._workers = workers
        self._task = task
        self._seed = seed
        self._episode = episode
        self._worker: EpisodeWorker | None = None
        self._was_called = False
        self._snapshot: str | None = None

    def worker_start(self) -> Awaitable[None] | None:
        """Assign a worker process. Return an awaitable of its start, or None if it has started.

        Raises `EnvError` if no worker process can be started.
        """
        self._worker = self._workers.assign(self._task.key)
        return None if self._worker.is_ready else self._worker.ready()

    async def begin(self) -> Turn:
        return await self._turn("begin")

    async def step(self, reply: Message) -> Turn:
        return await self._turn("step", reply=message_row(reply))

    def snapshot(self) -> str | None:
        """Return the environment's state after the last turn. None if it cannot save its state."""
        return self._snapshot

    async def resume(self, state: str) -> None:
        await self._call("resume", state=state)

    async def close(self) -> None:
        """Close the environment. If it does not end, its worker process is replaced."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if self._was_called and not worker.ended:
                is_over = False
                try:
                    answer = await self._answer(worker, "close")
                    is_over = not answer["busy"]
                finally:
                    if is_over:
                        self._workers.episode_ended(self._task.key, worker)
                    else:
                        worker.retired = f"{self.code_name} of {self._task.key} does not end"
        finally:
            worker.release()

    async def _turn(self, method: str, **fields: Any) -> Turn:
        answer = await self._call(method, **fields)
        worker = self._worker
        assert worker
        try:
            self._snapshot = None
            if answer.get("snapshot") is not None:
                self._snapshot = read_text(answer, "snapshot", MAX_CHARACTERS)
            return read_turn(answer.get("turn"))
        except ValueError as error:
            worker.end(f"the worker of {self._task.key} sent a wrong answer: {error}")
            raise WorkerEnded(worker.ended) from None

    async def _call(self, method: str, **fields: Any) -> Row:
        """Call a method of the environment in its worker process, and return the answer.

        Raises `EnvError` if the method fails or the process ends.
        """
        if self._worker is None:
            self._worker = self._workers.assign(self._task.key)
        self._was_called = True
        return await self._answer(self._worker, method, replaying=self.replaying, **fields)

    async def _answer(self, worker: EpisodeWorker, method: str, **fields: Any) -> Row:
        answer = await worker.call(self._episode, method, self._task, seed=self._seed, **fields)
        self.code_name = read_line(answer, "code")
        blocked_s = float(answer["blocked_s"])
        if blocked_s and (running := OCCUPANCY.current):
            running.on_blocked(blocked_s)
        if "error" in answer:
            raise DescribedError(read_line(answer, "error"))
        return answer


class IsolatedAgent(IsolatedEnv):
    """A run of an external agent in a worker process. The agent calls the run's endpoint from
    there.
    """

    def __init__(
        self, workers: Workers, task: Task, seed: int, episode: int, agents: ExternalAgent
    ) -> None:
        super().__init__(workers, task, seed, episode)
        env = agents.env(task, seed)
        self.slot = env.slot
        self.timeout_s = env.timeout_s

    async def drive(self, base_url: str, api_key: str) -> Turn:
        """Run the agent to its end, with the endpoint at `base_url`. Return a turn with the agent's
        rewards.
        """
        try:
            return await self._turn("drive", arguments=[base_url, api_key])
        finally:
            await self.close()
