"""Test environments that do harm, each with its expected end.

Whatever `begin`, `step` and `close` raise, return or do to the event loop, the episode fails with
one bounded line, and the next episode works. Code that blocks the event loop is named. A task set
that cannot be used is refused with one line before the run starts.
"""

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.cli.test_run import quiet, small
from tests.support.hostile_envs import (
    HOSTILE,
    CancelsEverything,
    Env,
    ReturnsNothing,
    Sleeps,
    SwallowsCancellation,
)
from tests.support.waits import wait_until
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.config import ConfigError, EngineConfig, RolloutConfig, TaskConfig
from unstale.durability import virtual_clock
from unstale.durability.resume import ResumeState
from unstale.durability.run_folder import read_jsonl
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import (
    EnvError,
    Message,
    NumberedTasks,
    Turn,
    guard,
    hooks,
    registry,
    tool_schema,
)
from unstale.envs.registry import build_taskset, check_taskset, held_out_tasks
from unstale.records import Failure, Task, Trajectory
from unstale.rollout import episode, timeouts
from unstale.rollout.episode import Rollout
from unstale.rollout.failures import TooManyFailures
from unstale.rollout.generator import Generator
from unstale.rollout.selection import training_requests

pytestmark = pytest.mark.usefixtures("forked_children")

TASK = Task("toy", "train", 1)


class LetterChat:
    """A chat with one token per letter. A full stop ends a reply."""

    stop_tokens = (ord("."),)
    longest_token = 1

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)

    def encode_continuation(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[object] = ()
    ) -> tuple[int, ...]:
        return self.encode_prompt(messages)

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "".join(map(chr, tokens)))


