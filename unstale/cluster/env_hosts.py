"""Environments on other machines, in worker processes that Ray actors start there.

The run uses a `RemoteWorker` for each worker process, in place of an `isolation.process.Worker`.
`EnvHost` is the actor on the other machine. It supervises its worker process as a run does on its
own machine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from unstale.cluster.session import (
    MAX_CONCURRENT,
    connect,
    first_line,
    import_ray,
    result_of,
    summary,
)
from unstale.config import ClusterConfig
from unstale.isolation.process import ConcurrentWorker, EpisodeWorker, WorkerEnded
from unstale.isolation.tasks import StartWorker
from unstale.isolation.wire import Row
from unstale.records import Task
from unstale.threads import in_thread

_PLACE_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The answer of a worker process to a call, and the state of the process afterwards.

    `ended`, `retired` and `suspects` are those of `isolation.process.Worker`.
    """

    row: Row | None
    """The result of the called method. None if the process ended before it answered."""
    ended: str
    retired: str
    suspects: frozenset[str]


class EnvHost:
    """A Ray actor with one worker process for environments."""

    def __init__(self, options: Row, memory_gb: float) -> None:
        self._options = options
        self._memory_gb = memory_gb
        self._worker: ConcurrentWorker | None = None

    async def ping(self) -> None:
        """Do nothing. An answer shows that the actor runs on a machine."""

    async def start(self) -> HostAnswer:
        """Start the worker process. The answer has no row if the process cannot create the task
        set.
        """
        self._worker = ConcurrentWorker(self._options, self._memory_gb, lambda worker: None)
        self._worker.num_episodes = 1  # never 0: the run decides when it ends
        try:
            await self._worker.ready()
        except WorkerEnded:
            return self._answer(None)
        return self._answer({})

    async def call(
        self, num_episodes: int, episode: int, method: str, task: Task, fields: Row
    ) -> HostAnswer:
        """Call a method of an environment in the worker process, with the arguments `fields`.

        `num_episodes` is the number of episodes that use this process. `episode` is the number of
        the episode that has the environment.
        """
        assert self._worker is not None, "call start first"
        self._worker.num_episodes = 1 + num_episodes
        try:
            return self._answer(await self._worker.call(episode, method, task, **fields))
        except WorkerEnded:
            return self._answer(None)

    def _answer(self, row: Row | None) -> HostAnswer:
        worker = self._worker
        assert worker is not None
        return HostAnswer(row, worker.ended, worker.retired, frozenset(worker.suspects))


