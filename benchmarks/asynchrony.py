"""Compare the step time of asynchronous and synchronous training, and of an ideal schedule.

    python -m benchmarks.asynchrony                # 27 minutes on two idle cores
    python -m benchmarks.asynchrony --learning     # held-out success at equal samples: 35 minutes

The workloads of workloads.toml are runs of the retail recipe with the exact route, with real waits
for tools. Each workload runs asynchronously and synchronously in turn, `--repeats` times, on the
same cores. The trainer has half of the cores in asynchronous runs, and all in synchronous ones. The
engine is one process with one thread in both; two threads made synchronous steps slower.

Only steps after the pipeline has filled are timed: at least `--steps` asynchronous ones, and from
the same step on at least half as many synchronous ones, which train on mostly the same tasks.

The ideal step time is the largest of four lower bounds, measured in the run itself:

    engine     time to sample the tokens of a step
    trainer    time to score and train, and the trainer's part of a publication
    episodes   Little's law: mean episode duration * episodes per step / maximal live episodes
    processor  processor seconds of trainer and engine, divided by the cores

A second bound adds the staleness bound B. An episode's first token and the version trained on it
are at most B + 1 publications apart, so that step t satisfies

    end(t) >= end(t - 1) + scoring and training
    end(t) >= end(t - B - 1) + longest episode of its batch + scoring and training

The longest path through the timed steps is then a lower bound for any schedule with the same
episode durations, if steps do not overlap.

The results are a dated table and a picture under benchmarks/results/.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.tables import CONSOLE, columns, picture, ratios, row, spread, verdict, write
from unstale import recipes
from unstale.cli.session import train
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
)
from unstale.durability.console import Console
from unstale.durability.journal import Journal
from unstale.durability.run_folder import EVENTS, METRICS, RunFolder
from unstale.envs.desk import DeskConfig
from unstale.observe.statistics import wilson
from unstale.weights.child_process import cores

FILE = Path(__file__).parent / "workloads.toml"
FASTER, NEAR = 2.8, 0.85
LONGEST = (
    "SELECT c.step, max(f.at - e.at) FROM consumed c JOIN finished f ON f.number = c.number "
    "JOIN episodes e ON e.number = c.number GROUP BY c.step"
)
"""SQL for the journal: the longest episode of each step's batch, in seconds."""
TRAINER = ("trainer/update_s", "old_logps/prepare_s", "publish/trainer_s")
LIMITS = ("engine", "trainer", "episodes", "processor")
ASYNC, SYNC = "asynchronous", "synchronous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload of `workloads.toml`."""

    name: str
    latency_s: float
    latency_sigma: float
    max_staleness: int
    lookahead_window: int
    groups_per_step: int
    group_size: int
    adaptive_window: bool = False
    synchronous: bool = True

    def config(self, *, seed: int, steps: int, synchronous: bool) -> RunConfig:
        """Return the recipe with this workload, without evaluations and earlier checkpoints."""
        base = recipes.retail()
        threads = cores() if synchronous else max(1, cores() // 2)
        return replace(
            base,
            seed=seed,
            max_steps=steps,
            minutes=0.0,
            task=DeskConfig(latency_s=self.latency_s, latency_sigma=self.latency_sigma),
            schedule=ScheduleConfig(
                max_staleness=0 if synchronous else self.max_staleness,
                lookahead_window=1 if synchronous else self.lookahead_window,
                adaptive_window=self.adaptive_window and not synchronous,
                groups_per_step=self.groups_per_step,
                group_size=self.group_size,
            ),
            trainer=replace(base.trainer, threads=threads),
            audit=AuditConfig(),
            checkpoint=CheckpointConfig(interval=steps + 1),
            eval=EvalConfig(tasks=0),
        )

    @property
    def window(self) -> str:
        return "adaptive" if self.adaptive_window else str(self.lookahead_window)

    @property
    def live(self) -> int:
        """Return the maximal number of live episodes of the asynchronous run."""
        return (self.max_staleness + 1) * self.groups_per_step * self.group_size


def workloads(file: Path = FILE) -> list[Workload]:
    content = tomllib.loads(file.read_text())
    common = {name: content[name] for name in ("groups_per_step", "group_size")}
    return [Workload(**common | entry) for entry in content["workload"]]


@dataclass(frozen=True, slots=True)
class Measured:
    """The step time, tool share of the episodes' time, and lower bounds of a run, in seconds."""

    step_s: float
    tools: float
    limits: Mapping[str, float]
    bounded_s: float = 0.0
    """Lower bound that includes the staleness bound."""

    @property
    def ideal(self) -> float:
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        return max(self.limits, key=lambda name: self.limits[name])


def measure(
    rows: Sequence[Mapping[str, Any]], first: int, *, live: int, num_cores: int
) -> Measured:
    """Return the step time and lower bounds of the rows after the `first` ones.

    >>> before = {"time_s": 10.0}
    >>> after = {"time_s": 14.0, "trainer/cpu_s": 2.0, "engine/cpu_s": 2.4, "engine/busy_s": 2.4}
    >>> after |= {"engine/sampled_tokens": 120, "trainer/action_tokens": 100}
    >>> after |= {"trainer/update_s": 1.5, "old_logps/prepare_s": 0.5, "publish/trainer_s": 0.1}
    >>> after |= {"rollout/tool_wait_s": 18.0, "rollout/generation_wait_s": 6.0}
    >>> run = measure([before, after | {"rollout/episodes": 8}], 1, live=16, num_cores=2)
    >>> run.step_s, run.tools, run.limit
    (4.0, 0.75, 'processor')
    >>> {name: round(seconds, 2) for name, seconds in run.limits.items()}
    {'engine': 2.0, 'trainer': 2.1, 'episodes': 1.5, 'processor': 2.2}
    """
    timed = rows[first:]
    steps = len(timed)

    def total(name: str) -> float:
        return sum(float(timed_row[name]) for timed_row in timed)

    spent = total("rollout/tool_wait_s") + total("rollout/generation_wait_s")
    limits = {
        "engine": total("engine/busy_s")
        / total("engine/sampled_tokens")
        * total("trainer/action_tokens")
        / steps,
        "trainer": sum(total(name) for name in TRAINER) / steps,
        "episodes": spent / total("rollout/episodes") * (total("rollout/episodes") / steps) / live,
        "processor": (total("engine/cpu_s") + total("trainer/cpu_s")) / steps / num_cores,
    }
    step_s = (timed[-1]["time_s"] - rows[first - 1]["time_s"]) / steps
    return Measured(step_s, total("rollout/tool_wait_s") / spent, limits)


def bounded(
    rows: Sequence[Mapping[str, Any]],
    first: int,
    *,
    longest: Mapping[int, float],
    bound: int,
    ideal: float,
) -> float:
    """Return the step time of the longest path, at least the ideal one.

    `longest` is the longest episode of each step's batch, in seconds.

    >>> times = [0.0, 4.0, 6.0, 9.0, 13.0, 15.0]
    >>> rows = [{"step": step, "time_s": time} for step, time in enumerate(times, 1)]
    >>> rows = [row | dict.fromkeys(TRAINER, 0.25) for row in rows]
    >>> bounded(rows, 3, longest={4: 3.5, 5: 6.0, 6: 2.0}, bound=1, ideal=1.0)  # 8.25, 12.75, 13.5
    2.5
    >>> bounded(rows, 3, longest=dict.fromkeys((4, 5, 6), 0.1), bound=1, ideal=1.0)
    1.0
    """
    ends = [float(step["time_s"]) for step in rows[:first]]
    for i, step in enumerate(rows[first:], first):
        start = ends[i - 1]
        if i > bound:
            start = max(start, ends[i - bound - 1] + longest[step["step"]])
        ends.append(start + sum(float(step[name]) for name in TRAINER))
    return max(ideal, (ends[-1] - ends[first - 1]) / (len(rows) - first))


def timed_run(work: Workload, place: Path, *, seed: int, steps: int, synchronous: bool) -> Measured:
    """Run a workload once and return its measurements.

    The first groups start together, so their steps are not timed. The last step is not either,
    because it includes a checkpoint.
    """
    turn = 1 if synchronous else work.max_staleness + 1
    first = work.max_staleness + 2
    wanted = ceil(steps / 2) if synchronous else steps
    config = work.config(
        seed=seed, steps=first + turn * ceil(wanted / turn) + 1, synchronous=synchronous
    )
    name = f"{work.name}-{SYNC if synchronous else ASYNC}-{seed}".replace(" ", "-").replace("'", "")
    run = train(replace(config, runs=place, name=name), console=Console(quiet=True))
    rows = [metrics for metrics in run.metrics if metrics["step"]][:-1]
    live = work.groups_per_step * work.group_size if synchronous else work.live
    with Journal.read(run.folder) as reader:
        longest = dict(reader.rows(LONGEST))
    measured = measure(rows, first, live=live, num_cores=cores())
    bound = config.schedule.staleness_bound
    bounded_s = bounded(rows, first, longest=longest, bound=bound, ideal=measured.ideal)
    return replace(measured, bounded_s=bounded_s)


@dataclass(frozen=True, slots=True)
class Result:
    """A workload with its runs in order of the rounds, by mode."""

    work: Workload
    runs: Mapping[str, Sequence[Measured]]

    @property
    def faster(self) -> list[float]:
        """Return synchronous over asynchronous step time per round, or an empty list."""
        if SYNC not in self.runs:
            return []
        times = {mode: [run.step_s for run in runs] for mode, runs in self.runs.items()}
        return ratios(times, SYNC, over=ASYNC)

    @property
    def near(self) -> list[float]:
        """Return the ideal over the measured step time, per round."""
        return [run.ideal / run.step_s for run in self.runs[ASYNC]]

    @property
    def tools(self) -> float:
        return median(run.tools for run in self.runs[SYNC if SYNC in self.runs else ASYNC])

    def step_s(self, mode: str) -> float:
        return median(run.step_s for run in self.runs[mode])

    @property
    def ideal_s(self) -> float:
        return median(run.ideal for run in self.runs[ASYNC])

    @property
    def bounded_s(self) -> float:
        return median(run.bounded_s for run in self.runs[ASYNC])

    @property
    def of_bounded(self) -> float:
        """Return the bound with staleness over the measured step time."""
        return median(run.bounded_s / run.step_s for run in self.runs[ASYNC])


def compare(work: Workload, place: Path, *, steps: int, repeats: int) -> Result:
    """Run both modes in turn. Each round has its own seed, so both modes have the same tasks."""
    runs: dict[str, list[Measured]] = {ASYNC: [], **({SYNC: []} if work.synchronous else {})}
    for turn in range(repeats):
        for mode in sorted(runs, reverse=turn % 2 == 1):
            run = timed_run(work, place, seed=turn, steps=steps, synchronous=mode == SYNC)
            runs[mode].append(run)
            shutil.rmtree(place)
            CONSOLE.print(
                f"{work.name}, round {turn + 1} of {repeats}, {mode}: {run.step_s:.2f} s a step, "
                f"{run.tools:.0%} of an episode in tools, ideal {run.ideal:.2f} s ({run.limit})"
            )
    return Result(work, runs)


def tables(results: Sequence[Result]) -> list[str]:
    """Return the lines of all tables."""
    both = [result for result in results if result.faster]
    lines = [
        f"Runs of the retail recipe, {both[0].work.groups_per_step if both else 4} groups of "
        f"{both[0].work.group_size if both else 8} a step; medians (range). The tool share is that "
        "of an episode's time in the synchronous run. `benchmarks/workloads.toml` explains the "
        "workloads, `benchmarks/asynchrony.py` the ideal.",
        "",
        *columns(
            "workload", "tools", "staleness, window", "rounds", "synchronous, s a step",
            "asynchronous", "times as fast", "ideal, s a step", "set by", "of the ideal",
        ),
    ]  # fmt: skip
    for result in both:
        work, runs = result.work, result.runs[ASYNC]
        lines.append(
            row(
                work.name, f"{result.tools:.0%}", f"{work.max_staleness}, {work.window}",
                len(runs), f"{result.step_s(SYNC):.2f}", f"{result.step_s(ASYNC):.2f}",
                spread(result.faster),
                f"{result.ideal_s:.2f}", _most(runs),
                spread([100 * share for share in result.near], "{:.0f}%"),
            )
        )  # fmt: skip
    lines.append("")
    for result in both:
        goals = [f"{NEAR:.0%} of the ideal {verdict(result.near, NEAR)}"]
        if median(result.near) < NEAR:
            goals.append(f"of the ideal with the staleness bound, {result.of_bounded:.2f}")
        if result.work.latency_s:
            ideal = f"the ideal would be {result.step_s(SYNC) / result.ideal_s:.2f} times"
            faster = f"{FASTER} times as fast, with {result.tools:.0%} tools, "
            goals.insert(0, f"{faster}{verdict(result.faster, FASTER)} ({ideal})")
        lines.append(f"* {result.work.name}: {'; '.join(goals)}.")
    return lines + _curve(results) + _limits(results)


def _most(runs: Sequence[Measured]) -> str:
    limits = [run.limit for run in runs]
    return max(LIMITS, key=limits.count)


def _curve(results: Sequence[Result]) -> list[str]:
    points = [result for result in results if not result.work.synchronous]
    base = _base(results)
    if not points or base is None:
        return []
    lines = [
        "",
        f"Over the staleness bound and the window, at the latency of *{base.work.name}*:",
        "",
    ]
    lines += columns(
        "staleness", "window", "rounds", "s a step", "times as fast", "ideal, s a step",
        "of the ideal", "of the ideal with the bound",
    )  # fmt: skip
    for result in [*points, base]:
        work, runs = result.work, result.runs[ASYNC]
        lines.append(
            row(
                work.max_staleness, work.window, len(runs),
                spread([run.step_s for run in runs]),
                f"{base.step_s(SYNC) / result.step_s(ASYNC):.2f}", f"{result.ideal_s:.2f}",
                f"{median(result.near):.0%}", f"{result.of_bounded:.0%}",
            )
        )  # fmt: skip
    return lines


def _base(results: Sequence[Result]) -> Result | None:
    """Return the result with synchronous runs and the same latency as the points of the curve."""
    points = [result.work for result in results if not result.work.synchronous]
    for result in results:
        if result.faster and points and _latency(result.work) == _latency(points[0]):
            return result
    return None


def _latency(work: Workload) -> tuple[float, float]:
    return work.latency_s, work.latency_sigma


def _limits(results: Sequence[Result]) -> list[str]:
    lines = [
        "",
        "Lower bounds of the step time in seconds, without and with the staleness bound:",
        "",
        *columns("workload", "measured", *LIMITS, "with the staleness bound", "of that"),
    ]
    for result in results:
        runs = result.runs[ASYNC]
        limits = (f"{median(run.limits[name] for run in runs):.2f}" for name in LIMITS)
        bounded_figures = (f"{result.bounded_s:.2f}", f"{result.of_bounded:.0%}")
        lines.append(
            row(result.work.name, f"{result.step_s(ASYNC):.2f}", *limits, *bounded_figures)
        )
    return lines


def shown(
    results: Sequence[Result],
) -> tuple[list[tuple[float, list[float], float, float]], list[tuple[int, int, float]]]:
    """Return the plotted data.

    The first list has, by tool share, the speedups and the two ideal speedups; the second has the
    speedup by lookahead window and staleness, without adaptive windows.
    """
    both = sorted((result for result in results if result.faster), key=lambda result: result.tools)
    base = _base(results)
    over = []
    for result in both:
        step_s = result.step_s(SYNC)
        ideals = step_s / result.ideal_s, step_s / result.bounded_s
        over.append((result.tools, result.faster, *ideals))
    curve = []
    if base:
        points = [result for result in results if not result.work.synchronous]
        for result in [*(each for each in points if not each.work.adaptive_window), base]:
            speedup = base.step_s(SYNC) / result.step_s(ASYNC)
            work = result.work
            curve.append((work.lookahead_window, work.max_staleness, speedup))
    return over, sorted(curve)


def draw(
    over: Sequence[tuple[float, list[float], float, float]], curve: Sequence[tuple[int, int, float]]
) -> None:
    """Plot the speedup over the tool share, and over the staleness bound by window."""
    with picture("async", width=9.0, panels=2) as (left, right):
        shares = [100 * tools for tools, *_ in over]
        faster = [median(times) for _, times, *_ in over]
        left.plot(shares, [ideal for *_, ideal, _ in over], "--", color="0.7", label="ideal")
        left.plot(
            shares,
            [bounded for *_, bounded in over],
            ":",
            color="0.3",
            label="ideal with the staleness bound",
        )
        low = [median(times) - min(times) for _, times, *_ in over]
        high = [max(times) - median(times) for _, times, *_ in over]
        left.errorbar(
            shares, faster, yerr=[low, high], marker="o", capsize=3, label="measured (range)"
        )
        left.axhline(1, color="0.8", linewidth=1)
        left.set(
            xlabel="share of an episode spent in tools, %",
            ylabel="times as fast as synchronous",
            ylim=(0, None),
        )
        left.legend(frameon=False)
        for window in sorted({window for window, *_ in curve}):
            points = [point[1:] for point in curve if point[0] == window]
            right.plot(*zip(*points, strict=True), "o-", label=f"window {window}")
        right.set(
            xlabel="schedule.max_staleness", ylabel="times as fast as synchronous", ylim=(0, None)
        )
        right.xaxis.get_major_locator().set_params(integer=True)
        if curve:
            right.legend(frameon=False, title="at the latency of a remote API")


Grades = dict[str, dict[int, list[float]]]
"""Mode -> step -> held-out success of each seed."""
Curves = dict[str, list[list[float]]]
"""Mode -> seed -> step -> rollout success."""


def learn(place: Path, steps: int | None) -> tuple[list[str], Grades, Curves]:
    """Run each seed in both modes, each in its own process. Finished runs in `place` are kept."""
    wanted = tomllib.loads(FILE.read_text())["learning"]
    wanted["steps"] = steps or wanted["steps"]
    graded: Grades = {SYNC: {}, ASYNC: {}}
    curves: Curves = {SYNC: [], ASYNC: []}
    for seed in wanted["seeds"]:
        for name, staleness in ((SYNC, 0), (ASYNC, wanted["max_staleness"])):
            folder = place / f"{name}-{seed}-{wanted['steps']}"
            if not _is_done(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _learn(folder, wanted | {"max_staleness": staleness}, seed)
            rows = list(RunFolder(folder).rows(METRICS))
            for step in rows:
                if "eval/success_rate" in step:
                    graded[name].setdefault(step["step"], []).append(step["eval/success_rate"])
            curves[name].append([step["rollout/success_rate"] for step in rows if step["step"]])
    return learnt(graded, curves, wanted), graded, curves


def learnt(graded: Grades, curves: Curves, wanted: Mapping[str, Any]) -> list[str]:
    """Return the tables of held-out and rollout success, per seed and over all seeds."""
    tasks, seeds = wanted["held_out"], wanted["seeds"]
    lines = [
        "Held-out success at equal samples: the recipe `retail` with a constant learning rate and "
        f"the exact route, {wanted['steps']} steps of {wanted['groups_per_step']} groups of "
        f"{wanted['group_size']}, staleness up to {wanted['max_staleness']}, {tasks} held-out "
        "tasks at temperature 1. Intervals are 95% Wilson intervals; those over all seeds treat "
        "the tasks of different seeds as independent. The last column states whether the "
        "asynchronous success is within the synchronous interval.",
        "",
        *columns("step", "seed", SYNC, ASYNC, "within the interval"),
    ]
    for step in sorted(graded[SYNC]):
        both = graded[SYNC][step], graded[ASYNC][step]
        for seed, *each in zip(seeds, *both, strict=True):
            lines.append(row(step, seed, *_compared(each, tasks)))
        lines.append(
            row(step, "all", *_compared([mean(each) for each in both], tasks * len(seeds)))
        )
    lines += [
        "",
        "Rollout success, mean over the seeds, which have the same tasks in both modes:",
        "",
    ]
    lines += columns("steps", SYNC, ASYNC, "difference, points")
    for start, end in pairwise(sorted(graded[SYNC])):
        sync, asynchronous = (
            100 * mean(mean(curve[start:end]) for curve in curves[mode]) for mode in (SYNC, ASYNC)
        )
        difference = f"{asynchronous - sync:+.1f}"
        steps = f"{start + 1} to {end}"
        lines.append(row(steps, f"{sync:.1f}%", f"{asynchronous:.1f}%", difference))
    return lines


def _compared(both: Sequence[float], tasks: int) -> tuple[str, str, str]:
    sync, asynchronous = both
    low, high = wilson(sync, tasks)
    within = "yes" if low <= asynchronous <= high else "no"
    return _with_interval(sync, tasks), _with_interval(asynchronous, tasks), within


def draw_learning(graded: Grades, curves: Curves) -> None:
    """Plot rollout success, as mean and range over seeds, and held-out success."""
    with picture("async-learning") as axes:
        for name in curves:
            each = list(zip(*curves[name], strict=True))
            steps = range(1, len(each) + 1)
            line = axes.plot(
                steps,
                [100 * mean(seeds) for seeds in each],
                linewidth=1.2,
                label=f"{name}, trained on",
            )
            low, high = ([100 * least(seeds) for seeds in each] for least in (min, max))
            axes.fill_between(steps, low, high, color=line[0].get_color(), alpha=0.12, linewidth=0)
            held = sorted(graded[name])
            points = [100 * mean(graded[name][step]) for step in held]
            axes.plot(
                held,
                points,
                "D",
                color=line[0].get_color(),
                markeredgecolor="black",
                label=f"{name}, held out",
            )
        axes.set(xlabel="step (as many groups trained on)", ylabel="success, %", ylim=(0, 100))
        axes.legend(frameon=False, fontsize=8)


def _is_done(folder: Path) -> bool:
    return folder.is_dir() and any(
        event["kind"] == "stopped" and event["reason"] == "finished"
        for event in RunFolder(folder).rows(EVENTS)
    )


def _learn(folder: Path, wanted: Mapping[str, Any], seed: int) -> None:
    options = {
        "seed": seed,
        "max_steps": wanted["steps"],
        "minutes": 0,
        "runs": folder.parent.resolve(),
        "name": folder.name,
        "task.latency_s": wanted["latency_s"],
        "task.latency_sigma": wanted["latency_sigma"],
        "schedule.max_staleness": wanted["max_staleness"],
        "schedule.groups_per_step": wanted["groups_per_step"],
        "schedule.group_size": wanted["group_size"],
        "trainer.lr_schedule": "constant",
        "trainer.threads": 1,
        "audit.share": 0,
        "eval.tasks": wanted["held_out"],
        "eval.interval": wanted["graded_every"],
    }
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-m", "unstale", "train", "retail", *words], check=True, cwd=root
    )


def _with_interval(success: float, tasks: int) -> str:
    low, high = wilson(success, tasks)
    return f"{success:.1%} ({low:.0%} to {high:.0%})"


def main(words: Sequence[str] | None = None, put: Callable[..., Any] = write) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="workloads of workloads.toml to run"
    )
    parser.add_argument(
        "--steps", type=int, help="least timed steps of a run (10), or steps with --learning (60)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument(
        "--no-curve", action="store_true", help="without the curve over the staleness bound"
    )
    parser.add_argument("--learning", action="store_true", help="held-out success instead of pace")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs") / f"bench-async-{date.today()}",
        help="folder of the runs of --learning",
    )
    chosen = parser.parse_args(words)
    if chosen.learning:
        lines, graded, curves = learn(chosen.runs, chosen.steps)
        draw_learning(graded, curves)
        name = f"async-learning-{chosen.steps}-steps" if chosen.steps else "async-learning"
        put(name, "Asynchronous and synchronous training at equal samples", lines)
        return
    wanted = workloads()
    if unknown := set(chosen.only or ()) - {work.name for work in wanted}:
        parser.error(f"no workloads: {sorted(unknown)}; there are {[work.name for work in wanted]}")
    with tempfile.TemporaryDirectory(prefix="bench-async-") as place:
        results = [
            compare(work, Path(place) / "runs", steps=chosen.steps or 10, repeats=chosen.repeats)
            for work in wanted
            if (not chosen.only or work.name in chosen.only)
            and (work.synchronous or not chosen.no_curve)
        ]
    draw(*shown(results))
    put("async", "Asynchronous against synchronous training", tables(results))


if __name__ == "__main__":
    main()
