"""Workers on other machines that start late, or not at all. No machine and no Ray is needed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.isolation.test_isolation import PATIENT_S, Isolated
from tests.rollout.test_external import World
from unstale.cluster import env_hosts
from unstale.cluster.env_hosts import HostAnswer, remote_workers
from unstale.config import ClusterConfig, TaskConfig
from unstale.durability import virtual_clock
from unstale.envs import EnvError, Turn
from unstale.envs.registry import build_taskset
from unstale.isolation import IsolatedTasks, isolate
from unstale.isolation.process import EpisodeWorker, WorkerEnded
from unstale.isolation.tasks import StartWorker
from unstale.isolation.wire import Row, turn_row
from unstale.records import Failure, Task, Trajectory

OnEnd = Callable[[EpisodeWorker], None]
W = TypeVar("W", bound=EpisodeWorker)
DONE = {"code": "E.begin", "blocked_s": 0.0, "turn": turn_row(Turn((), done=True, rewards={}))}


class LateWorker:
    """A worker that starts after `seconds`, or else never. Each call ends the episode."""

    def __init__(self, seconds: float, starts: bool, on_end: Callable[[EpisodeWorker], None]):
        self.ended = self.retired = ""
        self.suspects: set[str] = set()
        self.num_episodes = 0
        self.calls: list[str] = []
        self._starts = starts
        self._on_end = on_end
        self._start = asyncio.ensure_future(asyncio.sleep(seconds))

    @property
    def is_ready(self) -> bool:
        return self._start.done()

    async def ready(self) -> None:
        await asyncio.shield(self._start)
        if not self._starts:
            self.end("no machine")
            raise WorkerEnded(self.ended)

    async def call(self, episode: int, method: str, task: Task, **fields: Any) -> Row:
        await self.ready()
        self.calls.append(method)
        return {**DONE, "busy": False}

    def release(self) -> None:
        self.num_episodes -= 1

    def end(self, reason: str) -> None:
        if not self.ended:
            self.ended = reason
            self._on_end(self)


def starter(workers: list[W], make: Callable[[OnEnd], W]) -> StartWorker:
    """Return a function that starts workers made by `make` and adds them to `workers`."""

    def start(options: Row, memory_gb: float, on_end: OnEnd) -> EpisodeWorker:
        workers.append(make(on_end))
        return workers[-1]

    return start


def test_the_start_of_a_worker_does_not_count_as_time_of_its_environment() -> None:
    """After the first worker ends, the second needs 600 s and the third finds no machine."""
    plan = iter([(0.0, True), (600.0, True), (600.0, False), (0.0, True)])
    workers: list[LateWorker] = []

    start = starter(workers, lambda on_end: LateWorker(*next(plan), on_end))
    isolated = Isolated(start=start)

    async def work() -> tuple[Failure | Trajectory, ...]:
        workers[0].end("its machine died")
        second = await isolated.play(0, timeout_s=1.0)
        workers[1].end("its machine died")
        return second, await isolated.play(0, timeout_s=1.0)

    second, third = isolated.run(work, virtual=True)
    assert isinstance(second, Trajectory)
    assert second.stop == "done"
    assert workers[1].calls == ["begin", "close"]
    assert isinstance(third, Failure)
    assert third.stage == "begin" and third.error.startswith("WorkerEnded: no machine (")
    assert workers[2].calls == []


def test_the_start_of_a_worker_does_not_count_as_time_of_an_agent() -> None:
    """The first worker takes longer than an agent may. The agent then makes no call."""
    plan = iter([(0.6, True), (0.6, False)])
    workers: list[LateWorker] = []

    start = starter(workers, lambda on_end: LateWorker(*next(plan), on_end))
    config = TaskConfig(env="tests.support.isolated_envs:agents", isolate="process", workers=1)
    tasks: Any = isolate(build_taskset(config), config, start)
    world = World(timeout_s=0.2)

    async def main() -> list[Failure | Trajectory]:
        rollout = world.rollout(tasks)
        await world.start_engine()
        outcomes = []
        async with rollout.resources:
            for number in range(2):
                task = Task("agents", "train", number)
                outcomes.append(await rollout.episode(task, env_seed=7, noise_seed=8))
                workers[-1].end("its machine died")
        return outcomes

    late, never = asyncio.run(main())
    assert isinstance(late, Failure) and isinstance(never, Failure)
    assert (late.stage, late.error) == (
        "agent",
        "EnvError: the agent ended without an answer to any call",
    )
    assert workers[0].calls == ["drive", "close"] and workers[0].num_episodes == 0
    assert never.stage == "begin" and never.error.startswith("WorkerEnded: no machine (")


class CrashingWorker(LateWorker):
    """A worker that starts at once. Its first call ends it if it `crashes`."""

    def __init__(self, crashes: bool, on_end: Callable[[EpisodeWorker], None]):
        super().__init__(0.0, True, on_end)
        self._crashes = crashes

    async def call(self, episode: int, method: str, task: Task, **fields: Any) -> Row:
        if self._crashes:
            self.suspects = {task.key}
            self.end("it crashed")
            raise WorkerEnded(self.ended)
        return await super().call(episode, method, task, **fields)


def test_a_task_is_suspected_until_one_of_its_episodes_ends_without_a_crash() -> None:
    """Two workers crash. The third runs one episode alone, and the fourth all later ones."""
    plan = iter([True, True, False, False])
    workers: list[CrashingWorker] = []

    start = starter(workers, lambda on_end: CrashingWorker(next(plan), on_end))
    isolated = Isolated(start=start)

    async def work() -> list[Failure | Trajectory]:
        return [await isolated.play(0) for _ in range(6)]

    outcomes = isolated.run(work, virtual=True)
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [True] * 2 + [False] * 4
    assert [len(worker.calls) for worker in workers] == [0, 0, 2, 6]


class FakeTaskError(ZeroDivisionError):
    """The error of a remote function. Its first line names only the function, as in Ray."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(f"ray::EnvHost.call() (pid=7)\n  File ...\n{cause!r}")
        self.cause = cause