class Tasks:
    """A task set with one hostile environment, then good ones."""

    name = "toy"
    tools = ()

    def __init__(self, *hostile: Any) -> None:
        self.made = [*hostile]

    def env(self, task: Task, seed: int) -> Any:
        return self.made.pop(0)() if self.made else Env()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the seconds after which user code is interrupted or abandoned."""
    monkeypatch.setattr(guard, "HELD_S", 0.6)
    monkeypatch.setattr(guard, "_TICK_S", 0.1)
    monkeypatch.setattr(episode, "CLOSE_S", 0.3)
    for module in (guard, timeouts):
        monkeypatch.setattr(module, "CANCEL_INTERVAL_S", 0.05)
    monkeypatch.setattr(timeouts, "END_S", 0.2)


def play(
    *hostile: Any, timeout_s: float = 0.4, virtual: bool = False
) -> tuple[Failure | Trajectory, list[str]]:
    """Run an episode of each environment, then a good one. Return the first one's outcome.

    Also returns the code that was reported to block the event loop.
    """
    blocked: list[str] = []

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return list(map(ord, "ab."))

    async def main() -> Failure | Trajectory:
        engine = ScriptedEngine(say)
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        generator: Any = Generator(engine, LetterChat(), EngineConfig(max_context=64))  # type: ignore[arg-type]
        config = RolloutConfig(timeout_s=timeout_s, retries=0)
        tasks: Any = Tasks(*hostile)
        rollout = Rollout(
            generator, tasks, config, on_blocked=lambda name, seconds: blocked.append(name)
        )
        first, *_, last = [
            await rollout.episode(TASK, env_seed=7, noise_seed=8) for _ in (*hostile, Env)
        ]
        assert isinstance(last, Trajectory) and last.reward == 1.0
        return first

    return virtual_clock.run(main(), virtual=virtual), blocked


def failure(hostile: type[Env], timeout_s: float = 0.4) -> Failure:
    outcome, _ = play(hostile, timeout_s=timeout_s)
    assert isinstance(outcome, Failure) and outcome.task == TASK
    assert len(outcome.error) < 500 and outcome.error.isprintable()
    return outcome


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit(), "GeneratorExit: "),
        (BaseException("base"), "BaseException: base"),
        (asyncio.CancelledError(), "CancelledError: "),
        (StopAsyncIteration(), "StopAsyncIteration: "),
        (MemoryError(), "MemoryError: "),
        (RecursionError("deep"), "RecursionError: deep"),
        (ExceptionGroup("two", [ValueError("one")]), "ExceptionGroup: two (1 sub-exception)"),
        (ValueError("x" * 5_000_000), "... (5,000,000 characters)"),
        (ValueError("a\n\nb\x1b]0;title"), r"ValueError: a b\x1b]0;title"),
        (Unprintable(), "Unprintable: (its text cannot be shown"),
    ],
)
@pytest.mark.parametrize("place", ["env", "begin", "step", "plain_step", "close"])
def test_any_error_fails_the_episode_with_one_line(
    error: BaseException, message: str, place: str
) -> None:
    class Hostile(Env):
        def __init__(self) -> None:
            self.raise_in("env")

        def raise_in(self, here: str) -> None:
            if here == place:
                raise error

        async def begin(self) -> Turn:
            self.raise_in("begin")
            return await super().begin()

        async def step(self, reply: Message) -> Turn:
            self.raise_in("step")
            return await super().step(reply)

        async def close(self) -> None:
            self.raise_in("close")

    if place == "plain_step":
        Hostile.step = lambda self, reply: self.raise_in("plain_step")  # type: ignore[method-assign, assignment, return-value]
    failed = failure(Hostile, timeout_s=60)
    assert message.strip() in failed.error
    stages = {"env": "begin", "step": "step 1", "plain_step": "step 1"}
    assert failed.stage == stages.get(place, place)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("rewards", None, "a finite number or numbers by name, got None"),
        ("rewards", "good", "got 'good'"),
        ("rewards", {"right": None}, "Turn.rewards['right'] must be a finite number, got None"),
        ("rewards", {"right": float("nan")}, "got nan"),
        ("rewards", {"right": numpy.ones(2)}, "got array([1., 1.])"),
        ("rewards", {"right": 10**400}, "must be a finite number, of at most 1e+15, got 1000"),
        ("rewards", 1e308, "a finite number or numbers by name, of at most 1e+15, got 1e+308"),
        ("rewards", Decimal("nan"), "got Decimal('NaN')"),
        ("facts", {"bytes": 1e308}, "must be a finite number, of at most 1e+300, got 1e+308"),
        ("reward", "1", "Turn.reward must be a finite number, got '1'"),
        ("facts", 3.0, "Turn.facts must be numbers by name, got 3.0"),
        ("facts", {"calls": "two"}, "Turn.facts['calls'] must be a finite number, got 'two'"),
        ("messages", (Message("assistant2", ""),), "developer, user, assistant, tool, got 'ass"),  # type: ignore[arg-type]
        ("messages", "hello", "Turn.messages must be a tuple of Message(role, content)"),
        ("messages", ({"role": "user"},), "got {'role': 'user'}"),
        ("messages", (Message("user", None),), "with content as text"),  # type: ignore[arg-type]
    ],
)
def test_wrong_fields_of_a_turn_are_named(field: str, value: Any, shown: str) -> None:
    with pytest.raises(EnvError) as error:
        Turn(**{"messages": (), "done": True, field: value})
    assert shown in str(error.value) and f"Turn.{field}" in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        1.0,
        Decimal("1.0"),
        numpy.float32(1),
        numpy.int64(1),
        numpy.array(1.0),
        torch.tensor(1.0),
    ],
)
def test_scalars_of_any_library_are_numbers(value: Any) -> None:
    turn = Turn((), done=True, rewards=value, reward=value, facts={"f": value})
    assert turn == Turn((), done=True, rewards={"reward": 1.0}, reward=1.0, facts={"f": 1.0})
    assert {type(number) for number in (turn.reward, *turn.rewards.values())} == {float}


@pytest.mark.parametrize(("hostile", "stage", "message"), HOSTILE)
def test_an_environment_that_holds_the_run_fails_alone(
    hostile: type[Env], stage: str, message: str
) -> None:
    failed = failure(hostile)
    assert (failed.stage, message in failed.error) == (stage, True), failed


def test_leaked_tasks_and_threads_do_not_hold_the_end() -> None:
    never = threading.Event()

    class Leaks(Env):
        async def step(self, reply: Message) -> Turn:
            self.left = [
                asyncio.create_task(SwallowsCancellation().step(reply)),
                asyncio.create_task(asyncio.to_thread(never.wait)),
            ]
            await asyncio.sleep(0.05)
            return await super().step(reply)

    outcome, _ = play(Leaks)
    assert isinstance(outcome, Trajectory)
    never.set()  # the interpreter waits for threads of a pool


def test_blocking_code_is_reported_once_by_name() -> None:
    class Blocks(Env):
        async def step(self, reply: Message) -> Turn:
            time.sleep(0.25)  # noqa: ASYNC251 - it blocks the event loop
            return await super().step(reply)

    class Rewards(Blocks):
        code_name = "the reward function slow"

    outcome, blocked = play(Blocks, Blocks, Rewards)
    assert isinstance(outcome, Trajectory)
    assert blocked == ["the environment of toy", "the reward function slow of toy"]


def test_code_that_waits_for_a_processor_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no processor on a busy machine looks as if its code slept."""

    class Slow(Env):
        async def step(self, reply: Message) -> Turn:
            time.sleep(1.2)  # noqa: ASYNC251 - it blocks the event loop
            return await super().step(reply)

    interrupted, _ = play(Slow, timeout_s=60)
    assert isinstance(interrupted, Failure) and "blocked the event loop" in interrupted.error
    monkeypatch.setattr(guard, "queued_s", lambda thread: time.monotonic())
    outcome, blocked = play(Slow, timeout_s=60)
    assert isinstance(outcome, Trajectory) and not blocked


