"""How much sooner is the same number of groups trained on when generation goes on meanwhile, and how near the ideal?

    python -m benchmarks.asynchrony                # the workloads of workloads.toml: 25 minutes on two quiet cores
    python -m benchmarks.asynchrony --learning     # held-out success, both ways at equal samples: 35 minutes

Real runs of the retail recipe with the exact route, on the same cores; tools really wait. Each workload runs
asynchronously and synchronously by turns, `--repeats` times. Where engine and trainer work at once the trainer has half
of the cores; where they take turns it has all. The engine is one process of one thread for both, beside the event loop:
with two, synchronous steps took longer in a trial.

Timed are steps after the pipeline has filled: `--steps` asynchronous ones, in whole turns of the live groups, and half
as many synchronous ones or more from the same step on, which train on much the same tasks.

The ideal of a run is the longest of four times a step, none of which a schedule can shorten. They are the run's own, so
what engine and trainer lose to each other on the way is in them:

    engine     sampling its tokens, at the rate of this run's own batches
    trainer    scoring, training, and what a publication takes of its thread
    episodes   Little's law: mean duration of an episode * episodes a step / episodes that may be live
    processor  processor seconds of the process that trains, and of the engine's while it computes, over the cores

Beside it stands what the staleness bound B leaves of that for the batches as they were made up. The first token of an
episode and the version that it is trained into are at most B + 1 publications apart; so step t ends no earlier than

    end(t) >= end(t - 1) + scoring and training
    end(t) >= end(t - B - 1) + the longest episode of its batch + scoring and training

and the longest path through the timed steps is what no other order of the same work goes much below, unless it makes
episodes shorter: they last as long as they did in this run, where they waited for each other. (Not at all below, if
nothing of a step's training went on beside the end of the step before.)

Writes a dated table and picture under benchmarks/results/.
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

from rich.console import Console

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
from unstale.durability.journal import Journal
from unstale.durability.machine import cores
from unstale.durability.run_folder import EVENTS, METRICS, RunFolder
from unstale.envs.retail import RetailConfig
from unstale.observe.statistics import wilson

FILE = Path(__file__).parent / "workloads.toml"
FASTER, NEAR = 2.8, 0.85
LONGEST = (
    "SELECT c.step, max(f.at - e.at) FROM consumed c JOIN finished f ON f.number = c.number "
    "JOIN episodes e ON e.number = c.number GROUP BY c.step"
)
"""Of a journal: the longest episode of every step's batch, in seconds."""
TRAINER = ("trainer/update_s", "old_logps/prepare_s", "publish/trainer_s")
LIMITS = ("engine", "trainer", "episodes", "processor")
ASYNC, SYNC = "asynchronous", "synchronous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One entry of the file."""

    name: str
    latency_s: float
    latency_sigma: float
    max_staleness: int
    lookahead_window: int
    groups_per_step: int
    group_size: int
    synchronous: bool = True

    def config(self, *, seed: int, steps: int, synchronous: bool) -> RunConfig:
        """The recipe, as this workload wants it: nothing but steps, no evaluation, no checkpoint but after the last."""
        base, threads = recipes.retail(), cores() if synchronous else max(1, cores() // 2)
        return replace(
            base,
            seed=seed,
            steps=steps,
            minutes=0.0,
            task=RetailConfig(latency_s=self.latency_s, latency_sigma=self.latency_sigma),
            schedule=ScheduleConfig(
                max_staleness=0 if synchronous else self.max_staleness,
                lookahead_window=1 if synchronous else self.lookahead_window,
                groups_per_step=self.groups_per_step,
                group_size=self.group_size,
            ),
            trainer=replace(base.trainer, threads=threads),
            audit=AuditConfig(),
            checkpoint=CheckpointConfig(every=steps + 1),
            eval=EvalConfig(tasks=0),
        )

    @property
    def live(self) -> int:
        """Episodes that may be live at once, asynchronously."""
        return (self.max_staleness + 1) * self.groups_per_step * self.group_size


def workloads(file: Path = FILE) -> list[Workload]:
    held = tomllib.loads(file.read_text())
    common = {name: held[name] for name in ("groups_per_step", "group_size")}
    return [Workload(**common | given) for given in held["workload"]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: seconds a step, the share of their own time that its episodes waited for tools, its limits a step."""

    step_s: float
    tools: float
    limits: Mapping[str, float]
    bounded_s: float = 0.0
    """The ideal that the staleness bound leaves."""

    @property
    def ideal(self) -> float:
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        return max(self.limits, key=lambda name: self.limits[name])


def measure(
    rows: Sequence[Mapping[str, Any]], first: int, *, live: int, num_cores: int
) -> Measured:
    """Of the rows after the `first`, which are the pipeline's filling.

    >>> before = {"time_s": 10.0}
    >>> after = {"time_s": 14.0, "trainer/cpu_s": 2.0, "engine/busy_s": 2.4, "engine/sampled_tokens": 120}
    >>> after["engine/cpu_s"] = 2.4
    >>> after |= {"trainer/action_tokens": 100, "trainer/update_s": 1.5, "old_logps/prepare_s": 0.5}
    >>> after |= {"publish/trainer_s": 0.1, "rollout/tool_wait_s": 18.0, "rollout/generation_wait_s": 6.0, "rollout/episodes": 8}
    >>> found = measure([before, after], 1, live=16, num_cores=2)
    >>> found.step_s, found.tools, found.limit, {name: round(s, 2) for name, s in found.limits.items()}
    (4.0, 0.75, 'processor', {'engine': 2.0, 'trainer': 2.1, 'episodes': 1.5, 'processor': 2.2})
    """
    timed = rows[first:]
    steps = len(timed)

    def total(name: str) -> float:
        return sum(float(one[name]) for one in timed)

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
    """Seconds a step of the longest path, or the ideal; `longest` has the longest episode of every step's batch.

    >>> rows = [{"step": step, "time_s": time} for step, time in enumerate([0.0, 4.0, 6.0, 9.0, 13.0, 15.0], 1)]
    >>> rows = [row | dict.fromkeys(TRAINER, 0.25) for row in rows]
    >>> bounded(rows, 3, longest={4: 3.5, 5: 6.0, 6: 2.0}, bound=1, ideal=1.0)  # 8.25, 12.75, 13.5
    2.5
    >>> bounded(rows, 3, longest=dict.fromkeys((4, 5, 6), 0.1), bound=1, ideal=1.0)
    1.0
    """
    ends = [float(one["time_s"]) for one in rows[:first]]
    for i, one in enumerate(rows[first:], first):
        begun = max(
            ends[i - 1], ends[i - bound - 1] + longest[one["step"]] if i > bound else float("-inf")
        )
        ends.append(begun + sum(float(one[name]) for name in TRAINER))
    return max(ideal, (ends[-1] - ends[first - 1]) / (len(rows) - first))


def timed_run(work: Workload, place: Path, *, seed: int, steps: int, synchronous: bool) -> Measured:
    """Whole turns of the live groups, after the first, which begin together. Not the run's last step, with which a
    checkpoint is made."""
    turn, first = (1 if synchronous else work.max_staleness + 1), work.max_staleness + 2
    wanted = ceil(steps / 2) if synchronous else steps
    config = work.config(
        seed=seed, steps=first + turn * ceil(wanted / turn) + 1, synchronous=synchronous
    )
    name = f"{work.name}-{SYNC if synchronous else ASYNC}-{seed}".replace(" ", "-").replace("'", "")
    run = train(replace(config, runs=place, name=name), console=Console(quiet=True))
    rows = [one for one in run.metrics if one["step"]][:-1]
    live = work.groups_per_step * work.group_size if synchronous else work.live
    with Journal.read(run.folder) as reader:
        longest = dict(reader.rows(LONGEST))
    found = measure(rows, first, live=live, num_cores=cores())
    bound = config.schedule.staleness_bound
    return replace(
        found, bounded_s=bounded(rows, first, longest=longest, bound=bound, ideal=found.ideal)
    )


@dataclass(frozen=True, slots=True)
class Result:
    """A workload's runs, round by round."""

    work: Workload
    found: Mapping[str, Sequence[Measured]]

    @property
    def faster(self) -> list[float]:
        """Synchronous time over asynchronous time, round by round; nothing for a point of the curve."""
        if SYNC not in self.found:
            return []
        return ratios(
            {name: [one.step_s for one in runs] for name, runs in self.found.items()},
            SYNC,
            over=ASYNC,
        )

    @property
    def near(self) -> list[float]:
        """Shares of the ideal."""
        return [one.ideal / one.step_s for one in self.found[ASYNC]]

    @property
    def tools(self) -> float:
        return median(one.tools for one in self.found[SYNC if SYNC in self.found else ASYNC])

    def step_s(self, name: str) -> float:
        return median(one.step_s for one in self.found[name])

    @property
    def ideal_s(self) -> float:
        return median(one.ideal for one in self.found[ASYNC])

    @property
    def bounded_s(self) -> float:
        return median(one.bounded_s for one in self.found[ASYNC])

    @property
    def of_bounded(self) -> float:
        """The share of what the staleness bound leaves of the ideal."""
        return median(one.bounded_s / one.step_s for one in self.found[ASYNC])


def compare(work: Workload, place: Path, *, steps: int, repeats: int) -> Result:
    """By turns; the seed is the round's, so that both have the same tasks in the same order."""
    found: dict[str, list[Measured]] = {ASYNC: [], **({SYNC: []} if work.synchronous else {})}
    for turn in range(repeats):
        for name in sorted(found, reverse=turn % 2 == 1):
            one = timed_run(work, place, seed=turn, steps=steps, synchronous=name == SYNC)
            found[name].append(one)
            shutil.rmtree(place)
            CONSOLE.print(
                f"{work.name}, round {turn + 1} of {repeats}, {name}: {one.step_s:.2f} s a step, {one.tools:.0%} of an "
                f"episode in tools, ideal {one.ideal:.2f} s ({one.limit})"
            )
    return Result(work, found)


def tables(results: Sequence[Result]) -> list[str]:
    """The comparison, and the curve."""
    both = [result for result in results if result.faster]
    lines = [
        f"Real runs of the retail desk, {both[0].work.groups_per_step if both else 4} groups of "
        f"{both[0].work.group_size if both else 8} a step; medians (range). The share of tools is that of an episode's "
        "own time in the synchronous run. What the workloads stand for, and what no schedule can shorten, is in "
        "`benchmarks/workloads.toml` and at the head of `benchmarks/asynchrony.py`.",
        "",
        *columns(
            "workload", "tools", "staleness, window", "rounds", "synchronous, s a step", "asynchronous",
            "times as fast", "ideal, s a step", "set by", "of the ideal",
        ),
    ]  # fmt: skip
    for result in both:
        work, runs = result.work, result.found[ASYNC]
        lines.append(
            row(
                work.name, f"{result.tools:.0%}", f"{work.max_staleness}, {work.lookahead_window}", len(runs),
                f"{result.step_s(SYNC):.2f}", f"{result.step_s(ASYNC):.2f}", spread(result.faster),
                f"{result.ideal_s:.2f}", _most(runs),
                spread([100 * share for share in result.near], "{:.0f}%"),
            )
        )  # fmt: skip
    lines.append("")
    for result in both:
        told = [f"{NEAR:.0%} of the ideal {verdict(result.near, NEAR)}"]
        if median(result.near) < NEAR:
            told.append(f"of what the staleness bound leaves of it, {result.of_bounded:.2f}")
        if result.work.latency_s:
            ideal = f"the ideal would be {result.step_s(SYNC) / result.ideal_s:.2f} times"
            told.insert(
                0,
                f"{FASTER} times as fast, with {result.tools:.0%} tools, {verdict(result.faster, FASTER)} ({ideal})",
            )
        lines.append(f"* {result.work.name}: {'; '.join(told)}.")
    return lines + _curve(results) + _limits(results)


def _most(runs: Sequence[Measured]) -> str:
    limits = [one.limit for one in runs]
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
        "staleness", "window", "rounds", "s a step", "times as fast", "ideal, s a step", "of the ideal",
        "of what the bound leaves",
    )  # fmt: skip
    for result in [*points, base]:
        work, runs = result.work, result.found[ASYNC]
        lines.append(
            row(
                work.max_staleness, work.lookahead_window, len(runs), spread([one.step_s for one in runs]),
                f"{base.step_s(SYNC) / result.step_s(ASYNC):.2f}", f"{result.ideal_s:.2f}",
                f"{median(result.near):.0%}", f"{result.of_bounded:.0%}",
            )
        )  # fmt: skip
    return lines


def _base(results: Sequence[Result]) -> Result | None:
    """Whose synchronous run the points of the curve are compared with: the one with their tools."""
    points = [result.work for result in results if not result.work.synchronous]
    return next(
        (one for one in results if one.faster and points and _alike(one.work, points[0])), None
    )


def _alike(one: Workload, other: Workload) -> bool:
    return (one.latency_s, one.latency_sigma) == (other.latency_s, other.latency_sigma)


def _limits(results: Sequence[Result]) -> list[str]:
    told = "What no schedule can shorten, seconds a step; and what the staleness bound leaves of the longest of it:"
    lines = [
        "",
        told,
        "",
        *columns("workload", "measured", *LIMITS, "with the staleness bound", "of that"),
    ]
    for result in results:
        runs = result.found[ASYNC]
        limits = (f"{median(one.limits[name] for one in runs):.2f}" for name in LIMITS)
        left = f"{result.bounded_s:.2f}", f"{result.of_bounded:.0%}"
        lines.append(row(result.work.name, f"{result.step_s(ASYNC):.2f}", *limits, *left))
    return lines


def shown(
    results: Sequence[Result],
) -> tuple[list[tuple[float, list[float], float, float]], list[tuple[int, int, float]]]:
    """What is drawn: by the share of tools, how much faster, and what both ideals would be; and by bound and window."""
    both, base = (
        sorted((result for result in results if result.faster), key=lambda one: one.tools),
        _base(results),
    )
    over = []
    for result in both:
        ideals = (result.step_s(SYNC) / ideal for ideal in (result.ideal_s, result.bounded_s))
        over.append((result.tools, result.faster, *ideals))
    points = [result for result in results if not result.work.synchronous] + (
        [base] if base else []
    )
    curve = [
        (one.work.lookahead_window, one.work.max_staleness, base.step_s(SYNC) / one.step_s(ASYNC))
        for one in points
        if base
    ]
    return over, sorted(curve)


def draw(
    over: Sequence[tuple[float, list[float], float, float]], curve: Sequence[tuple[int, int, float]]
) -> None:
    """Times as fast over the share of tools; and over the staleness bound, by window."""
    with picture("async", width=9.0, panels=2) as (left, right):
        shares, faster = (
            [100 * tools for tools, *_ in over],
            [median(times) for _, times, *_ in over],
        )
        left.plot(shares, [ideal for *_, ideal, _ in over], "--", color="0.7", label="ideal")
        left.plot(
            shares,
            [bounded for *_, bounded in over],
            ":",
            color="0.3",
            label="as the staleness bound leaves it",
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
            own = [(staleness, times) for of, staleness, times in curve if of == window]
            right.plot(*zip(*own, strict=True), "o-", label=f"window {window}")
        right.set(
            xlabel="schedule.max_staleness", ylabel="times as fast as synchronous", ylim=(0, None)
        )
        right.xaxis.get_major_locator().set_params(integer=True)
        if curve:
            right.legend(frameon=False, title="at the latency of a remote API")


Grades = dict[str, dict[int, list[float]]]
"""How it runs -> step -> held-out success of every seed."""
Curves = dict[str, list[list[float]]]
"""How it runs -> for every seed, step by step, the success of the episodes that were trained on."""


def learn(place: Path, steps: int | None) -> tuple[list[str], Grades, Curves]:
    """Each seed both ways, each run in a process of its own; what `place` holds of a finished run is not run again."""
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
            for one in rows:
                if "eval/success_rate" in one:
                    graded[name].setdefault(one["step"], []).append(one["eval/success_rate"])
            curves[name].append([one["rollout/success_rate"] for one in rows if one["step"]])
    return learnt(graded, curves, wanted), graded, curves


def learnt(graded: Grades, curves: Curves, wanted: Mapping[str, Any]) -> list[str]:
    """The table: held-out success at every graded step, seed by seed and of all seeds together."""
    tasks, seeds = wanted["held_out"], wanted["seeds"]
    lines = [
        "Held-out success at equal samples: the recipe `retail` with a constant learning rate and the exact route, "
        f"{wanted['steps']} steps of {wanted['groups_per_step']} groups of {wanted['group_size']}, staleness up to "
        f"{wanted['max_staleness']}, graded on {tasks} held-out tasks at temperature 1; 95% Wilson intervals, those of "
        "all seeds as if each had been graded on tasks of its own. Within its interval: that of the synchronous runs.",
        "",
        *columns("step", "seed", SYNC, ASYNC, "within its interval"),
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
        "Success of the episodes that were trained on, mean of the seeds, which had the same tasks both ways:",
        "",
    ]
    lines += columns("steps", SYNC, ASYNC, "difference, points")
    for before, step in pairwise(sorted(graded[SYNC])):
        sync, late = (
            100 * mean(mean(own[before:step]) for own in curves[name]) for name in (SYNC, ASYNC)
        )
        lines.append(
            row(f"{before + 1} to {step}", f"{sync:.1f}%", f"{late:.1f}%", f"{late - sync:+.1f}")
        )
    return lines


def _compared(both: Sequence[float], tasks: int) -> tuple[str, str, str]:
    sync, late = both
    low, high = wilson(sync, tasks)
    return _told(sync, tasks), _told(late, tasks), "yes" if low <= late <= high else "no"


def draw_learning(graded: Grades, curves: Curves) -> None:
    """Success of what was trained on, the mean of the seeds and their range; held-out success where it was graded."""
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
        one["kind"] == "stopped" and one["reason"] == "finished"
        for one in RunFolder(folder).rows(EVENTS)
    )


def _learn(folder: Path, wanted: Mapping[str, Any], seed: int) -> None:
    knobs = {
        "seed": seed, "steps": wanted["steps"], "minutes": 0, "runs": folder.parent.resolve(), "name": folder.name,
        "task.latency_s": wanted["latency_s"], "task.latency_sigma": wanted["latency_sigma"],
        "schedule.max_staleness": wanted["max_staleness"], "schedule.groups_per_step": wanted["groups_per_step"],
        "schedule.group_size": wanted["group_size"], "trainer.lr_schedule": "constant", "trainer.threads": 1,
        "audit.share": 0, "eval.tasks": wanted["held_out"], "eval.every": wanted["graded_every"],
    }  # fmt: skip
    words = [word for name, value in knobs.items() for word in (f"--{name}", str(value))]
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-m", "unstale", "train", "retail", *words], check=True, cwd=root
    )


def _told(success: float, tasks: int) -> str:
    low, high = wilson(success, tasks)
    return f"{success:.1%} ({low:.0%} to {high:.0%})"


def main(words: Sequence[str] | None = None, put: Callable[..., Any] = write) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of these workloads of workloads.toml"
    )
    parser.add_argument(
        "--steps", type=int, help="timed steps of a run, at least (10); of a --learning run (60)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--learning", action="store_true", help="held-out success instead of pace")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs") / f"bench-async-{date.today()}",
        help="of --learning",
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
            if not chosen.only or work.name in chosen.only
        ]
    draw(*shown(results))
    put("async", "Asynchronous against synchronous training", tables(results))


if __name__ == "__main__":
    main()
