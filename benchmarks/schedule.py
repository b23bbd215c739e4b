"""What does a turn cost with 10, 1,000 and 100,000 episodes alive at once, and what does an episode take meanwhile?

    python -m benchmarks.schedule                                        # ten minutes
    python -m benchmarks.schedule --live 10 1000 --repeats 1 --turns 2000    # seconds

The real path (`produce`, `roll` and `take` of the loop, `StalenessQueue`, `PendingPieces`, `Rollout`, `EnginePool`, the journal on the
disk) with a scripted engine and a scripted environment: no model, no sockets. The engine answers in turn, so that
every episode advances before one advances twice. They have three to seven turns, so that most are in their middle when
weights are published. Processor seconds of the whole process, the journal's thread included, over the turns made; each
measurement has a process of its own. Writes a dated table and a picture under benchmarks/results/.
"""

import argparse
import asyncio
import resource
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from unstale.loop import RunComponents, produce, take_groups
from unstale.old_logps import Passive
from unstale.records import Group, GroupRequest, Task
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.rollout.transcript import NullWriter

SIBLINGS, STALENESS = 2, 4
"""Ten live episodes are five groups, one for each version that a token may be late by and one more."""
REPLY, OPENING, ANSWER = 4, 24, 12
"""Tokens of a reply, of what it first answers, and of what is answered to it."""
BOUND = 1.5
"""The goal: the dearest turn over the cheapest, by how many are live."""


class NumberChat:
    """Messages are what they are; their tokens are always the same."""

    stop_tokens = (1,)

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(range(1000, 1000 + OPENING))

    def encode_continuation(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        return tuple(range(2000, 2000 + ANSWER))

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "so many")


class SomeTurns:
    """So many turns, of each of which the world is told."""

    def __init__(self, world: "World", turns: int) -> None:
        self.world, self.turns = world, turns

    async def begin(self) -> Turn:
        return Turn((Message("user", "how many?"),))

    async def step(self, reply: Message) -> Turn:
        self.world.turned()
        self.turns -= 1
        if self.turns:
            return Turn((Message("user", "and then?"),))
        return Turn((), done=True, rewards={"r": 1.0})