@pytest.mark.parametrize("virtual", [False, True])
def test_plain_methods_run_in_one_thread_of_their_own(virtual: bool) -> None:
    threads: list[threading.Thread] = []

    class Plain:
        def begin(self) -> Turn:
            threads.append(threading.current_thread())
            time.sleep(0.25)
            return Turn((Message("user", "hi"),))

        def step(self, reply: Message) -> Turn:
            threads.append(threading.current_thread())
            return Turn((), done=True, rewards=1.0)  # type: ignore[arg-type]

        def close(self) -> None:
            threads.append(threading.current_thread())

    outcome, blocked = play(Plain, virtual=virtual, timeout_s=60)
    assert isinstance(outcome, Trajectory) and not blocked
    assert len(threads) == 3 and len(set(threads)) == 1
    assert threads[0] is not threading.main_thread() and threads[0].daemon


class Listed(NumberedTasks):
    """A task set with `changes` to its attributes."""

    name = "listed"
    tools = (tool_schema("add", "Add.", {}),)

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)

    def env(self, task: Task, seed: int) -> Env:
        return Env()


def broken(*_: Any) -> Iterator[Task]:
    raise SystemExit("no data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": (print,)}, "a tool of listed has no schema: <built-in function print>"),
        ({"tools": ({"name": "add"},)}, "a tool of listed has no schema: {'name': 'add'}"),
        ({"tools": 3}, "the tools of listed cannot be read: TypeError"),
        ({"train": lambda seed: iter([TASK] * 3)}, "ended after 3 tasks; it must be endless"),
        ({"train": lambda seed: [{"index": 1}]}, "gave {'index': 1}; it must give unstale"),
        ({"train": broken}, r"train\(0\) of listed failed: SystemExit: no data \(.*test_hostile"),
        ({"held_out": broken}, r"held_out\(4\) of listed failed: SystemExit: no data"),
        ({"held_out": lambda count: [1]}, r"held_out\(4\) of listed gave 1; it must give"),
    ],
)
def test_a_task_set_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str) -> None:
    check_taskset(Listed(), 0, 50)
    with pytest.raises(ConfigError, match=message):
        check_taskset(Listed(**changes), 0, 50)
        held_out_tasks(Listed(**changes), 4)


