"""The command `simulate`. It imports torch only for the simulation."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unstale.config import MAX_SEED, ConfigError, OldLogpsConfig, ScheduleConfig
from unstale.config.checks import bounded
from unstale.durability.run_folder import plain
from unstale.planner.assignments import parse_assignments, value_kinds
from unstale.planner.costs import LinearCosts
from unstale.planner.simulated_techniques import choose, option_kinds
from unstale.planner.workload import Fleet, Workload

if TYPE_CHECKING:
    from unstale.planner.measured import SimulationSetup
    from unstale.planner.result import SimulationResult

_SECTIONS = {
    "schedule": ScheduleConfig,
    "fleet": Fleet,
    "workload": Workload,
    "costs": LinearCosts,
}


def _value_kinds() -> dict[str, Any]:
    """Return the type of every value that --set accepts, by name."""
    kinds = {}
    for section, cls in _SECTIONS.items():
        for name, kind in value_kinds(cls).items():
            kinds[f"{section}.{name}"] = kind
    del kinds["workload.recorded"]
    return kinds | option_kinds()


def _epilog() -> str:
    names = fill(", ".join(_value_kinds()), 98, initial_indent="  ", subsequent_indent="  ")
    return f"""names of --set NAME=VALUE:
{names}

Episodes take a number, or a log-normal distribution as MEAN~SIGMA, with SIGMA of the logarithm.
MEAN~SIGMA<MAX is capped at MAX and keeps the mean. Costs are in seconds.

  unstale simulate --like runs/x --set schedule.max_staleness=4
  unstale simulate --set fleet.engines=64 "workload.reply_tokens=4000~1<32000" \\
      "workload.tool_s=5~1.2" costs.decode=0.012 costs.decode_reply=1e-4 \\
      costs.prefill_token=1e-5 costs.train_token=2e-6 costs.load=3
  unstale simulate --like runs/x --set fleet.engines=4 \\
      --against fleet.prefill_engines=1 fleet.kv_transfer=true
