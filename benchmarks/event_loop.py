"""Measure the processor time that one reply takes on the event loop of a run.

    python -m benchmarks.event_loop                                # 20 minutes, with Ray
    python -m benchmarks.event_loop --engines scripted --repeats 1 # one minute

Rollout, chat template, engine pool, engines, journal and collation are the real ones. What is
behind them answers at once (`benchmarks.canned`):

    scripted    an engine in this process: the cost of the rollout and the journal alone
    http        the vLLM backend, whose server is another process
    hosts       engine hosts (`cluster.engine_hosts`), which are Ray actors
    hosts+envs  the same, and the environments are Ray actors too (`task.isolate = ray`)

The loop's seconds are the processor time of its thread, from which the rates follow. The process's
seconds are those of all of its threads, Ray's among them. Threads that run Python wait for each
other, so the limit of one process is between the two. The longest stall is the longest time between
two rounds of the event loop (`RoundTimer`). The result is a dated table under benchmarks/results/.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Self, cast

from torch import Tensor

from benchmarks import tables
from benchmarks.canned import EXPERTS, TOP_K, CannedEngine, UnprobedVllm, serve
from benchmarks.schedule import NullJournal, no_more
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.config import (
    SHIPPED_POLICY,
    ClusterConfig,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
)
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.journal.expert_files import ROUTED_EXPERTS, ExpertFiles
from unstale.durability.virtual_clock import run as run_loop
from unstale.engines import Engine
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions
from unstale.envs import Taskset
from unstale.envs.chat import Chat
from unstale.envs.registry import build_taskset
from unstale.isolation import isolate
from unstale.loop import RunComponents, roll
from unstale.model.loading import load_tokenizer
from unstale.records import Group, GroupRequest, ScoredTrajectory, Task, collate
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.staleness_queue import PendingPieces

Figures = Mapping[str, float]

ENGINES = ("scripted", "http", "hosts", "hosts+envs")
REPLIES = (256, 2048, 16_384)
TURNS = (1, 8)
LIVE = 64
"""Episodes that run at once."""
STALL_EPISODES = 8
"""Episodes in which the longest stall is measured."""
STALL_GOAL_MS = 20
"""No stall of the event loop should be longer."""
SERVERS, HOSTS = 8, 2
"""Engines of the pool. A host is a process with torch, so there are few of them."""
MAX_CONTEXT = 1 << 18
"""Tokens that a context may have."""
RATES = {"4B on 8 GPUs": 20_400, "30B-A3B on 64 GPUs": 34_600}
"""Sampled tokens per second that `unstale plan` predicts."""
GOAL = 10
"""One event loop should carry this many times the larger rate."""


@dataclass(frozen=True)
class Case:
    """One measurement: what answers, and how long and how many the replies are."""

    engine: str
    tokens: int
    turns: int
    routes: bool
    journal: bool = True

    @property
    def episodes(self) -> int:
        """Enough for 262,144 tokens, or 65,536 with routes, but at least 8."""
        wanted = 1 << (16 if self.routes else 18)
        return max(8, wanted // (self.tokens * self.turns))


class RoundTimer:
    """Measures the longest time between two rounds of the event loop, within a context.

    The loop never sleeps in it, so that the time is that of other callbacks, and of threads that
    hold the interpreter lock. It is the shorter of two: elapsed time, in which other programs also
    count, and processor time of the process, in which threads count that run at the same time.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._last = _clocks()
        self._next = asyncio.get_running_loop().call_soon(self._round)
        return self

    def _round(self) -> None:
        now = _clocks()
        self.longest_s = max(
            self.longest_s, min(b - a for a, b in zip(self._last, now, strict=True))
        )
        self._last = now
        self._next = asyncio.get_running_loop().call_soon(self._round)

    def __exit__(self, *_: object) -> None:
        self._next.cancel()


def _clocks() -> tuple[float, float]:
    """Return elapsed seconds, and those of processors in all threads of this process."""
    return time.perf_counter(), time.process_time()


