"""The command `simulate`: predict the speed and staleness of a run with other settings.

The schedule runs on a virtual clock. The module imports torch only for the simulation.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.table import Table

from unstale.analysis.planner.assignments import parse_assignments, value_kinds
from unstale.analysis.planner.costs import LinearCosts, Overheads
from unstale.analysis.planner.workload import Fleet, Workload
from unstale.config import MAX_SEED, ConfigError, OldLogpsConfig, ScheduleConfig
from unstale.config.checks import bounded
from unstale.durability.console import Console
from unstale.durability.run_folder import RunFolder, plain

if TYPE_CHECKING:
    from unstale.analysis.planner.measured import FittedCosts, SimulationSetup
    from unstale.analysis.planner.own_run import OwnRun
    from unstale.analysis.planner.recorded import RecordedRun
    from unstale.analysis.planner.result import SimulationResult

_SECTIONS = {
    "schedule": ScheduleConfig,
    "fleet": Fleet,
    "workload": Workload,
    "costs": LinearCosts,
    "overheads": Overheads,
}


def _value_kinds() -> dict[str, Any]:
    """Return the type of every value that --set accepts, by its name such as `fleet.engines`."""
    kinds = {}
    for section, cls in _SECTIONS.items():
        for name, kind in value_kinds(cls).items():
            kinds[f"{section}.{name}"] = kind
    del kinds["workload.recorded"], kinds["overheads.paces"]
    return kinds


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
  unstale simulate --like runs/x --like runs/y --set schedule.group_size=16 \\
      --against schedule.lookahead_window=16
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
    add(
        "--like",
        type=Path,
        metavar="RUN",
        action="append",
        help="take episodes and costs from this run folder, and compare its own simulation with "
        "it; costs are fitted to all runs if it is given more than once",
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
    titles = {"": chosen.set}
    if chosen.against:
        titles = {"as set": chosen.set, " ".join(chosen.against): [*chosen.set, *chosen.against]}
    for assignments in titles.values():  # before runs are read, which takes longer
        parse_assignments("--set", assignments, _value_kinds())
    for run in chosen.like or ():
        RunFolder(run)  # raises an error before torch is imported
    source = _Source.of(chosen.like, chosen.seed)
    changed = bool(chosen.set or chosen.against)
    refused = [problem for own in source.own for problem in own.problems]
    results: dict[str, SimulationResult] = {}
    if source.result and not changed and not chosen.steps:
        results[""] = source.result
    elif not refused:
        for title, assignments in titles.items():
            setup = _setup(source, assignments)
            steps = chosen.steps or 21 + setup.schedule.max_staleness
            results[title] = setup.simulate(steps, chosen.seed)
            if changed:
                refused += source.open_questions(setup, results[title], assignments)
        if refused:
            results = {}
    _print(source, results, refused, as_json=chosen.json)
    return 1 if refused else 0


def _print(
    source: "_Source",
    results: "Mapping[str, SimulationResult]",
    refused: Sequence[str],
    *,
    as_json: bool,
) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        rows: Any = [_json_row(result) for result in results.values()]
        if source.own:
            rows = {
                "own_runs": [_own_row(own) for own in source.own],
                "refused": list(refused),
                "simulated": rows,
            }
        elif len(rows) == 1:
            (rows,) = rows
        console.print_json(json.dumps(rows))
        return
    for own in source.own:
        console.print(own_table(own), own_words(own), "", sep="\n")
    if results:
        sentences = [f"{title}: {each.bottleneck}" for title, each in results.items() if title]
        sentences = sentences or [each.bottleneck for each in results.values()]
        console.print(table(results), *sentences, sep="\n")
    if refused:
        problems = "".join(f"\n  * {problem}." for problem in refused)
        console.print(f"Other settings are not predicted from this:{problems}")


@dataclass(frozen=True, slots=True)
class _Source:
    """The runs named by --like, and the costs that were fitted to them. Empty without --like."""

    runs: "Sequence[RecordedRun]" = ()
    fitted: "FittedCosts | None" = None
    setup: "SimulationSetup | None" = None
    """The setup with which the first run is simulated."""
    result: "SimulationResult | None" = None
    """The result of simulating the first run with its own settings."""
    own: "Sequence[OwnRun]" = ()

    @classmethod
    def of(cls, like: Sequence[Path] | None, seed: int) -> "_Source":
        """Read the runs of --like, fit costs to them, and simulate each with its own settings."""
        from unstale.analysis.planner.measured import fit_costs, setup_of
        from unstale.analysis.planner.own_run import require_alike, simulate_own
        from unstale.analysis.planner.recorded import RecordedRun

        if not like:
            return cls()
        runs = [RecordedRun.read(each) for each in like]
        require_alike(runs)
        fitted = fit_costs(runs)
        simulated = [simulate_own(run, setup_of(run, fitted), seed) for run in runs]
        setup, result, _ = simulated[0]
        return cls(runs, fitted, setup, result, [own for _, _, own in simulated])

    def open_questions(
        self, setup: "SimulationSetup", result: "SimulationResult", assignments: Sequence[str]
    ) -> list[str]:
        """Return reasons why the runs do not suffice to predict the values `assignments` of
        --set.
        """
        from unstale.analysis.planner.own_run import open_questions

        if self.fitted is None:
            return []
        names = [each.partition("=")[0] for each in assignments]
        given = {name.removeprefix("costs.") for name in names if name.startswith("costs.")}
        return open_questions(self.runs, self.fitted, setup, result, given)


def _json_row(result: "SimulationResult") -> dict[str, Any]:
    derived = ("mean_step_s", "groups_per_s", "staleness_mean", "staleness_max", "bottleneck")
    return plain(result) | {name: getattr(result, name) for name in derived}


def _setup(source: _Source, assignments: Sequence[str]) -> "SimulationSetup":
    """Return the setup of a simulation: that of the first run or the defaults, changed by
    `assignments`.

    Raises `ConfigError` if costs are missing.
    """
    from unstale.analysis.planner.measured import SimulationSetup

    changes: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in parse_assignments("--set", assignments, _value_kinds()).items():
        section, _, field = name.partition(".")
        changes[section][field] = value
    setup = source.setup
    if setup is None:
        for required in ("decode", "train"):
            if not any(name.startswith(required) for name in changes["costs"]):
                raise ConfigError(
                    f"the costs are missing: give --like RUN, or --set costs.{required}=SECONDS "
                    "and the other costs"
                )
        needs = OldLogpsConfig().needs
        setup = SimulationSetup(Workload(), Fleet(), ScheduleConfig(), LinearCosts(), needs)
    if changes["workload"].keys() & {"prompt_tokens", "turns", "reply_tokens", "tool_tokens"}:
        changes["workload"]["recorded"] = ()
    changed = {
        section: replace(getattr(setup, section), **values) for section, values in changes.items()
    }
    return replace(setup, **changed)


def own_table(own: "OwnRun") -> Table:
    """Return a table that compares measured figures of a run with those of its simulation."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_row(own.name, "measured", "simulated")
    for each in own.figures:
        shown = [
            f"{value:.0%}"
            if each.unit == "share"
            else f"{value:.3g}"
            if value < 1000
            else f"{value:,.0f}"
            for value in (each.measured, each.predicted)
        ]
        grid.add_row(each.name, *shown)
    return grid


