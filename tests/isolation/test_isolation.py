"""Test environments in worker processes.

Whatever an environment does to its process, its episode fails with one line that names it, the
worker is ended if it has to be, and the next episode works. A deterministic run has the same
journal as without isolation, also after a resume.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cli.test_run import quiet, small
from tests.rollout.test_external import World
from tests.rollout.test_hostile_envs import LetterChat
from tests.support import hostile_envs as hostile
from tests.support.hostile_envs import HOSTILE, ISOLATED
from tests.support.sandbox_attacks import alive
from tests.support.waits import wait_until
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.cli.main import main
from unstale.config import (
    SHIPPED_POLICY,
    CheckpointConfig,
    ConfigError,
    EngineConfig,
    RolloutConfig,
    ScheduleConfig,
    TaskConfig,
    make_task,
)
from unstale.durability import virtual_clock
from unstale.durability.compare_runs import differences
from unstale.durability.journal import Journal
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.envs.registry import build_taskset
from unstale.isolation import IsolatedTasks, isolate, process
from unstale.isolation.tasks import StartWorker, start_here
from unstale.isolation.wire import read_turn, turn_row
from unstale.records import Failure, Task, Trajectory
from unstale.rollout import episode
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.trainer.local import LocalTrainer

pytestmark = pytest.mark.usefixtures("forked_children")

T = TypeVar("T")
GOOD = 1000
"""Number of a task with a good environment."""
PATIENT_S = 30.0


class Isolated:
    """A rollout of `hostile_envs.isolated_tasks` in worker processes."""

    def __init__(
        self,
        *,
        workers: int = 1,
        retries: int = 0,
        start: StartWorker = start_here,
        memory_gb: float = 0.125,
    ) -> None:
        config = TaskConfig(
            env="tests.support.hostile_envs:isolated_tasks",
            isolate="process",
            workers=workers,
            worker_memory_gb=memory_gb,
        )
        with pytest.MonkeyPatch.context() as patch:  # the limits of workers are not those of runs
            for name in ("HELD_S", "IGNORED_S", "_TICK_S"):
                patch.setattr(hostile.guard, name, getattr(hostile.guard, name))
            tasks = isolate(build_taskset(config), config, start)
        assert isinstance(tasks, IsolatedTasks)
        self.tasks = tasks
        self.retries = retries
        self.ended: list[str] = []
        tasks.workers.on_event = lambda kind, reason, **_: self.ended.append(reason)

    async def rollout(self, timeout_s: float) -> Rollout:
        def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
            return list(map(ord, "ab."))

        engine = ScriptedEngine(say)
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        generator: Any = Generator(engine, LetterChat(), EngineConfig(max_context=64))  # type: ignore[arg-type]
        return Rollout(
            generator, self.tasks, RolloutConfig(timeout_s=timeout_s, retries=self.retries)
        )

    async def play(self, number: int, timeout_s: float = PATIENT_S) -> Failure | Trajectory:
        rollout = await self.rollout(timeout_s)
        task = Task("toy", "train", number)
        return await rollout.episode(task, env_seed=7, noise_seed=8)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], *, virtual: bool = False) -> T:
        async def main() -> T:
            async with self.tasks:
                return await work()

        return virtual_clock.run(main(), virtual=virtual)


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    """Shorten the seconds after which workers are ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "SILENT_S", 8.0)
        patch.setattr(process, "TICK_S", 0.2)
        patch.setattr(process, "MAX_THREADS", 30)
        patch.setattr(episode, "CLOSE_S", 2.0)
        yield


def at(kind: type) -> int:
    """Return the number of the task with this environment."""
    return ISOLATED.index(kind)