class RemoteWorker:
    """A worker process for environments, on a machine that Ray chooses.

    If no machine is ready within `patience_s` seconds, the worker ends. If its machine dies, calls
    fail as if the process had ended, but no task is suspected of having caused it.
    """

    def __init__(
        self,
        patience_s: float,
        options: Row,
        memory_gb: float,
        on_end: Callable[[EpisodeWorker], None],
    ) -> None:
        self.ended = ""
        self.retired = ""
        self.suspects: set[str] = set()
        self.num_episodes = 0
        self._patience_s = patience_s
        self._on_end = on_end
        self._calls: set[asyncio.Future[HostAnswer]] = set()
        self._options = options
        self._memory_gb = memory_gb
        self._host: Any = None
        self._started = asyncio.ensure_future(self._start())

    @property
    def is_ready(self) -> bool:
        """True if `ready` returns or raises without waiting."""
        return self._started.done()

    async def ready(self) -> None:
        """Wait until the worker has created its task set. Raises `WorkerEnded` if it cannot."""
        await asyncio.shield(self._started)
        if self.ended:
            raise WorkerEnded(self.ended)

    async def call(self, episode: int, method: str, task: Task, **fields: Any) -> Row:
        """Call a method of an environment in the worker and return the answer.

        Raises `WorkerEnded` if the process or its machine ends first.
        """
        await self.ready()
        answer = await self._ask("call", self.num_episodes, episode, method, task, fields)
        self.retired = self.retired or answer.retired
        assert answer.row is not None
        return answer.row

    def release(self) -> None:
        """Record the end of one episode. A worker that is to be replaced ends with its last
        episode.
        """
        self.num_episodes -= 1
        if self.retired and not self.num_episodes:
            self.end(self.retired)

    def end(self, reason: str) -> None:
        """End the actor, and with it the worker process. Its calls fail with `reason`.

        If Ray cannot end the actor, the worker still counts as ended, and Ray's error is added to
        the reason. Ray later ends the actor because nothing refers to it.
        """
        if self.ended:
            return
        self.ended = reason
        try:
            self._drop()
        except (import_ray().exceptions.RayError, OSError, RuntimeError) as error:
            self.ended = f"{reason} (and Ray could not end its actor: {first_line(error)})"
        for call in self._calls:
            call.cancel()
        self._on_end(self)

    async def _start(self) -> None:
        """Wait for a machine and for the worker process on it. On an error, end the worker."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._place()
            await self._ask("start")  # the host limits it
        except TimeoutError:
            self.end(
                f"no machine was ready for environments within {self._patience_s:g} s "
                "(cluster.patience_s): each worker needs one free core of the Ray cluster"
            )
        except WorkerEnded:
            pass  # `ready` raises it
        except (import_ray().exceptions.RayError, OSError, RuntimeError, TypeError) as error:
            # TypeError: Ray cannot serialize the options
            self.end(f"no worker process can be started on another machine: {first_line(error)}")

    async def _place(self) -> None:
        """Request an actor until one answers, because Ray may choose a machine that has just
        died.
        """
        ray = import_ray()
        actor = ray.remote(EnvHost)
        placed = actor.options(
            num_cpus=1,
            max_restarts=0,
            max_concurrency=MAX_CONCURRENT,
            scheduling_strategy="SPREAD",
        )
        while not self.ended:
            self._host = await in_thread(placed.remote, self._options, self._memory_gb)
            if self.ended:  # meanwhile
                self._drop()
                return
            try:
                await result_of(self._host.ping.remote())
            except ray.exceptions.RayError:
                self._drop()
                await asyncio.sleep(_PLACE_AGAIN_S)
            else:
                return

    def _drop(self) -> None:
        host, self._host = self._host, None
        if host is not None and import_ray().is_initialized():
            import_ray().kill(host)

    async def _ask(self, method: str, *arguments: Any) -> HostAnswer:
        """Call a method of the actor and return its answer. Raises `WorkerEnded` if none comes."""
        if self.ended:
            raise WorkerEnded(self.ended)
        ray = import_ray()
        try:
            reference = getattr(self._host, method).remote(*arguments)
            answer = await self._result_of(reference)
        except ray.exceptions.RayTaskError as error:  # the method raised an error there
            cause = error.cause or error
            self.end(
                f"the host of a worker process failed at {method}: "
                f"{type(cause).__name__}: {summary(cause)}"
            )
            raise WorkerEnded(self.ended) from None
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            self.end(f"the machine of a worker process does not answer: {first_line(error)}")
            raise WorkerEnded(self.ended) from None
        if answer.row is None:
            self.suspects = set(answer.suspects)
            self.end(answer.ended)
            raise WorkerEnded(self.ended)
        return answer

    async def _result_of(self, reference: Any) -> HostAnswer:
        """Wait for the result of a call of the actor, or until `end` cancels the call."""
        call = asyncio.ensure_future(result_of(reference))
        self._calls.add(call)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:  # of the caller, not of the call
            call.cancel()
            if not self.ended:
                import_ray().cancel(reference)
            raise
        finally:
            self._calls.discard(call)
        if call.cancelled():
            raise WorkerEnded(self.ended)
        return call.result()


def remote_workers(cluster: ClusterConfig) -> StartWorker:
    """Connect to Ray. Return a function that starts a worker process on a machine of the cluster.

    Raises `ConfigError` if Ray cannot be used.
    """
    connect(cluster.address)
    return partial(RemoteWorker, cluster.patience_s)
