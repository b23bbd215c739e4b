"""Measure the processor time of a turn and the memory of an episode, by concurrent episodes.

    python -m benchmarks.schedule                                        # ten minutes
    python -m benchmarks.schedule --live 10 1000 --repeats 1 --turns 2000    # seconds

The training loop, staleness queue, rollout, engine pool and journal are the real ones. Engine and
environment are scripted, so there is neither a model nor a socket. The engine serves episodes in
turn. Episodes have three to seven turns, so most are unfinished when weights are published. The
processor time is that of the whole process, including the journal's thread, divided by the turns.
Each measurement runs in a new process. The results are a dated table and a picture under
benchmarks/results/.
"""

import argparse
import asyncio
import resource
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from benchmarks import tables
from unstale.cli.process import rare_garbage_collection
from unstale.config import EngineConfig, RolloutConfig, RunConfig, ScheduleConfig, TaskConfig
from unstale.durability.journal import JOURNAL, Journal
from unstale.engines.pool import EnginePool
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.loop import RunComponents, produce
from unstale.old_logps import OldLogps
from unstale.records import Group, GroupRequest, Task
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.rollout.transcript import NullWriter
from unstale.token_values import TokenValues

SIBLINGS, STALENESS = 2, 4
"""Group size and staleness: `STALENESS` + 1 batches are live, so 10 episodes are the minimum."""
REPLY, OPENING, ANSWER = 4, 24, 12
"""Tokens of a completion, of the prompt and of each answer of the environment."""
BOUND = 1.5
"""Goal for the ratio of the most and least expensive turn, over the numbers of live episodes."""


class NumberChat:
    """A chat template with constant tokens for all messages."""

    stop_tokens = (1,)
    longest_token = 1

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(range(1000, 1000 + OPENING))

    def encode_continuation(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[object] = ()
    ) -> tuple[int, ...]:
        return tuple(range(2000, 2000 + ANSWER))

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "so many")


class FixedTurns:
    """An environment with a fixed number of turns. It counts them in its task set."""

    def __init__(self, tasks: "CountingTasks", turns: int) -> None:
        self.tasks, self.turns = tasks, turns

    async def begin(self) -> Turn:
        return Turn((Message("user", "how many?"),))

    async def step(self, reply: Message) -> Turn:
        self.tasks.count_turn()
        self.turns -= 1
        if self.turns:
            return Turn((Message("user", "and then?"),))
        return Turn((), done=True, rewards={"r": 1.0})