TIMED_OUT = {
    hostile.SwallowsCancellation,
    hostile.AwaitsATaskThatSwallows,
    hostile.PlainAndEndless,
}
ENDS_WORKER = {
    hostile.IgnoresInterruptions: "the environment of toy/train/13 has blocked the event",
    hostile.HoldsTheLock: "gave no sign of life for 8 s during step of toy/train/14 in ",
    hostile.Crashes: "ended with SIGSEGV during step of toy/train/15 in ",
    hostile.Exits: "a worker process ended with exit code 3 during step of toy/train/16",
    hostile.ExitsInATask: "ended with exit code 1 during step of toy/train/17: SystemExit: no",
    hostile.ClosesDescriptors: "during step of toy/train/18",
    hostile.SendsRubbish: "a worker process sent a wrong message during step of toy/train/19",
    hostile.SendsALongFrame: "a message of 9,187,201,95",
    hostile.LeavesAProgram: "a worker process ended with exit code 0 during step of toy/train/26",
    hostile.HoldsMemory: "GB of memory during step of toy/train/22; task.worker_memory_gb is 0.125",
}
"""Environments that end their worker, and a part of the message."""
MESSAGES = {
    hostile.LongText: "100,000,000 characters; with task.isolate = process at most 8,388,608",
    hostile.ManyMessages: "Turn.messages has 100,000 messages; with task.isolate = process",
    hostile.SwallowsCancellation: "TimeoutError: no answer within 1 s",
    hostile.AwaitsATaskThatSwallows: "TimeoutError: no answer within 1 s",
    hostile.PlainAndEndless: "TimeoutError: no answer within 1 s (tests/support/hostile_envs.py, ",
    hostile.NeverCloses: "TimeoutError: no answer within 2 s",
    hostile.NotJson: "cannot be sent to the run as JSON: Object of type set",
}
"""Messages that differ from those of the same environments in the run's process."""
DO_NOT_FAIL = (hostile.LeaksThreads, hostile.Waits, hostile.CancelsEverything)


@pytest.fixture(scope="module")
def outcomes() -> dict[type, tuple[Failure | Trajectory, list[str]]]:
    """Play one episode of each environment, each followed by a good one on the same rollout.

    Two rollouts play at the same time, because most environments only wait until their time is up.
    """
    found: dict[type, tuple[Failure | Trajectory, list[str]]] = {}

    async def play(world: Isolated, kinds: Sequence[type]) -> None:
        async with world.tasks:
            for kind in kinds:
                num_ended = len(world.ended)
                outcome = await world.play(at(kind), 1.0 if kind in TIMED_OUT else PATIENT_S)
                good = await world.play(GOOD + at(kind))
                assert isinstance(good, Trajectory) and good.reward == 1.0, (kind, good)
                found[kind] = outcome, world.ended[num_ended:]

    async def main() -> None:
        await asyncio.gather(play(Isolated(), ISOLATED[::2]), play(Isolated(), ISOLATED[1::2]))

    virtual_clock.run(main(), virtual=False)
    return found


STAGES = {kind: (stage, message) for kind, stage, message in HOSTILE}


@pytest.mark.costly
@pytest.mark.parametrize("kind", [each for each in ISOLATED if each not in DO_NOT_FAIL])
def test_a_bad_environment_fails_alone_with_one_line_that_names_it(
    kind: type, outcomes: dict[type, tuple[Failure | Trajectory, list[str]]]
) -> None:
    outcome, ended = outcomes[kind]
    stage, message = STAGES.get(kind, ("step 1", ""))
    message = {**ENDS_WORKER, **MESSAGES}.get(kind, message)
    assert isinstance(outcome, Failure)
    assert (outcome.stage, message in outcome.error) == (stage, True), outcome
    assert len(outcome.error) < 500 and outcome.error.isprintable()
    if kind in ENDS_WORKER:
        assert len(ended) == 1 and message in ended[0]


def test_a_worker_with_a_call_or_threads_that_never_end_is_replaced(
    outcomes: dict[type, tuple[Failure | Trajectory, list[str]]],
) -> None:
    for kind in (hostile.SwallowsCancellation, hostile.PlainAndEndless, hostile.NeverCloses):
        assert outcomes[kind][1] == [f"the environment of toy/train/{at(kind)} does not end"]
    outcome, ended = outcomes[hostile.LeaksThreads]
    assert isinstance(outcome, Trajectory)
    assert len(ended) == 1 and ended[0].startswith("environments have left threads")