class FakeRay:
    """The parts of Ray that a worker uses, with one machine that answers or fails as told."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=ZeroDivisionError, RayTaskError=FakeTaskError)
        self.place_error: Exception | None = None
        self.call_error: Exception | None = None
        self.placing = threading.Event()
        self.may_place = threading.Event()
        self.may_place.set()
        self.num_placed = self.num_killed = 0

    def remote(self, cls: type) -> "FakeRay":
        return self

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=self.place)

    def place(self, options: Row, memory_gb: float) -> Any:
        self.placing.set()
        assert self.may_place.wait(PATIENT_S)
        if self.place_error:
            raise self.place_error
        self.num_placed += 1
        methods = {"ping": self.answer, "start": self.answer, "call": self.call}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=work) for name, work in methods.items()}
        )

    async def answer(self) -> HostAnswer:
        return HostAnswer({}, "", "", frozenset())

    def call(self, *arguments: Any) -> Awaitable[HostAnswer]:
        if self.call_error:
            raise self.call_error
        return asyncio.get_running_loop().create_future()  # never answered

    def is_initialized(self) -> bool:
        return True

    def kill(self, host: Any) -> None:
        self.num_killed += 1

    def cancel(self, reference: Any) -> None:
        reference.cancel()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(env_hosts, "import_ray", lambda: fake)
    monkeypatch.setattr(env_hosts, "connect", lambda address: fake)
    return fake


def on_ray() -> IsolatedTasks:
    config = TaskConfig(env="tests.support.isolated_envs:Mixed", isolate="ray", workers=1)
    tasks = isolate(build_taskset(config), config, remote_workers(ClusterConfig()))
    assert isinstance(tasks, IsolatedTasks)
    return tasks


@pytest.mark.parametrize("error", [ConnectionError("lost"), TypeError("lost")])
def test_an_error_of_ray_ends_its_worker_and_the_next_episode_gets_another(
    ray: FakeRay, error: Exception
) -> None:
    tasks = on_ray()

    async def main() -> None:
        ray.place_error = error
        with pytest.raises(EnvError, match=r"no worker process can be started on .* machine: lost"):
            async with tasks:
                pass
        ray.place_error = None
        async with tasks:
            ray.call_error = RuntimeError("not connected")
            env = tasks.env(Task("mixed", "train", 0), 5)
            with pytest.raises(EnvError, match="does not answer: not connected"):
                await env.begin()
            await env.close()  # type: ignore[attr-defined]
            await tasks.workers.assign("mixed/train/0").ready()
        assert (ray.num_placed, ray.num_killed) == (2, 2)

    virtual_clock.run(main())


def test_an_error_in_the_host_of_a_worker_is_shown(ray: FakeRay) -> None:
    tasks = on_ray()

    async def main() -> None:
        async with tasks:
            ray.call_error = FakeTaskError(OSError("too many open files"))
            env = tasks.env(Task("mixed", "train", 0), 5)
            with pytest.raises(EnvError, match=r"at call: OSError: too many open files$"):
                await env.begin()
            await env.close()  # type: ignore[attr-defined]

    virtual_clock.run(main())


def test_a_worker_that_ends_while_it_gets_a_machine_returns_it(ray: FakeRay) -> None:
    tasks = on_ray()

    async def main() -> None:
        ray.may_place.clear()
        opened = asyncio.create_task(tasks.workers.open())
        assert await asyncio.to_thread(ray.placing.wait, PATIENT_S)
        tasks.workers.close()
        ray.may_place.set()
        with pytest.raises(WorkerEnded, match="the run has ended"):
            await opened
        assert (ray.num_placed, ray.num_killed) == (1, 1)

    virtual_clock.run(main())


def test_an_episode_that_is_cancelled_while_its_worker_ends_stays_cancelled(ray: FakeRay) -> None:
    tasks = on_ray()

    async def main() -> None:
        async with tasks:
            envs = [tasks.env(Task("mixed", "train", number), 5) for number in range(2)]
            both = [asyncio.create_task(env.begin()) for env in envs]  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            both[0].cancel()
            tasks.workers.close()
            cancelled, ended = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(cancelled, asyncio.CancelledError)
            assert isinstance(ended, WorkerEnded)

    virtual_clock.run(main())