class CountingTasks:
    """A task set that counts turns.

    Its episodes have three to seven turns: the same number in `groups` successive groups.
    """

    name = "numbers"
    tools = ()

    def __init__(self, groups: int) -> None:
        self.turns = 0
        self._groups = groups
        self._due, self._reached_s = 0, 0.0
        self._reached = asyncio.Event()

    async def tasks(self) -> AsyncIterator[GroupRequest]:
        for number in count():
            yield GroupRequest(number, Task(self.name, "train", number), 0, number)

    def env(self, task: Task, seed: int) -> FixedTurns:
        return FixedTurns(self, 3 + task.index // self._groups % 5)

    def count_turn(self) -> None:
        self.turns += 1
        if self.turns == self._due:
            self._reached_s = time.process_time()
            self._reached.set()

    async def wait_for_turns(self, turns: int) -> float:
        """Wait until the tasks have counted `turns` turns. Return the processor seconds then."""
        self._due = turns
        self._reached.clear()
        await self._reached.wait()
        return self._reached_s


class TurnTakingEngine(ScriptedEngine):
    """An engine whose requests each wait once, so that it serves the episodes in turn.

    While `gate` is not set, requests do not end this wait.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda tokens, params: (*range(300, 300 + params.max_tokens - 1), 1),
            token_delay=lambda tokens, params: self._wait() if len(tokens) % 4 == 2 else _AT_ONCE,
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_held = 0
        """Number of requests that wait for the gate."""
        self._awaited_number, self._number_reached = 0, asyncio.Event()

    async def until_held(self, number: int) -> None:
        """Wait until `number` requests wait for the gate. Raises TimeoutError after a minute."""
        self._awaited_number = number
        self._number_reached.clear()
        if self.num_held < number:
            async with asyncio.timeout(60):
                await self._number_reached.wait()

    async def _wait(self) -> None:
        await asyncio.sleep(0)
        if not self.gate.is_set():
            self.num_held += 1
            if self.num_held == self._awaited_number:
                self._number_reached.set()
            try:
                await self.gate.wait()
            finally:
                self.num_held -= 1


class _Now:
    def __await__(self) -> Iterator[None]:
        return iter(())


_AT_ONCE: Any = _Now()


class NullJournal:
    """A journal that stores nothing."""

    begin = NullWriter

    def add_request(self, request: GroupRequest) -> None: ...

    async def finish(self, group: Group) -> None: ...

    def commit(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        version: int,
        replayed: Sequence[int] = (),
        tokens: Sequence[TokenValues] = (),
    ) -> None: ...

    def __enter__(self) -> "NullJournal":
        return self

    def __exit__(self, *_: object) -> None: ...


async def no_more(request: object, results: object) -> tuple[()]:
    """Run no episodes beyond the group's first ones."""
    return ()


class ScriptedRun:
    """A run with `live` concurrent episodes, and its measurements."""

    def __init__(self, live: int, folder: Path | None) -> None:
        groups = live // SIBLINGS // (STALENESS + 1)
        if not groups or groups * SIBLINGS * (STALENESS + 1) != live:
            raise SystemExit(f"--live takes multiples of {SIBLINGS * (STALENESS + 1)}, got {live}")
        schedule = ScheduleConfig(
            max_staleness=STALENESS, groups_per_step=groups, group_size=SIBLINGS
        )
        engine_config = EngineConfig(max_completion_tokens=REPLY, max_context=1 << 16)
        self.live = live
        self.version = 0
        self.oldest = 0
        self.tasks = CountingTasks(groups)
        self.pending = PendingPieces()
        self.scripted = TurnTakingEngine()
        self.engine = EnginePool([self.scripted])
        generator = Generator(self.engine, cast(Any, NumberChat()), engine_config)
        self.parts = cast(
            RunComponents,
            SimpleNamespace(
                config=RunConfig(
                    recipe="numbers", task=TaskConfig(env="benchmarks:numbers"), schedule=schedule
                ),
                resumed_requests=(),
                requests=self.tasks.tasks(),
                queue=StalenessQueue(max_staleness=STALENESS, groups_per_step=groups),
                pending=self.pending,
                techniques=SimpleNamespace(more=no_more, rounds=lambda request: None),
                old_logps=OldLogps(),
                rollout=Rollout(
                    generator, cast(Any, self.tasks), RolloutConfig(), on_piece=self.pending.add
                ),
                journal=NullJournal() if folder is None else Journal(folder / JOURNAL),
            ),
        )

    async def publish(self, version: int) -> None:
        await self.engine.interrupt()
        await self.engine.load({}, version)
        await self.engine.resume()
        self.version = version

    async def step(self) -> None:
        """Take one batch as the training loop does, without an update."""
        groups = await self.parts.queue.take()
        consumed = [trajectory for group in groups for trajectory in group.trajectories]
        ages = {
            self.version - piece.version for trajectory in consumed for piece in trajectory.sampled
        }
        self.oldest = max(self.oldest, *ages)
        if self.oldest > self.parts.queue.bound or len(consumed) != self.live // (STALENESS + 1):
            raise RuntimeError(f"{len(consumed)} episodes, tokens up to {self.oldest} versions old")
        self.pending.discard([trajectory.episode for trajectory in consumed])
        self.parts.journal.commit(groups, step=self.version + 1, version=self.version)
        await self.publish(self.version + 1)
        self.parts.queue.release()

    async def interrupt_all(self) -> float:
        """Interrupt all live episodes at once, until each has sent its request again.

        Returns the processor seconds for one of them. No turn is made meanwhile.
        """
        self.scripted.gate.clear()
        await self.scripted.until_held(self.live - SIBLINGS)  # a group may wait for its journal
        for _ in range(10):  # turns of the event loop, for the requests of that group
            await asyncio.sleep(0)
        turns, held, began = self.tasks.turns, self.scripted.num_held, time.process_time()
        await self.publish(0)
        await self.scripted.until_held(held)
        took = (time.process_time() - began) / held
        if self.tasks.turns > turns:
            raise RuntimeError(f"{self.tasks.turns - turns} turns were made while all were held")
        self.scripted.gate.set()
        return took

    async def measure(self, turns: int) -> dict[str, float]:
        """Run steps until `turns` turns were made, and return the measured figures."""
        await self.engine.start()
        await self.publish(0)
        figures: dict[str, float] = {}
        async with asyncio.TaskGroup() as tasks:
            with self.parts.journal:
                resident, began = _resident(), time.process_time()
                self.scripted.gate.clear()  # all begin before the first ends
                producer = tasks.create_task(produce(self.parts))
                await self.scripted.until_held(self.live)
                self.scripted.gate.set()
                await self.tasks.wait_for_turns(self.live)
                excluded = time.process_time()
                figures["bytes"] = (_resident() - resident) / self.live
                figures["traced"] = tracemalloc.get_traced_memory()[0] / self.live
                figures |= {f"of {where}": size / self.live for where, size in _traced().items()}
                figures["interrupt"] = await self.interrupt_all()
                excluded = time.process_time() - excluded
                while self.tasks.turns < turns or not self.version:
                    await self.step()
                figures["turn"] = (time.process_time() - began - excluded) / self.tasks.turns
                producer.cancel()
        await self.engine.close()
        figures |= {"turns": self.tasks.turns, "versions": self.version, "oldest": self.oldest}
        return figures


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _traced() -> Mapping[str, int]:
    """Return the allocated bytes by source file, empty unless allocations are traced."""
    if not tracemalloc.is_tracing():
        return {}
    sizes: Counter[str] = Counter()
    for statistic in tracemalloc.take_snapshot().statistics("filename"):
        path = Path(statistic.traceback[0].filename)
        in_asyncio = path.parent.name == "asyncio"
        sizes["asyncio" if in_asyncio else f"{path.parent.name}/{path.name}"] += statistic.size
    return sizes


def measure(live: int, turns: int, *, journal: bool, trace: bool = False) -> dict[str, float]:
    """Run one measurement. The process must be new."""
    if trace:
        tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder, rare_garbage_collection():
        return asyncio.run(ScriptedRun(live, Path(folder) if journal else None).measure(turns))


def measure_in_new_process(*arguments: Any, **named: Any) -> dict[str, float]:
    """Run one measurement in a new process, with all modules already imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["unstale.cli.session"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, *arguments, **named).result()


COLUMNS = {"no journal": False, "journal": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--live", type=int, nargs="+", default=[10, 1000, 100_000], help="episodes alive at once"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=20_000,
        help="turns of a measurement, at least (default 20,000)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}

    def contestant(name: str, live: int, journal: bool) -> float:
        rounds.setdefault(name, []).append(
            measure_in_new_process(live, options.turns, journal=journal)
        )
        return rounds[name][-1]["turn"]

    names = {(live, kept): f"{live:,} live, {kept}" for kept in COLUMNS for live in options.live}
    turns = tables.alternate(
        {
            name: partial(contestant, name, live, COLUMNS[kept])
            for (live, kept), name in names.items()
        },
        options.repeats,
    )
    light = min(options.live, key=lambda live: abs(live - 1000))
    traced = measure_in_new_process(light, 1, journal=False, trace=True)
    lines = tables.columns(
        "live",
        "",
        "processor us a turn",
        "turns a second of processor",
        "us to interrupt a live episode",
        "bytes a live episode",
        "versions",
        "oldest token",
    )
    for (live, kept), name in names.items():
        runs = rounds[name]
        lines.append(
            tables.row(
                f"{live:,}",
                kept,
                tables.spread([1e6 * run["turn"] for run in runs], "{:.0f}"),
                f"{1 / median(run['turn'] for run in runs):,.0f}",
                tables.spread([1e6 * run["interrupt"] for run in runs], "{:.0f}"),
                f"{median(run['bytes'] for run in runs):,.0f}" if live >= 1000 else "-",
                f"{median(run['versions'] for run in runs):,.0f}",
                f"{max(run['oldest'] for run in runs):.0f}",
            )
        )
    lines.append("")
    for kept in COLUMNS:
        most = [
            max(turns[names[live, kept]][at] for live in options.live)
            for at in range(options.repeats)
        ]
        least = [
            min(turns[names[live, kept]][at] for live in options.live)
            for at in range(options.repeats)
        ]
        rise = median(turns[names[max(options.live), kept]]) / median(
            turns[names[min(options.live), kept]]
        )
        shares = [low / high for low, high in zip(least, most, strict=True)]
        lines.append(
            f"{kept}: the cheapest turn takes {tables.spread(shares)} of the time of the most "
            f"expensive; goal at least 1 / {BOUND:g}, {tables.verdict(shares, 1 / BOUND)}. With "
            f"the most live episodes a turn takes {rise:.2f} times as long as with the fewest."
        )
    lines += [
        "",
        "A batch is a fifth of the live episodes. Publishing and committing the journal are shared "
        f"by its turns, which are few with {min(options.live)} live episodes. Measurements with "
        "one published version contain no stale tokens (`--turns` makes them longer).",
        "",
        f"Traced allocations of one of {light:,} episodes, {traced['traced']:,.0f} bytes in total:",
        "",
    ]
    lines += tables.columns("allocated in", "bytes")
    made_of = sorted(
        ((size, name[3:]) for name, size in traced.items() if name.startswith("of ")), reverse=True
    )
    lines += [tables.row(name, f"{size:,.0f}") for size, name in made_of if size >= 50]
    tables.write("schedule", "Live episodes in one process", lines)
    draw(
        options.live,
        {kept: [median(turns[names[live, kept]]) for live in options.live] for kept in COLUMNS},
    )


def draw(live: Sequence[int], turns: Mapping[str, Sequence[float]]) -> None:
    with tables.picture("schedule") as axes:
        for kept, values in turns.items():
            axes.plot(live, [1e6 * value for value in values], marker="o", label=kept)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xticks(live, [f"{count:,}" for count in live])
        axes.minorticks_off()
        axes.set_xlabel("live episodes")
        axes.set_ylabel("processor microseconds a turn")
        axes.legend(frameon=False)


if __name__ == "__main__":
    main()