def own_words(own: "OwnRun") -> str:
    """Return sentences on how far a run's simulation deviates, and on the bottlenecks of both."""
    left_out = f" ({own.left_out} left out because of evaluations)" if own.left_out else ""
    return (
        f"Deviation {own.error:+.1%} over {own.steps} steps{left_out}.\n"
        f"The run: {own.run.sentence}\nIts simulation: {own.simulated.sentence}"
    )


def _own_row(own: "OwnRun") -> dict[str, Any]:
    bottlenecks = {"run": own.run.bottleneck, "simulated": own.simulated.bottleneck}
    return plain(own) | {"error": own.error, "bottlenecks": bottlenecks}


def table(results: "Mapping[str, SimulationResult]") -> Table:
    """Return a table with one column for each simulation. `results` maps titles to results.

    The table has no head if the only title is "".
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
        f"{result.trained_sampled / seconds:,.0f} of them sampled",
        "engines": busy,
        "first token": f"mean {result.first_token_s:.3g} s, 99% {result.first_token_p99_s:.3g} s; "
        f"{result.rejects:,} rejects, longest queue {result.longest_queue}",
        "trainer": f"busy {result.trainer_busy_share:.0%} "
        f"(old log-probabilities {result.old_logps_share:.0%}), "
        f"waits for groups {result.trainer_wait_share:.0%}",
        "an episode": f"{result.episode_s:.3g} s, {result.tool_share:.0%} of it in tools, "
        f"{result.engine_share:.0%} with an engine"
        + f"; then {result.ready_s:.3g} s until training",
        "staleness": f"mean {result.staleness_mean:.2f}, max {result.staleness_max}, "
        f"bound {result.staleness_bound} (tokens by staleness: {ages})",
        "lost": f"{result.deaths} engines died, {result.lost_tokens:,} tokens were sampled again, "
        f"{result.failed_episodes} attempts timed out",
    }
