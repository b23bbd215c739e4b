"""The verbs of this room. Nothing here imports torch before it must."""

import argparse
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.console import Console
from rich.table import Table

from unstale.config import ConfigError, OldLogpsConfig, ScheduleConfig
from unstale.planner.assignments import parse_assignments
from unstale.planner.costs import LinearCosts
from unstale.planner.plan_command import add_plan
from unstale.planner.workload import Fleet, Workload

if TYPE_CHECKING:
    from unstale.planner.result import SimulationResult

_SECTIONS = {
    "schedule": ScheduleConfig,
    "fleet": Fleet,
    "workload": Workload,
    "costs": LinearCosts,
}
_KINDS = {
    f"{at}.{name}": kind
    for at, cls in _SECTIONS.items()
    for name, kind in get_type_hints(cls).items()
}
del _KINDS["workload.recorded"]
_NAMES = f"""what --set takes, NAME=VALUE (episodes: a number, or log-normal as MEAN~SIGMA of the logarithm, or
MEAN~SIGMA<MOST, cut there, the mean kept; costs in seconds):
{fill(", ".join(_KINDS), 118, initial_indent="  ", subsequent_indent="  ")}

  unstale simulate --like runs/x --set schedule.max_staleness=4
  unstale simulate --set fleet.engines=64 "workload.reply_tokens=4000~1<32000" "workload.tool_s=5~1.2" \\
      costs.decode=0.012 costs.decode_reply=1e-4 costs.prefill_token=1e-5 costs.train_token=2e-6 costs.load=3
"""


def add(verbs: Any) -> None:
    """Put the verbs of this room where the others are."""
    verb = verbs.add_parser(
        "simulate", help="what a setting would do, on a virtual clock", allow_abbrev=False
    )
    verb.epilog, verb.formatter_class = _NAMES, argparse.RawDescriptionHelpFormatter
    verb.set_defaults(act=_simulate)
    add = verb.add_argument
    add(
        "--like",
        type=Path,
        metavar="RUN",
        help="begin with episodes and costs of the run in this folder",
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="what is given, or different: see below",
    )
    add("--steps", type=int, default=0, metavar="N", help="Now: 20 once the line is full")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn. Now: 0")
    add_plan(verbs)


def _simulate(chosen: argparse.Namespace) -> int:
    from unstale.planner.measured import SimulationSetup, like
    from unstale.planner.parts import needs
    from unstale.planner.route_costs import ROUTES
    from unstale.planner.simulate import simulate

    changed: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for word, value in parse_assignments("--set", chosen.set, _KINDS).items():
        section, _, name = word.partition(".")
        changed[section][name] = value
    if chosen.like:
        setting = like(chosen.like)
    else:
        route = needs(ROUTES[OldLogpsConfig().route])
        setting = SimulationSetup(Workload(), Fleet(), ScheduleConfig(), LinearCosts(), route)
        for needed in ("decode", "train"):
            if not any(name.startswith(needed) for name in changed["costs"]):
                wanted = f"--like RUN, or --set costs.{needed}=SECONDS and others"
                raise ConfigError(f"nothing says what things cost: {wanted}")
    if changed["workload"].keys() & {"prompt_tokens", "turns", "reply_tokens", "tool_tokens"}:
        changed["workload"]["recorded"] = ()
    setting = replace(
        setting,
        **{name: replace(getattr(setting, name), **with_) for name, with_ in changed.items()},
    )
    steps = chosen.steps or 21 + setting.schedule.max_staleness
    parts = setting.workload, setting.fleet, setting.schedule, setting.costs
    outcome = simulate(*parts, steps=steps, seed=chosen.seed, needs=setting.needs)
    Console(soft_wrap=True, highlight=False).print(table(outcome), outcome.bottleneck, sep="\n")
    return 0


def table(outcome: "SimulationResult") -> Table:
    """What a simulated run came to."""
    low, high, all_s = min(outcome.steady_s), max(outcome.steady_s), sum(outcome.steady_s)
    ages = ", ".join(f"{age}: {tokens:,}" for age, tokens in outcome.staleness_histogram.items())
    rows = {
        "seconds per step": f"{outcome.mean_step_s:.3g} in the mean ({low:.3g} to {high:.3g})",
        "groups": f"{60 * outcome.groups_per_s:.3g} a minute",
        "tokens": f"{outcome.trained_tokens / all_s:,.0f} trained a second, "
        f"{outcome.trained_sampled / all_s:,.0f} sampled",
        "engines": f"busy {outcome.engine_busy_share:.0%}",
        "trainer": f"busy {outcome.trainer_busy_share:.0%} (old log-probabilities {outcome.old_logps_share:.0%}), "
        f"waits for groups {outcome.trainer_wait_share:.0%}",
        "an episode": f"{outcome.episode_s:.3g} s, {outcome.tool_share:.0%} of it in its tools, "
        f"{outcome.engine_share:.0%} with an engine; then {outcome.ready_s:.3g} s until training",
        "staleness": f"mean {outcome.staleness_mean:.2f}, largest {outcome.staleness_max}, "
        f"bound {outcome.staleness_bound} (tokens by age: {ages})",
        "lost": f"{outcome.deaths} engines died, {outcome.lost_tokens:,} tokens were sampled again, "
        f"{outcome.failed_episodes} attempts timed out",
    }
    listed = Table.grid(padding=(0, 2))
    listed.add_column(style="bold", no_wrap=True)
    for name, told in rows.items():
        listed.add_row(name, told)
    return listed