class RealRollout:
    """A rollout with an engine pool, environments and a journal, in one process."""

    def __init__(self, case: Case, folder: Path, engine: EnginePool, taskset: Taskset) -> None:
        options = EngineConfig(
            max_completion_tokens=case.tokens,
            max_context=min(MAX_CONTEXT, 2 * case.turns * (case.tokens + 1024)),
        )
        generator = Generator(engine, Chat(load_tokenizer(SHIPPED_POLICY), ()), options)
        self.rollout = Rollout(
            generator, taskset, RolloutConfig(max_turns=64), on_piece=PendingPieces().add
        )
        experts = ExpertFiles(folder / ROUTED_EXPERTS) if case.routes else None
        path = folder / JOURNAL
        self.journal = Journal(path, routed_experts=experts) if case.journal else NullJournal()
        config = RunConfig(
            recipe="canned",
            task=TaskConfig(env="benchmarks.canned:CannedTasks"),
            schedule=ScheduleConfig(group_size=1),
        )
        self._parts = cast(
            RunComponents,
            SimpleNamespace(
                config=config,
                rollout=self.rollout,
                journal=self.journal,
                techniques=SimpleNamespace(more=no_more, rounds=lambda request: None),
            ),
        )
        self._turns = case.turns
        self._numbers = count()

    def use(self, rollout: Rollout) -> None:
        """Run later episodes by another rollout."""
        self.rollout = self._parts.rollout = rollout  # type: ignore[misc]

    async def play(self, episodes: int) -> list[Group]:
        """Run the episodes, at most `LIVE` at once. Return their groups."""
        free = asyncio.Semaphore(LIVE)

        async def one() -> Group:
            async with free:
                number = next(self._numbers)
                task = Task("canned", "train", self._turns)
                return await roll(self._parts, GroupRequest(number, task, number, number))

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one()) for _ in range(episodes)]
        return [each.result() for each in running]

    async def measure(self, case: Case) -> Figures:
        """Run the episodes of a case. A few run before, so that all caches are full."""
        async with self.rollout.resources:
            with self.journal:
                await self.play(min(4, case.episodes))
                loop_s, process_s = time.thread_time(), time.process_time()
                groups = await self.play(case.episodes)
                loop_s = time.thread_time() - loop_s
                process_s = time.process_time() - process_s
                with RoundTimer() as rounds:
                    await self.play(min(STALL_EPISODES, case.episodes))
        scored = [ScoredTrajectory(each.trajectories[0], (1.0,)) for each in groups]
        began = time.thread_time()
        batch = collate(scored, replay_experts=case.routes)
        collate_s = time.thread_time() - began
        return {
            "loop_s": loop_s,
            "process_s": process_s,
            "turns": sum(each.trajectory.num_turns for each in scored),
            "tokens": int(batch.sampled.sum()),
            "collate_s": collate_s / len(batch.tokens),
            "stall_s": rounds.longest_s,
        }


@dataclass(frozen=True)
class TinyModel:
    """A model whose configuration the engines need."""

    folder: Path
    weights: Mapping[str, Tensor]