"""


def add(verbs: Any) -> None:
    """Add the command and its options to the command line."""
    parser = verbs.add_parser(
        "simulate", help="simulate a schedule on a virtual clock", allow_abbrev=False
    )
    parser.description = (
        "Simulate the schedule of a run on a virtual clock, with the times of its parts as costs.\n"
        "Prints the throughput, the staleness, and what limits the speed."
    )
    parser.epilog = _epilog()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(act=_simulate)
    add = parser.add_argument
    add("--like", type=Path, metavar="RUN", help="take episodes and costs from this run folder")
    add(
        "--techniques",
        metavar="NAMES",
        help="simulate limits, segments or replay; with --like, in place of the run's own",
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="values that replace those of the run or the defaults; see below",
    )
    add(
        "--against",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="simulate again with these values too, and show both in columns",
    )
    add(
        "--steps",
        type=bounded(int, 2, 10**6),
        metavar="N",
        help="simulated steps. Now: 20 after the queue is full",
    )
    seed = "seed of the random draws. Now: 0"
    add("--seed", type=bounded(int, 0, MAX_SEED), default=0, metavar="N", help=seed)
    add("--json", action="store_true", help="print JSON")


def _simulate(chosen: argparse.Namespace) -> int:
    from unstale.planner.simulate import simulate

    titles = {"": chosen.set}
    if chosen.against:
        titles = {"as set": chosen.set, " ".join(chosen.against): [*chosen.set, *chosen.against]}
    results = {}
    for title, assignments in titles.items():
        setup = _setup(chosen.like, assignments, chosen.techniques)
        results[title] = simulate(
            setup.workload,
            setup.fleet,
            setup.schedule,
            setup.costs,
            steps=chosen.steps or 21 + setup.schedule.max_staleness,
            seed=chosen.seed,
            needs=setup.needs,
            techniques=setup.techniques,
        )
    console = Console(soft_wrap=True, highlight=False)
    if chosen.json:
        rows = [_json_row(result) for result in results.values()]
        console.print_json(json.dumps(rows if chosen.against else rows[0]))
    else:
        sentences = [f"{title}: {each.bottleneck}" for title, each in results.items() if title]
        sentences = sentences or [each.bottleneck for each in results.values()]
        console.print(table(results), *sentences, sep="\n")
    return 0


def _json_row(result: "SimulationResult") -> dict[str, Any]:
    derived = ("mean_step_s", "groups_per_s", "staleness_mean", "staleness_max", "bottleneck")
    return plain(result) | {name: getattr(result, name) for name in derived}


def _setup(like: Path | None, assignments: Sequence[str], names: str | None) -> "SimulationSetup":
    """Return the run of --like or the defaults, changed by the values of --set.

    `names` are those of --techniques, None if it is not given.
    """
    from unstale.planner.measured import SimulationSetup, from_run

    changes: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    options = {}
    for name, value in parse_assignments("--set", assignments, _value_kinds()).items():
        section, _, field = name.partition(".")
        if section in _SECTIONS:
            changes[section][field] = value
        else:
            options[name] = value
    techniques = choose(names or "", options)
    if like:
        setup = from_run(like, techniques if names is not None else None)
    else:
        for required in ("decode", "train"):
            if not any(name.startswith(required) for name in changes["costs"]):
                raise ConfigError(
                    f"the costs are missing: give --like RUN, or --set costs.{required}=SECONDS "
                    "and the other costs"
                )
        needs = OldLogpsConfig().needs
        parts = (Workload(), Fleet(), ScheduleConfig(), LinearCosts(), needs)
        setup = SimulationSetup(*parts, techniques)
    if changes["workload"].keys() & {"prompt_tokens", "turns", "reply_tokens", "tool_tokens"}:
        changes["workload"]["recorded"] = ()
    changed = {
        section: replace(getattr(setup, section), **values) for section, values in changes.items()
    }
    return replace(setup, **changed)


def table(results: "Mapping[str, SimulationResult]") -> Table:
    """Return the results of simulations by title as the columns of a table.

    A single result with the title "" has no head.
    """
    columns = [_cells(result) for result in results.values()]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for _ in columns:
        grid.add_column()
    if any(results):
        grid.add_row("", *results)
    for name in columns[0]:
        grid.add_row(name, *(cells[name] for cells in columns))
    return grid


def _cells(result: "SimulationResult") -> dict[str, str]:
    seconds = sum(result.steady_s)
    ages = ", ".join(f"{age}: {tokens:,}" for age, tokens in result.staleness_histogram.items())
    busy = f"busy {result.engine_busy_share:.0%}"
    if result.prefill_busy_share:
        busy += (
            f" (prefill group {result.prefill_busy_share:.0%}, "
            f"decode group {result.decode_busy_share:.0%})"
        )
    return {
        "seconds per step": f"mean {result.mean_step_s:.3g} "
        f"({min(result.steady_s):.3g} to {max(result.steady_s):.3g})",
        "groups": f"{60 * result.groups_per_s:.3g} a minute",
        "tokens": f"{result.trained_tokens / seconds:,.0f} trained a second, "
        f"{result.trained_sampled / seconds:,.0f} of them sampled"
        + (f"; {result.replayed_tokens / seconds:,.0f} replayed" if result.replayed_tokens else ""),
        "engines": busy,
        "first token": f"mean {result.first_token_s:.3g} s, 99% {result.first_token_p99_s:.3g} s; "
        f"{result.rejects:,} rejects, longest queue {result.longest_queue}",
        "trainer": f"busy {result.trainer_busy_share:.0%} "
        f"(old log-probabilities {result.old_logps_share:.0%}), "
        f"waits for groups {result.trainer_wait_share:.0%}",
        "an episode": f"{result.episode_s:.3g} s, {result.tool_share:.0%} of it in tools, "
        f"{result.engine_share:.0%} with an engine"
        + (f", {result.slot_share:.0%} waiting for a slot" if result.slot_share else "")
        + f"; then {result.ready_s:.3g} s until training",
        "staleness": f"mean {result.staleness_mean:.2f}, max {result.staleness_max}, "
        f"bound {result.staleness_bound} (tokens by staleness: {ages})",
        "lost": f"{result.deaths} engines died, {result.lost_tokens:,} tokens were sampled again, "
        f"{result.failed_episodes} attempts timed out",
    }
