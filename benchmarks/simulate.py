"""Compare simulations with runs on this machine and with published ratios.

Costs and episodes are fitted to one run of the recipe `retail`. From this fit alone, three runs
with other schedules are predicted, and then run for comparison. This is repeated `--repeats` times,
with the runs in another order each time. The learning rate of 1e-7 hardly changes the weights, so
all runs have the same episodes. Published ratios are simulated with one set of hardware constants
(published.py).
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

from benchmarks.published import APRIL, NOT_SIMULATED, ROWS, Compared, compare, generation_s_of
from benchmarks.tables import CONSOLE, columns, picture, rotated, row, spread, write
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.measured import SimulationSetup, fit_costs, setup_of
from unstale.analysis.planner.recorded import RecordedRun
from unstale.analysis.planner.simulate import Constant, Fleet, LogNormal, Workload, simulate
from unstale.cli.session import train
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.durability.run_folder import RunFolder
from unstale.envs.desk import DeskConfig
from unstale.recipes import retail

GOAL = 0.15
"""Largest deviation that meets the goal."""
SIMULATED = 60
"""Steps of a prediction, enough for a stable mean."""


@dataclass(frozen=True)
class Arm:
    """A schedule that is both run and predicted."""

    name: str
    schedule: ScheduleConfig


def arms(groups: int, siblings: int) -> tuple[Arm, tuple[Arm, ...]]:
    """Return the schedule that is fitted, and those that are predicted."""

    def arm(name: str, staleness: int, window: int = 1) -> Arm:
        schedule = ScheduleConfig(
            max_staleness=staleness,
            groups_per_step=groups,
            group_size=siblings,
            lookahead_window=window,
        )
        return Arm(name, schedule)

    fitted = arm("staleness 2 (fitted)", 2)
    return fitted, (
        arm("synchronous", 0),
        arm("staleness 1", 1),
        arm(f"staleness 4, window {2 * groups}", 4, 2 * groups),
    )


def config(arm: Arm, folder: Path, *, steps: int, latency_s: float, seed: int) -> RunConfig:
    recipe = retail()
    return replace(
        recipe,
        seed=seed,
        runs=folder,
        name=arm.name.replace(" ", "-").replace(",", ""),
        max_steps=steps,
        minutes=0.0,
        task=DeskConfig(level="1", latency_s=latency_s),
        schedule=arm.schedule,
        trainer=TrainerConfig(lr=1e-7, threads=1),  # as fast with every schedule
        audit=AuditConfig(),
        checkpoint=CheckpointConfig(interval=steps + 1),
        eval=EvalConfig(tasks=0),
    )


def measured(run: Path, filling: int) -> list[float]:
    """Return the seconds of the steps after the queue has filled."""
    times = [line["time_s"] for line in RunFolder(run).metrics() if line["step"] > 0]
    return [after - before for before, after in pairwise(times)][filling:]


def predicted(setup: SimulationSetup, schedule: ScheduleConfig) -> float:
    return replace(setup, schedule=schedule).simulate(SIMULATED).mean_step_s


def of_this_machine(
    sizes: tuple[int, int], *, steps: int, latency_s: float, repeats: int
) -> tuple[list[str], list[tuple[str, float, float]]]:
    """Return the table, and (schedule, measured, predicted) for the picture.

    Each repeat has its own fit and seed.
    """
    fitted, others = arms(*sizes)
    found: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in (fitted, *others)}
    for turn in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for arm in rotated([fitted, *others], turn % len(found)):
                CONSOLE.print(f"round {turn + 1} of {repeats}: running {arm.name}")
                wanted = config(arm, Path(folder), steps=steps, latency_s=latency_s, seed=turn)
                runs[arm] = train(wanted, console=CONSOLE).folder
            recorded = RecordedRun.read(runs[fitted])
            setup = setup_of(recorded, fit_costs([recorded]))
            for arm, run in runs.items():
                seconds = fmean(measured(run, min(arm.schedule.max_staleness, steps - 4)))
                found[arm.name].append((seconds, predicted(setup, arm.schedule)))
    lines = columns(
        "schedule", "rounds", "measured s a step", "predicted", "deviation", "goal: within 15%"
    )
    for name, both in found.items():
        seen, forecast = zip(*both, strict=True)
        off = [one / other - 1 for one, other in zip(forecast, seen, strict=True)]
        verdict = (
            "fitted to it"
            if name == fitted.name
            else "met"
            if abs(median(off)) <= GOAL
            else "missed"
        )
        lines.append(
            row(name, repeats, spread(seen), spread(forecast), spread(off, "{:+.0%}"), verdict)
        )
    points = [
        (name, *(median(each) for each in zip(*both, strict=True))) for name, both in found.items()
    ]
    paid = setup.costs
    return [
        *lines,
        "",
        f"Fitted, in the last round: a decoding step {1e3 * paid.decode:.2f} ms and "
        f"{1e6 * paid.decode_reply:.0f} us a reply, {1e6 * paid.prefill_token:.0f} us a context "
        f"token; a batch {paid.train:.2f} s and {1e6 * paid.train_token:.0f} us a token to train, "
        f"{paid.old:.2f} s and {1e6 * paid.old_token:.0f} us a token (and "
        f"{1e6 * paid.old_version_token:.0f} us for each further version) to score; "
        f"{1e3 * paid.publish:.0f} ms to publish and {1e3 * paid.load:.0f} ms to load.",
    ], points


def of_others(found: Sequence[Compared]) -> list[str]:
    lines = columns(
        "setup",
        "published",
        "if the step were its training alone",
        "simulated",
        "deviation",
        "goal: within 15%",
    )
    for one in found:
        low, high = one.row.published
        published = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        verdict = (
            "not claimed"
            if one.row.unclaimed
            else "met"
            if abs(one.deviation) <= GOAL
            else "missed"
        )
        alone = f"{one.row.trained_alone:.2f}" if one.row.trained_alone else ""
        lines.append(
            row(
                one.row.name, published, alone, f"{one.ratio:.2f}", f"{one.deviation:+.0%}", verdict
            )
        )
    lines += [
        "",
        "Deviations are from the nearer end of what was published.",
        "",
        *columns(
            "setup",
            "source",
            "taken from the results",
            "assumed",
            "mean reply tokens",
            "synchronous step: simulated (published)",
        ),
    ]
    for one in found:
        phases = one.row.sync_s
        step = f"generation {generation_s_of(one.sync):.0f} s" + (
            f" ({phases[0]:.0f} s)" if phases else ""
        )
        whole = sum(phases) + one.row.reference_s[0] if phases else one.row.sync_step_s
        step += f", all {one.sync.mean_step_s:.0f} s" + (f" ({whole:.0f} s)" if whole else "")
        assumed = one.row.assumed + (
            f"; 1/{one.row.scale} of groups and GPUs" if one.row.scale > 1 else ""
        )
        lines.append(
            row(one.row.name, one.row.source, one.row.given, assumed, f"{one.tokens:,.0f}", step)
        )
    reasons = [
        f"- Not reproduced: {one.row.name}, for {one.row.unclaimed}."
        for one in found
        if one.row.unclaimed
    ]
    return [*lines, "", *reasons, "", NOT_SIMULATED]


LARGE = ScheduleConfig(max_staleness=4, groups_per_step=512, group_size=16, lookahead_window=512)


COSTS = LinearCosts(
    decode=0.008,
    decode_reply=1e-4,
    decode_context=2e-8,
    prefill_token=2e-5,
    train_token=1e-6,
    load=5,
)
EPISODES = Workload(
    prompt_tokens=Constant(2000),
    turns=LogNormal.capped(6, 0.7, 30),
    reply_tokens=LogNormal(600, 0.9, 8000),
    tool_tokens=Constant(300),
    tool_s=LogNormal(5, 1.2, 300),
)
GPUS = (3000, 512, 8)
"""Sizes of the simulated fleets. The slowest simulation is first."""


def of_size(rows: Sequence[str]) -> list[str]:
    """Return a table of simulated large fleets. `rows` are those of `GPUS`."""
    lines = [
        f"Costs and episodes are assumed: a decoding step {1e3 * COSTS.decode:g} ms and "
        f"{1e3 * COSTS.decode_reply:g} ms a reply, training {1e6 * COSTS.train_token:g} us a token "
        "on those of 3,000 GPUs that train (of fewer, as much longer), loading a version "
        f"{COSTS.load:g} s; 6 turns of 600 tokens and tool calls of 5 s, with long tails; "
        f"staleness up to {LARGE.max_staleness}, window and step of {LARGE.groups_per_step} "
        f"groups of {LARGE.group_size} with 3,000 GPUs.",
        "",
    ]
    lines += columns(
        "GPUs",
        "engines",
        "live episodes",
        "s a step",
        "engines busy",
        "engines died",
        "processor s a simulated step",
    )
    return [*lines, *reversed(rows)]


def fleet_row(gpus: int, steps: int) -> str:
    """Simulate a large fleet, and return its row, with the time that the simulation takes."""
    engines, scale = max(1, gpus // 3), gpus / 3000
    groups = max(1, round(512 * scale))
    schedule = replace(LARGE, groups_per_step=groups, lookahead_window=groups)
    began = time.process_time()
    fleet = Fleet(engines=engines, max_running=64, failures_per_hour=0.02)
    costs = replace(COSTS, train_token=COSTS.train_token / scale)
    outcome = simulate(EPISODES, fleet, schedule, costs, steps=steps + schedule.max_staleness + 1)
    took = (time.process_time() - began) / (steps + 2 * schedule.max_staleness + 1)
    return row(
        gpus,
        engines,
        f"{(schedule.max_staleness + 1) * groups * schedule.group_size:,}",
        f"{outcome.mean_step_s:.0f}",
        f"{outcome.engine_busy_share:.0%}",
        outcome.deaths,
        f"{took:.2f}",
    )


def simulators(count: int | None = None) -> ProcessPoolExecutor:
    """Return a pool of processes, of as many as there are cores if `count` is None."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def _named(one: Compared) -> str:
    return one.row.name + " (not claimed)" * bool(one.row.unclaimed)