def moe_model(folder: Path) -> TinyModel:
    """Write a tiny MoE model to a folder."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = folder / "policy"
    shutil.copytree(SHIPPED_POLICY, path)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config = Qwen3MoeConfig(
        **sizes,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=json.loads((path / "config.json").read_text())["vocab_size"],
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(path)
    state = model.state_dict()
    return TinyModel(path, {name: state[name] for name in state if name != "lm_head.weight"})


@contextmanager
def server(folder: Path, *, routes: bool) -> Iterator[str]:
    """Run a `CannedServer` in another process. Yield its address."""
    process = get_context("spawn").Process(target=serve, args=(folder, routes), daemon=True)
    process.start()
    while not (folder / "server").exists():
        if not process.is_alive():
            raise RuntimeError(f"the server ended at its start with code {process.exitcode}")
        time.sleep(0.05)
    try:
        yield f"unix:{folder}/server"
    finally:
        process.kill()
        process.join()


def hosts(options: EngineOptions) -> list[Engine]:
    """Return engine hosts on this machine, with a Ray that ends with this process."""
    from unstale.cluster.engine_host import HostOptions
    from unstale.cluster.hosted_engine import RESOURCE, HostedEngine, place
    from unstale.cluster.session import connect

    connect(resources={RESOURCE: HOSTS}, num_cpus=HOSTS)
    host = HostOptions(CannedEngine, (options,))
    return [HostedEngine(number, host, partial(place, host)) for number in range(HOSTS)]


def tasks_of(engine: str) -> Taskset:
    config = TaskConfig(env="benchmarks.canned:CannedTasks")
    taskset = build_taskset(config)
    if engine != "hosts+envs":
        return taskset
    from unstale.cluster.env_hosts import remote_workers

    config = replace(config, isolate="ray", workers=1)
    return isolate(taskset, config, remote_workers(ClusterConfig()))


@asynccontextmanager
async def engines(kind: str, model: TinyModel, *, routes: bool) -> AsyncIterator[EnginePool]:
    """Start the engines with version 0, and end them."""
    options = EngineOptions(
        model.folder, dtype="float32", max_context=MAX_CONTEXT, record_experts=routes
    )
    with ExitStack() as resources:
        if kind == "scripted":
            members: list[Engine] = [CannedEngine(options) for _ in range(SERVERS)]
        elif kind == "http":
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            at = replace(options, url=resources.enter_context(server(folder, routes=routes)))
            members = [UnprobedVllm(at) for _ in range(SERVERS)]
        else:
            members = hosts(options)
        pool = EnginePool(members)
        try:
            await pool.start()
            await pool.load(model.weights, 0)
            await pool.resume()
            yield pool
        finally:
            await pool.close()


async def measure_all(kind: str, cases: Sequence[Case], model: TinyModel) -> list[Figures]:
    figures: dict[Case, Figures] = {}
    for routes in (False, True):
        chosen = [case for case in cases if case.routes == routes]
        if not chosen:
            continue
        async with engines(kind, model, routes=routes) as pool:
            for case in chosen:
                with tempfile.TemporaryDirectory() as folder:
                    rollout = RealRollout(case, Path(folder), pool, tasks_of(kind))
                    figures[case] = await rollout.measure(case)
    return [figures[case] for case in cases]


def measure(kind: str, cases: Sequence[Case]) -> list[Figures]:
    """Measure all cases of one kind of engine. The process must be new."""
    with tempfile.TemporaryDirectory() as folder:
        model = moe_model(Path(folder))
        limit_threads()  # as a run does
        with rare_garbage_collection():
            return run_loop(measure_all(kind, cases, model))


def measure_in_new_process(kind: str, cases: Sequence[Case]) -> list[Figures]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, kind, cases).result()


def carried(runs: Sequence[Figures], seconds: str, what: str) -> float:
    """Return how many tokens or turns one second of processor time carries, as the median."""
    return median(run[what] / run[seconds] for run in runs)


def table(cases: Sequence[Case], results: Mapping[Case, Sequence[Figures]]) -> list[str]:
    lines = tables.columns(
        "engine",
        "tokens a reply",
        "turns",
        "routes",
        "loop ms a turn",
        "process ms a turn",
        "longest stall ms",
        "loop s a million tokens",
        "process s a million tokens",
        "tokens/s of one loop",
        "turns/s of one loop",
        f"times {max(RATES.values()):,} tokens/s",
    )
    for case in cases:
        runs = results[case]
        per_turn = [
            [1e3 * run[seconds] / run["turns"] for run in runs]
            for seconds in ("loop_s", "process_s")
        ]
        tokens = carried(runs, "loop_s", "tokens")
        slowest = carried(runs, "process_s", "tokens")
        lines.append(
            tables.row(
                case.engine + ("" if case.journal else ", no journal"),
                f"{case.tokens:,}",
                case.turns,
                "yes" if case.routes else "no",
                *(tables.spread(values) for values in per_turn),
                tables.spread([1e3 * run["stall_s"] for run in runs]),
                f"{1e6 / tokens:.2f}",
                f"{1e6 / slowest:.2f}",
                f"{tokens:,.0f}",
                f"{carried(runs, 'loop_s', 'turns'):,.0f}",
                f"{tokens / max(RATES.values()):.1f} ({slowest / max(RATES.values()):.1f})",
            )
        )
    return lines


def least_table(
    kinds: Sequence[str], lengths: Sequence[int], results: Mapping[Case, Sequence[Figures]]
) -> list[str]:
    """Return the smallest rate of each engine and reply length, over turns and routes."""
    lines = tables.columns(
        "least tokens/s of one loop", *(f"{length:,}-token replies" for length in lengths)
    )
    fastest = max(RATES.values())
    for kind in kinds:
        cells = []
        for length in lengths:
            runs = [
                results[case] for case in results if (case.engine, case.tokens) == (kind, length)
            ]
            rate = min(carried(each, "loop_s", "tokens") for each in runs)
            cells.append(f"{rate:,.0f}: {tables.verdict([rate / fastest], GOAL)}")
        lines.append(tables.row(kind, *cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--tokens", type=int, nargs="+", default=REPLIES, help="of a reply")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS, help="of an episode")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cases = [
        Case(*each)
        for each in product(options.engines, options.tokens, options.turns, (False, True))
    ]
    if "scripted" in options.engines:
        without = [case for case in cases if case.engine == "scripted" and not case.routes]
        cases[:0] = [replace(case, journal=False) for case in without]
    results: dict[Case, list[Figures]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for kind in tables.rotated(options.engines, repeat % len(options.engines)):
            tables.CONSOLE.print(f"round {repeat + 1} of {options.repeats}: {kind}")
            own = [case for case in cases if case.engine == kind]
            for case, figures in zip(own, measure_in_new_process(kind, own), strict=True):
                results[case].append(figures)
    rates = "; ".join(f"{name}: {rate:,} tokens/s" for name, rate in RATES.items())
    lines = [
        "Processor time per reply on the thread of the event loop, and of all threads of the",
        f"process. Medians of {options.repeats} rounds, with the range. `unstale plan` predicts",
        f"{rates}. In the last column, the figure in brackets is for the whole process. The",
        f"verdicts compare the rates with {GOAL} times {max(RATES.values()):,}.",
        "",
        *table(cases, results),
        "",
    ]
    collate_s = median(run["collate_s"] for runs in results.values() for run in runs)
    lines.append(f"`collate` takes {collate_s * 1e6:.2f} s a million tokens, prompts included.")
    lines += ["", *least_table(options.engines, options.tokens, results)]
    stalls_ms = [1e3 * max(run["stall_s"] for run in runs) for runs in results.values()]
    met = sum(stall_ms <= STALL_GOAL_MS for stall_ms in stalls_ms)
    lines += [
        "",
        f"The longest stall is at most {STALL_GOAL_MS} ms in {met} of {len(stalls_ms)} cases, and "
        f"{max(stalls_ms):.1f} ms in the worst.",
    ]
    tables.write("event-loop", "Work of the event loop", lines)


if __name__ == "__main__":
    main()