@pytest.mark.costly
def test_episodes_beside_a_crash_fail_once_and_then_work() -> None:
    """The task that crashed gets a worker of its own, so it ends no other episode again."""
    world = Isolated(retries=1)
    bad = at(hostile.Crashes)

    async def main() -> list[Failure | Trajectory]:
        waiting = [world.play(at(hostile.Waits)), world.play(GOOD)]
        return await asyncio.gather(*waiting, world.play(bad), world.play(bad))

    *good, one, two = world.run(main)
    assert all(isinstance(outcome, Trajectory) for outcome in good), good
    assert all(isinstance(outcome, Failure) for outcome in (one, two))
    assert all("SIGSEGV during" in reason for reason in world.ended) and len(world.ended) == 3


def test_under_a_virtual_clock_a_bad_environment_fails_alone_too() -> None:
    world = Isolated()
    kinds = [hostile.Crashes, hostile.Sleeps, hostile.SwallowsCancellation]

    async def main() -> list[Failure | Trajectory]:
        bad = [await world.play(at(kind)) for kind in kinds]
        return [*bad, await world.play(GOOD)]

    crashed, blocked, endless, good = world.run(main, virtual=True)
    assert isinstance(crashed, Failure) and "ended with SIGSEGV during step" in crashed.error
    assert isinstance(blocked, Failure) and "EventLoopBlocked" in blocked.error
    assert isinstance(endless, Failure) and "no answer within 30 s" in endless.error
    assert isinstance(good, Trajectory)


def test_an_answer_too_long_for_one_message_fails_alone() -> None:
    world = Isolated(memory_gb=2.0)

    async def main() -> list[Failure | Trajectory]:
        return await asyncio.gather(world.play(at(hostile.Waits)), world.play(len(ISOLATED)))

    good, long = world.run(main)
    assert isinstance(good, Trajectory) and not world.ended
    assert isinstance(long, Failure) and long.stage == "step 1"
    assert long.error.startswith("EnvError: its answer cannot be sent to the run as JSON: it takes")
    assert long.error.endswith("with task.isolate = process at most 67,108,864 are allowed")


def test_code_that_cancels_the_calls_of_others_is_named() -> None:
    world = Isolated()

    async def main() -> list[Failure | Trajectory]:
        waiting, canceller = at(hostile.Waits), at(hostile.CancelsEverything)
        return await asyncio.gather(world.play(waiting), world.play(canceller))

    cancelled, _ = world.run(main)
    assert isinstance(cancelled, Failure) and not world.ended
    name = f"the environment of toy/train/{at(hostile.CancelsEverything)}"
    assert cancelled.error == f"EnvError: {name} cancelled its task"


def test_programs_of_an_environment_end_with_its_worker_and_no_worker_outlives_the_run() -> None:
    world = Isolated(workers=3)
    seen: list[int] = []

    async def main() -> None:
        seen.extend(each._process.pid for each in world.tasks.workers._shared)
        assert isinstance(await world.play(GOOD), Trajectory)
        assert isinstance(await world.play(at(hostile.LeavesAProgram)), Failure)

    world.run(main)
    wait_until(lambda: not alive("unstale-left"), "the end of a killed process")
    assert len(seen) == 3
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]


MIXED = "tests.support.isolated_envs:Mixed"


def mixed(folder: Path, isolation: str) -> Any:
    return small(
        folder,
        max_steps=4,
        deterministic=True,
        task=TaskConfig(env=MIXED, isolate=isolation),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=3),
        checkpoint=CheckpointConfig(interval=2),
    )