def draw(runs: Sequence[tuple[str, float, float]], others: Sequence[Compared]) -> None:
    with picture("simulate", width=10, height=5.2, panels=2) as (left, right):
        for axes, points, title in (
            (
                left,
                [(name, seen, forecast) for name, seen, forecast in runs],
                "seconds a step, this machine",
            ),
            (
                right,
                [(_named(one), sum(one.row.published) / 2, one.ratio) for one in others],
                "asynchronous over synchronous, published",
            ),
        ):
            top = 1.15 * max(max(seen, forecast) for _, seen, forecast in points)
            axes.fill_between(
                [0, top],
                [0, 0.85 * top],
                [0, 1.15 * top],
                alpha=0.12,
                color="gray",
                label="within 15%",
            )
            axes.plot([0, top], [0, top], color="gray", linewidth=0.8)
            for name, seen, forecast in points:
                axes.scatter(seen, forecast, s=28, label=name)
            axes.set(
                xlim=(0, top),
                ylim=(0, top),
                xlabel="measured" if axes is left else "published",
                title=title,
            )
            axes.set_ylabel("simulated")
            axes.legend(
                fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2
            )


def main(arguments: Sequence[str] | None = None) -> Mapping[str, Sequence[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of each run. Now: 12")
    parser.add_argument("--groups", type=int, default=8, help="groups of a step. Now: 8")
    parser.add_argument("--siblings", type=int, default=8, help="episodes of a group. Now: 8")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of the runs. Now: 3")
    parser.add_argument(
        "--latency-s", type=float, default=1.0, help="mean seconds of a tool call. Now: 1"
    )
    parser.add_argument(
        "--turnovers",
        type=int,
        default=4,
        help="simulated replacements of all episodes in flight; 0 skips the simulations. Now: 4",
    )
    parser.add_argument("--no-runs", action="store_true", help="simulate only")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="simulate only the smallest published row, in seconds; write nothing",
    )
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        smallest = replace(APRIL, groups=4, group_size=4)
        with simulators(1) as pool:
            found = list(compare((smallest,), 2, pool, CONSOLE.print))
        return {"published": of_others(found)}
    sections: dict[str, Sequence[str]] = {}
    runs: list[tuple[str, float, float]] = []
    others: list[Compared] = []
    if not chosen.no_runs:
        sizes = chosen.groups, chosen.siblings
        sections["This machine"], runs = of_this_machine(
            sizes, steps=chosen.steps, latency_s=chosen.latency_s, repeats=chosen.repeats
        )
    if chosen.turnovers:
        CONSOLE.print(f"simulating {len(ROWS) + 1} published setups and {len(GPUS)} fleets")
        with simulators() as pool:
            fleets = pool.map(partial(fleet_row, steps=chosen.turnovers), GPUS)
            others = list(compare((*ROWS, APRIL), chosen.turnovers, pool, CONSOLE.print))
            sections["Published ratios"] = of_others(others)
            sections["Large fleets"] = of_size(list(fleets))
    lines = [
        line for title, section in sections.items() for line in (f"## {title}", "", *section, "")
    ]
    write("simulate", "Simulations compared with measurements", lines)
    if runs and others:
        draw(runs, others)
    return sections


if __name__ == "__main__":
    main()