class World:
    """A task set that counts turns. Batches of `groups` have episodes of three turns, of four, and so on to seven."""

    name = "numbers"
    tools = ()

    def __init__(self, groups: int) -> None:
        self.turns = 0
        self._groups = groups
        self._due, self._reached_s = 0, 0.0
        self._reached = asyncio.Event()

    def tasks(self) -> Iterator[GroupRequest]:
        return (
            GroupRequest(number, Task(self.name, "train", number), 0, number) for number in count()
        )

    def env(self, task: Task, seed: int) -> SomeTurns:
        return SomeTurns(self, 3 + task.index // self._groups % 5)

    def turned(self) -> None:
        self.turns += 1
        if self.turns == self._due:
            self._reached_s = time.process_time()
            self._reached.set()

    async def until(self, turns: int) -> float:
        """Wait for so many turns. The processor seconds at which they were made."""
        self._due = turns
        self._reached.clear()
        await self._reached.wait()
        return self._reached_s


class Counting(ScriptedEngine):
    """Each reply waits once, until all other episodes have had their turn."""

    def __init__(self) -> None:
        super().__init__(
            lambda tokens, params: (*range(300, 300 + params.max_tokens - 1), 1),
            token_delay=lambda tokens, params: (
                asyncio.sleep(0) if len(tokens) % 4 == 2 else _AT_ONCE
            ),
        )

    @property
    def num_pending(self) -> int:
        return len(self._pending)


class _Now:
    def __await__(self) -> Iterator[None]:
        return iter(())


_AT_ONCE = _Now()


class Unkept:
    """A journal of which nothing is kept."""

    begin = NullWriter

    def add_request(self, request: GroupRequest) -> None: ...

    async def finish(self, group: Group) -> None: ...

    def consume(self, groups: Sequence[Group], *, step: int, version: int) -> None: ...

    def __enter__(self) -> "Unkept":
        return self

    def __exit__(self, *_: object) -> None: ...


class Scene:
    """A run with so many live episodes: what the loop touches of one, and what is measured of it."""

    def __init__(self, live: int, folder: Path | None) -> None:
        groups = live // SIBLINGS // (STALENESS + 1)
        if not groups or groups * SIBLINGS * (STALENESS + 1) != live:
            raise SystemExit(f"--live takes multiples of {SIBLINGS * (STALENESS + 1)}, got {live}")
        schedule = ScheduleConfig(
            max_staleness=STALENESS, groups_per_step=groups, group_size=SIBLINGS
        )
        room = EngineConfig(max_completion_tokens=REPLY, max_context=1 << 16)
        self.live, self.version, self.oldest = live, 0, 0
        self.world, self.ledger, self.scripted = World(groups), PendingPieces(), Counting()
        self.engine = EnginePool([self.scripted])
        generator = Generator(self.engine, cast(Any, NumberChat()), room)
        self.parts = cast(
            RunComponents,
            SimpleNamespace(
                config=RunConfig(
                    recipe="numbers", task=TaskConfig(env="benchmarks:numbers"), schedule=schedule
                ),
                resumed_requests=(),
                requests=self.world.tasks(),
                queue=StalenessQueue(max_staleness=STALENESS, groups_per_step=groups),
                pending=self.ledger,
                piece_arrived=asyncio.Event(),
                old_logps=Passive(),
                rollout=Rollout(
                    generator, cast(Any, self.world), RolloutConfig(), on_piece=self.ledger.add
                ),
                journal=Unkept() if folder is None else Journal(folder / JOURNAL),
            ),
        )

    async def publish(self, version: int) -> None:
        await self.engine.interrupt()
        await self.engine.load({}, version)
        await self.engine.resume()
        self.version = version

    async def step(self) -> None:
        """A batch, as the loop has it, with nothing learnt from it."""
        groups = await take_groups(self.parts)
        consumed = [trajectory for group in groups for trajectory in group.trajectories]
        ages = {
            self.version - piece.version for trajectory in consumed for piece in trajectory.sampled
        }
        self.oldest = max(self.oldest, *ages)
        if self.oldest > self.parts.queue.bound or len(consumed) != self.live // (STALENESS + 1):
            raise RuntimeError(f"{len(consumed)} episodes, tokens up to {self.oldest} versions old")
        self.ledger.discard([trajectory.episode for trajectory in consumed])
        self.parts.journal.consume(groups, step=self.version + 1, version=self.version)
        await self.publish(self.version + 1)
        self.parts.queue.release()

    async def measure(self, turns: int) -> dict[str, float]:
        """Steps until so many turns were made. After its first, no episode is in its last."""
        await self.engine.start()
        await self.publish(0)
        found: dict[str, float] = {}
        async with asyncio.TaskGroup() as tasks:
            with self.parts.journal:
                resident, began = _resident(), time.process_time()
                producer = tasks.create_task(produce(self.parts))
                await self.world.until(self.live)
                aside = time.process_time()
                found["bytes"] = (_resident() - resident) / self.live
                found["traced"] = tracemalloc.get_traced_memory()[0] / self.live
                found |= {f"of {where}": size / self.live for where, size in _traced().items()}
                pending = self.scripted.num_pending
                if pending < self.live - SIBLINGS:
                    raise RuntimeError(f"{pending} of {self.live} episodes wait for the engine")
                interrupting = time.process_time()
                await self.publish(0)
                resumed = await self.world.until(
                    self.world.turns + 1
                )  # everybody has asked again before it
                found["interrupt"] = (resumed - interrupting) / pending
                aside = resumed - aside
                while self.world.turns < turns or not self.version:
                    await self.step()
                found["turn"] = (time.process_time() - began - aside) / self.world.turns
                producer.cancel()
        await self.engine.close()
        return {**found, "turns": self.world.turns, "versions": self.version, "oldest": self.oldest}


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _traced() -> Mapping[str, int]:
    """Bytes by what allocated them, if that is traced."""
    if not tracemalloc.is_tracing():
        return {}
    sizes: Counter[str] = Counter()
    for found in tracemalloc.take_snapshot().statistics("filename"):
        path = Path(found.traceback[0].filename)
        sizes[
            "asyncio" if path.parent.name == "asyncio" else f"{path.parent.name}/{path.name}"
        ] += found.size
    return sizes


def child(live: int, turns: int, *, journal: bool, trace: bool = False) -> dict[str, float]:
    """One measurement, in a process that has done nothing yet."""
    if trace:
        tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder, rare_garbage_collection():
        return asyncio.run(Scene(live, Path(folder) if journal else None).measure(turns))


def apart(*arguments: Any, **named: Any) -> dict[str, float]:
    """A measurement in a process of its own, which begins with everything imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["unstale.cli.session"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(child, *arguments, **named).result()


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
    found: dict[str, list[dict[str, float]]] = {}

    def contestant(name: str, live: int, journal: bool) -> float:
        found.setdefault(name, []).append(apart(live, options.turns, journal=journal))
        return found[name][-1]["turn"]

    names = {(live, kept): f"{live:,} live, {kept}" for kept in COLUMNS for live in options.live}
    turns = tables.alternate(
        {
            name: partial(contestant, name, live, COLUMNS[kept])
            for (live, kept), name in names.items()
        },
        options.repeats,
    )
    light = min(options.live, key=lambda live: abs(live - 1000))
    traced = apart(light, 1, journal=False, trace=True)
    lines = tables.columns(
        "live", "", "processor us a turn", "turns a second of processor", "us to interrupt a live episode",
        "bytes a live episode", "versions", "oldest token",
    )  # fmt: skip
    for (live, kept), name in names.items():
        many = found[name]
        lines.append(
            tables.row(
                f"{live:,}",
                kept,
                tables.spread([1e6 * one["turn"] for one in many], "{:.0f}"),
                f"{1 / median(one['turn'] for one in many):,.0f}",
                tables.spread([1e6 * one["interrupt"] for one in many], "{:.0f}"),
                f"{median(one['bytes'] for one in many):,.0f}" if live >= 1000 else "-",
                f"{median(one['versions'] for one in many):,.0f}",
                f"{max(one['oldest'] for one in many):.0f}",
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
        range_ = [low / high for low, high in zip(least, most, strict=True)]
        lines.append(
            f"{kept}: the cheapest turn takes {tables.spread(range_)} of the dearest; goal at least 1 / {BOUND:g}, "
            f"{tables.verdict(range_, 1 / BOUND)}. With the most live a turn takes {rise:.2f} times what it takes with "
            "the fewest."
        )
    lines += [
        "",
        f"A batch is a fifth of what is live: with {min(options.live)} live, publishing a version and, with ",
    ]
    lines[-1] += (
        "the journal, a commit to the disk are shared by a few turns; with more live, by more. Where only one "
    )
    lines[-1] += (
        "version was published, the measurement ended with it: no token got old (`--turns` asks for more)."
    )
    lines += [
        "",
        f"What {traced['traced']:,.0f} bytes of one of {light:,} episodes consist of, as traced:",
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
        axes.set_xticks(live, [f"{one:,}" for one in live])
        axes.minorticks_off()
        axes.set_xlabel("live episodes")
        axes.set_ylabel("processor microseconds a turn")
        axes.legend(frameon=False)


if __name__ == "__main__":
    main()