@pytest.mark.costly
def test_a_deterministic_run_is_the_same_with_isolation_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain functions, coroutines, delays, threads, combined rewards and snapshots."""
    whole = session.train(mixed(tmp_path / "whole", "none"), console=quiet())
    config = mixed(tmp_path / "isolated", "process")
    num_steps = 0
    real = LocalTrainer.step

    def step(self: LocalTrainer) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise OSError("the disk is gone")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "step", step)
        with pytest.raises(RunFailed, match="the disk is gone"):
            session.train(config, console=quiet())
    resumed = session.resume(config.runs / config.name, config, console=quiet())
    assert differences(whole.folder, resumed.folder) == []
    with Journal.read(resumed.folder) as journal:
        assert journal.rows("SELECT count(*) FROM snapshots")[0][0] > 0
        assert journal.rows("SELECT count(*) FROM failures")[0][0] == 0
    assert "eval/success_rate" in resumed.metrics[-1]


def test_an_external_agent_runs_in_a_worker() -> None:
    config = TaskConfig(env="tests.support.isolated_envs:agents", isolate="process")
    tasks: Any = isolate(build_taskset(config), config)
    world = World()

    async def main() -> Failure | Trajectory:
        rollout = world.rollout(tasks)
        await world.start_engine()
        async with rollout.resources:
            return await rollout.episode(Task("agents", "train", 0), env_seed=7, noise_seed=8)

    trajectory = asyncio.run(main())
    assert isinstance(trajectory, Trajectory), trajectory
    assert trajectory.num_turns == 2
    assert trajectory.rewards.keys() == {"right", "process"}
    assert trajectory.rewards["process"] not in (0, os.getpid())


@pytest.mark.costly
def test_an_evaluation_runs_environments_in_workers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(SHIPPED_POLICY), "calculator", "--eval.tasks", "2", "--json"]
    words += ["--task.env", "tests.support.isolated_envs:WhereTasks", "--task.isolate", "process"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--engine.max_completion_tokens", "2"])
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["avg@1"]["value"] == 1.0


def test_a_task_set_that_workers_cannot_make_ends_the_run_with_one_line(tmp_path: Path) -> None:
    name = "tests.support.isolated_envs:cannot_be_made_in_a_worker"
    config = small(tmp_path, task=TaskConfig(env=name, isolate="process"))
    with pytest.raises(RunFailed) as failed:
        session.train(config, console=quiet())
    text = str(failed.value)
    assert text.startswith("WorkerEnded: a worker process cannot make the task set: ConfigError: ")
    assert "OSError: no licence" in text and "\n" not in text


def test_options_of_workers_need_isolation_and_code_of_a_module() -> None:
    with pytest.raises(ConfigError, match=r"task\.workers is an option of process"):
        make_task("retail", workers=3)
    with pytest.raises(ConfigError, match=r"task\.isolate cannot be 'proces'; did you mean"):
        make_task("retail", isolate="proces")
    config = TaskConfig(env="__main__:Tasks", isolate="process")
    with pytest.raises(ConfigError, match=r"__main__:Tasks cannot be used with task\.isolate"):
        isolate(build_taskset(TaskConfig(env=MIXED)), config)
    assert isolate(tasks := build_taskset(TaskConfig(env=MIXED)), TaskConfig(env=MIXED)) is tasks


GOOD_TURN = turn_row(Turn((Message("user", "hi"),), reward=0.5, facts={"calls": 2.0}))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": None, "tool_calls": [], "thoughts": ""}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{**GOOD_TURN["messages"][0], "tool_calls": [{"name": "buy"}]}]},
        {"done": 1},
        {"rewards": [1.0]},
        {"rewards": {"right": "1"}},
        {"reward": None},
        {"facts": {"calls": float("nan")}},
    ],
)
def test_a_turn_with_a_field_of_a_wrong_type_is_refused(change: dict[str, Any]) -> None:
    assert turn_row(read_turn(GOOD_TURN)) == GOOD_TURN
    with pytest.raises(ValueError):
        read_turn({**GOOD_TURN, **change})