def test_a_factory_that_raises_is_refused_with_its_place() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be made: SystemExit: no data \(.*test_hostile.*\d"
    ):
        build_taskset(TaskConfig(env=f"{__name__}:broken"))


def hostile_tasks() -> Listed:
    return Listed(env=lambda task, seed: CancelsEverything())


@pytest.mark.costly
def test_a_run_whose_tasks_are_all_cancelled_names_the_environment(tmp_path: Path) -> None:
    config = small(tmp_path, task=TaskConfig(env=f"{__name__}:hostile_tasks"))
    with pytest.raises(
        RunFailed, match=r"^the environment of listed/.* cancelled the tasks of the"
    ):
        session.train(config, console=quiet())


@pytest.mark.parametrize("rewards", ["good", {"right": None}])
def test_an_error_in_a_field_of_a_turn_has_the_line_of_the_user(rewards: Any) -> None:
    def step() -> Turn:
        return Turn((), rewards=rewards)

    with pytest.raises(EnvError) as error:
        step()
    line = step.__code__.co_firstlineno + 1
    file = Path(__file__).relative_to(Path.cwd())
    assert guard.describe(error.value).endswith(f"({file}, line {line}, in step: {RETURN})")


RETURN = "return Turn((), rewards=rewards)"


def test_a_result_that_is_no_turn_names_class_and_line() -> None:
    caller = hooks.EnvCaller(ReturnsNothing(), "x", lambda caller, seconds: None)

    async def main() -> None:
        await caller.turn(caller.env.step, Message("assistant", ""))

    line = ReturnsNothing.step.__code__.co_firstlineno
    shown = (
        rf"ReturnsNothing\.step\(\) must return a Turn, got None \(.*, line {line}, in step: .*def"
    )
    with pytest.raises(EnvError, match=shown):
        asyncio.run(main())


def no_taskset() -> object:
    return type("MyTasks", (), {"name": "mine", "train": print, "env": print})()


def test_all_that_a_task_set_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"MyTasks has no held_out, tools; unstale.envs.Taskset"):
        build_taskset(TaskConfig(env=f"{__name__}:no_taskset"))


def failing_tasks() -> Listed:
    return Listed(env=lambda task, seed: ReturnsNothing())


def test_a_trial_episode_ends_a_run_whose_environment_always_fails(tmp_path: Path) -> None:
    config = small(tmp_path, task=TaskConfig(env=f"{__name__}:failing_tasks"))
    config = replace(config, rollout=RolloutConfig(retries=0))
    with pytest.raises(RunFailed, match=r"trial episodes .* on 3 tasks; .* must return a Turn"):
        session.train(config, console=quiet())
    events = [row["kind"] for row in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert events.count("episode_failed") == 3 and "eval" not in events


IGNORES_ALL = """
import time
from unstale.durability import virtual_clock
from unstale.envs import guard

guard.HELD_S, guard.IGNORED_S, guard._TICK_S = 0.5, 0.5, 0.1

async def step():
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass

async def main():
    await guard.Watched(step(), "the environment of toy/train/1", print)

virtual_clock.run(main(), on_stuck=print)
"""


def run_python(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_code_that_ignores_interruptions_ends_the_process_by_name() -> None:
    result = run_python(IGNORES_ALL)
    assert result.returncode == 1 and result.stderr == ""
    assert "the environment of toy/train/1 has blocked the event loop" in result.stdout
    assert "ignores interruptions, so the process ends" in result.stdout


BLOCKS = """
import asyncio, os, sys, time
from pathlib import Path
from unstale.durability import virtual_clock
from unstale.durability.run_folder import RunLog
from unstale.envs.guard import Watched
from unstale.stop_signals import stop_signals

async def step():
    print("blocks", flush=True)
    while True:
        try:
            time.sleep(3600)
        except Exception:
            pass

async def main():
    await asyncio.gather(*(Watched(step(), "the environment", print) for _ in range(9)))

log = RunLog.create(Path(sys.argv[1]), {})

def on_end():
    log.write_last_event("stopped", reason="Ctrl-C")

with stop_signals("; to continue: unstale train", on_end):
    virtual_clock.run(main())
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_blocked_run_at_once(by: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKS, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout and process.stdout.readline() == "blocks\n"
        process.send_signal(by)
        time.sleep(0.5)  # signals that arrive together count as one
        assert process.poll() is None  # the first one waits for the environment
        process.send_signal(by)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended at once by a second signal; to continue: unstale train" in errors
    (last,) = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert (last["kind"], last["reason"]) == ("stopped", "Ctrl-C")


def test_a_run_ends_when_user_code_has_blocked_it_three_times_and_names_the_line() -> None:
    async def main() -> None:
        for _ in range(5):
            with suppress(guard.EventLoopBlocked):
                await guard.Watched(Sleeps().step(Message("assistant", "")), "it", lambda s: None)
            guard.OCCUPANCY.require_few_interruptions()

    line = r"hostile_envs\.py, line \d+ \(step\)\. Advice: make it a plain function"
    with pytest.raises(
        guard.RunBlocked,
        match=rf"blocked all episodes 3 times. The last: it blocked .* in .*{line}",
    ):
        virtual_clock.run(main())


def test_hooks_of_a_task_set_that_never_return_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PREPARE_S", 0.6)
    for hook in ("train", "held_out"):
        with pytest.raises(ConfigError, match=rf"{hook}\(\) of listed: .* in .*test_hostile_envs"):
            check_taskset(Listed(**{hook: hang}), 0, 50)
            held_out_tasks(Listed(**{hook: hang}), 4)


@pytest.mark.parametrize("stage", ["import", "factory"])
def test_a_task_set_that_is_never_made_is_named(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = "import time\ntime.sleep(3600)\n"
    text = sleep if stage == "import" else "def make():\n    import time\n    time.sleep(3600)\n"
    (tmp_path / f"never_{stage}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "LOAD_S", 0.3)
    where = rf"blocked the event loop for more than 0.3 s in .*never_{stage}.py, line [23]"
    name = r"the import of never_import" if stage == "import" else r"never_factory:make\(\)"
    with pytest.raises(ConfigError, match=rf"^{name}: it {where}.*make it quicker"):
        build_taskset(TaskConfig(env=f"never_{stage}:make"))


class SlowError(Exception):
    def __str__(self) -> str:
        time.sleep(3600)
        return ""


def test_a_slow_text_of_an_error_is_named_and_the_event_loop_runs_meanwhile() -> None:
    class Raises(Env):
        async def step(self, reply: Message) -> Turn:
            raise SlowError

    failed, blocked = play(Raises, timeout_s=60)
    assert isinstance(failed, Failure) and not blocked
    assert "str() of a SlowError gave no result within 0.6 s" in failed.error
    assert "in step: raise SlowError" in failed.error

    async def main() -> tuple[str, int]:
        ticks, text = 0, asyncio.ensure_future(guard.describe_apart(SlowError()))
        while not text.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return text.result(), ticks

    text, ticks = virtual_clock.run(main())
    assert "SlowError gave no result" in text and ticks > 5
    with pytest.raises(ExceptionGroup) as raised:
        try:
            Turn(messages=[], reward="much")  # type: ignore[call-overload]
        except Exception as error:
            raise ExceptionGroup("all", [error]) from error
    shown = guard.traceback_text(raised.value)
    assert shown.count("Turn(messages") == 2 and "<string>" not in shown
    assert guard.traceback_text(SlowError()).startswith("SlowError: a traceback gave no result")


@pytest.mark.parametrize("method", ["__aenter__", "__aexit__"])
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("waits", "did not return within 0.2 s"),
        ("swallows", "did not return within 0.2 s"),
        ("sleeps", "blocked the event loop for more than 0.6 s in .*test_hostile_envs"),
        ("raises", r"OSError: no server \(.*test_hostile_envs"),
    ],
)
def test_entering_and_leaving_a_task_set_is_limited_and_named(
    method: str, kind: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def misbehave(*_: Any) -> None:
        if kind == "sleeps":
            time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop
        if kind == "raises":
            raise OSError("no server")
        while True:
            with suppress(asyncio.CancelledError if kind == "swallows" else KeyError):
                await asyncio.Event().wait()

    async def nothing(*_: Any) -> None: ...

    hooks = {"__aenter__": nothing, "__aexit__": nothing, method: misbehave}
    taskset = type("Served", (Listed,), hooks)()

    async def main() -> None:
        async with Rollout(None, taskset, RolloutConfig()).resources:  # type: ignore[arg-type]
            await asyncio.sleep(0)

    monkeypatch.setattr(episode, "EXIT_S", 0.2 if kind != "sleeps" else 5.0)
    monkeypatch.setattr(episode, "ENTER_S", 0.2 if kind != "sleeps" else 5.0)
    with pytest.raises(EnvError, match=rf"{method}\(\) of listed: .*{problem}"):
        virtual_clock.run(main())


def test_what_a_task_set_sets_on_entering_holds_in_the_run() -> None:
    session: ContextVar[str] = ContextVar("session")
    tasks: list[object] = []

    class Served(Listed):
        async def __aenter__(self) -> None:
            session.set("open")
            tasks.append(asyncio.current_task())

        async def __aexit__(self, *_: object) -> None:
            tasks.append(asyncio.current_task())

    async def main() -> str:
        async with Rollout(None, Served(), RolloutConfig()).resources:  # type: ignore[arg-type]
            return session.get()

    assert virtual_clock.run(main()) == "open" and tasks[0] is tasks[1]


def hang(*_: Any) -> Any:
    time.sleep(3600)


class SlowTurn(Turn):
    messages = property(hang)  # type: ignore[assignment]

    def __init__(self) -> None: ...


class SlowRepr:
    __repr__ = hang


class HasSlowProperty(Env):
    snapshot = property(hang)


class SlowSnapshot(Env):
    snapshot = resume = hang


class HangsInEnv(Env):
    def __init__(self) -> None:
        hang()


class ReturnsSlow(Env):
    def __init__(self, kind: type) -> None:
        self.kind = kind

    async def step(self, reply: Message) -> Turn:
        return self.kind()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (HangsInEnv, "env() of toy"),
        (HasSlowProperty, "env() of toy"),
        (SlowSnapshot, "snapshot() of the environment of toy/train/1"),
        (partial(ReturnsSlow, SlowTurn), "the result of step() of the environment of toy/train/1"),
        (partial(ReturnsSlow, SlowRepr), "the result of step() of the environment of toy/train/1"),
    ],
)
@pytest.mark.parametrize("virtual", [False, True])
def test_hooks_that_hang_are_named_and_leave_the_event_loop_free(
    make: Any, name: str, virtual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_hung", [])
    monkeypatch.setattr(hooks, "THREAD_S", 0.6)
    failed, blocked = play(make, virtual=virtual)
    assert isinstance(failed, Failure) and not blocked
    place = r"tests/rollout/test_hostile_envs\.py, line \d+"
    found = rf"TimeoutError: no answer within 0\.4 s \({re.escape(name)}: {place}, in hang: time"
    if virtual:  # no other episode can run meanwhile
        found = rf"{re.escape(name)}: it blocked the event loop for more than 0\.6 s in .*{place}"
    assert re.search(found, failed.error), failed.error
    assert guard.num_hung() == 1


LEAKS_A_THREAD = """
import sys, threading
from unstale.cli import failures, main

failures.EXIT_S = 0.2
threading.Thread(target=threading.Event().wait, name="leaked").start()
sys.argv = ["unstale", "trian"]
main.main()
"""


def test_a_leaked_thread_does_not_keep_the_process() -> None:
    result = run_python(LEAKS_A_THREAD)
    assert result.returncode == 2 and "unknown command 'trian'" in result.stderr
    assert "threads of user code never end: leaked" in result.stderr


class HooksHang(NumberedTasks):
    """Its `combine` sleeps, and its `__aexit__` ignores every cancellation."""

    name = "hangs"
    tools = ()

    def combine(self, rewards: Any) -> float:
        time.sleep(3600)
        return 0.0

    def env(self, task: Task, seed: int) -> Any:
        return Env()

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        while True:
            with suppress(BaseException):
                await asyncio.Event().wait()


def test_slow_hooks_of_a_task_set_are_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXIT_S", "CANCEL_INTERVAL_S"):
        monkeypatch.setattr(episode, name, 0.05)
    generator: Any = None
    rollout = Rollout(generator, HooksHang(), RolloutConfig())

    async def combine() -> None:
        with episode.stage("step 1", 0.05):
            await rollout.combine(Turn((), done=True, rewards={"right": 1.0}))

    async def leave() -> None:
        async with rollout.resources:
            pass

    with pytest.raises(episode.EpisodeFailed, match=r"^step 1$") as failed:
        virtual_clock.run(combine())
    assert "0.05 s (combine() of hangs: tests/" in guard.describe(
        failed.value.__cause__ or failed.value
    )
    with pytest.raises(EnvError, match=r"^__aexit__\(\) of hangs: did not return within 0.05 s"):
        virtual_clock.run(leave())


@pytest.mark.parametrize("hook", ["train", "identity"])
def test_a_task_set_that_hangs_while_tasks_are_drawn_ends_the_run_by_name(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop runs meanwhile."""
    monkeypatch.setattr(hooks, "THREAD_S", 0.3)
    ticks = 0

    async def main() -> None:
        nonlocal ticks
        tasks: Any = Listed(**{hook: hang})
        requests = training_requests(
            tasks, 0, ResumeState(), identify=hooks.Identities(tasks), skipped=()
        )
        drawn = asyncio.ensure_future(anext(requests))
        while not drawn.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await drawn

    place = r"tests/rollout/test_hostile_envs\.py, line \d+, in hang: time"
    with pytest.raises(EnvError, match=rf"^no result within 0.3 s \({hook}\(\) of listed: {place}"):
        virtual_clock.run(main())
    assert ticks > 5


def test_hooks_of_many_episodes_leave_few_threads() -> None:
    async def main() -> None:
        tasks: Any = Tasks()
        made = [hooks.make_env(tasks, TASK, 0, lambda *_: None) for _ in range(100)]
        assert len(await asyncio.gather(*made)) == 100

    before = threading.active_count()
    virtual_clock.run(main())
    wait_until(lambda: threading.active_count() <= before + hooks.MAX_IDLE, "the end of threads")


def test_threads_of_functions_that_never_return_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that computes is interrupted. One that waits in the system is counted."""
    monkeypatch.setattr(guard, "_hung", [])
    computes, waits = guard.OwnThread(), guard.OwnThread()
    release = os.pipe()
    started = threading.Event()
    endless = computes.submit(lambda: [n for n in itertools.count() if n < 0 or started.set()])
    waits.submit(os.read, release[0], 1)
    assert started.wait(5)
    computes.interrupt()
    with pytest.raises(EnvError, match="Interrupted"):
        endless.result(5)
    for thread in guard._hung:
        thread.join(5)
    waits.close()
    assert guard.num_hung() == 1
    monkeypatch.setattr(episode, "MAX_HUNG", 0)
    failure = Failure(Task("toy", "train", 1), "step 1", "TimeoutError: no answer", 1, 1)
    with pytest.raises(TooManyFailures, match=r"1 calls of plain functions .* never returned"):
        episode._require_few_hung(failure)
    os.write(release[1], b"x")
