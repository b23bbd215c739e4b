"""The verb `plan`. Imports no torch before the simulations."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from unstale.config import ConfigError, nearest
from unstale.config.routes import routes
from unstale.planner.assignments import parse_assignments
from unstale.planner.hardware import DEVICES, Device, Shares
from unstale.planner.models import PRESETS, Model
from unstale.planner.workload import Distribution, EpisodeStats, Workload

_ABOUT = """Predicts memory and time of every old-logit route, the staleness, the split of the
devices and the throughput, and suggests a configuration with reasons. Splits are estimated by a
formula, and the best ones are simulated with the real scheduler on a virtual clock.
docs/planning.md gives the source of each figure."""
_WORKLOAD = {
    "--prompt": ("prompt_tokens", "2000", "TOKENS", "of the prompt of an episode"),
    "--turns": ("turns", "8~0.4<32", "N", "replies of an episode: MEAN~SIGMA<MAX"),
    "--reply": ("reply_tokens", "200~0.8<4096", "TOKENS", "of a reply"),
    "--said": ("tool_tokens", "150", "TOKENS", "of an environment's answer"),
    "--tool-s": ("tool_s", "1~0.8<60", "SECONDS", "of a tool call"),
}
"""Option: field of the workload, default, metavar, help."""
_MINIMUM = {
    "lag": 0,
    "groups": 1,
    "gpus": 2,
    "rounds": 2,
    "lr": 1e-12,
    "group_size": 1,
    "longest": 1,
    "window": 1,
}


def add(verbs: Any) -> None:
    """Add the verb and its options."""
    parser = verbs.add_parser(
        "plan", help="suggest a configuration for a number of devices", allow_abbrev=False
    )
    parser.description = _ABOUT
    parser.set_defaults(act=_plan)

    def option(name: str, help: str, **options: Any) -> None:
        default = options.get("default")
        if default not in (None, ""):
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            help = f"{help}. Now: {shown}"
        parser.add_argument(name, help=help, **options)

    presets = ", ".join(PRESETS)
    shares = ", ".join(f"{name}={value:g}" for name, value in asdict(Shares()).items())
    sizes = f"a model folder, `base`, Qwen3's {presets}, or layers=36,hidden=2560,..."
    option("--model", sizes, required=True)
    option("--gpus", "devices in all (cores with --like)", type=int, required=True, metavar="N")
    option("--device", ", ".join(DEVICES), default="H100")
    option(
        "--shares",
        f"shares that are reached of the data sheet's figures. Now: {shares}",
        default="",
        metavar="NAME=VALUE,...",
    )
    option(
        "--lag",
        "largest staleness of a token in versions; of several, the smallest that is fast enough",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        metavar="S",
    )
    option("--groups", "groups a step, or choices", type=int, nargs="+", default=[16], metavar="G")
    option("--group-size", "episodes of a group", type=int, default=8, metavar="N")
    window = "look-ahead. Now: strict order, or half a batch if that gives 5%% more"
    option("--window", window, type=int, metavar="W")
    option("--route", f"{', '.join(routes())}. Now: the exact one with the highest throughput")
    option("--lr", "learning rate, which decides the size of deltas", type=float, default=1e-6)
    for name, (_, default, metavar, text) in _WORKLOAD.items():
        option(name, text, default=default, metavar=metavar)
    option("--longest", "tokens of the longest episode", type=int, default=16384, metavar="TOKENS")
    option(
        "--rounds",
        "simulated rounds of lag + 1 steps, after the queue is full",
        type=int,
        default=10,
        metavar="N",
    )
    option(
        "--like",
        "instead of --device: a core of this machine, as in this run",
        type=Path,
        metavar="RUN",
    )
    option("--json", "print JSON", action="store_true")


def _plan(chosen: argparse.Namespace) -> int:
    for name, low in _MINIMUM.items():
        value = getattr(chosen, name)
        if isinstance(value, list):
            value = min(value)
        if value is not None and not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {low}, got {value}")
    if chosen.route is not None and chosen.route not in routes():
        raise ConfigError(f"unknown route {chosen.route!r}{nearest(chosen.route, list(routes()))}")
    model = Model.parse(chosen.model)
    workload = workload_of(chosen)
    device, shares = _device(chosen, model)
    from unstale.planner.analytic import TrainingSetup
    from unstale.planner.page import as_json, page
    from unstale.planner.suggest import PlanRequest, suggest

    progress = Console(stderr=True)
    episodes = EpisodeStats.of(workload, group_size=chosen.group_size)
    setup = TrainingSetup(
        model=model, device=device, shares=shares, lr=chosen.lr, episodes=episodes
    )
    suggestion = suggest(
        PlanRequest(
            setup=setup,
            workload=workload,
            devices=chosen.gpus,
            lags=tuple(sorted(set(chosen.lag))),
            groups=tuple(sorted(set(chosen.groups))),
            group_size=chosen.group_size,
            windows=(chosen.window,) if chosen.window else (),
            route=chosen.route,
            rounds=chosen.rounds,
            on_progress=lambda text: progress.print(text, style="dim"),
        )
    )
    if chosen.json:
        Console(soft_wrap=True).print_json(json.dumps(as_json(suggestion)))
    else:
        Console().print(page(suggestion), highlight=False)
    return 0


def workload_of(chosen: argparse.Namespace) -> Workload:
    """Return the workload that the options describe."""
    words = [f"{option}={getattr(chosen, option[2:].replace('-', '_'))}" for option in _WORKLOAD]
    values = parse_assignments("plan", words, dict.fromkeys(_WORKLOAD, Distribution))
    fields = {_WORKLOAD[option][0]: value for option, value in values.items()}
    return Workload(**fields, max_tokens=chosen.longest)


def _device(chosen: argparse.Namespace, model: Model) -> tuple[Device, Shares]:
    """Return the device and its shares, by its data sheet or as measured in a run."""
    if chosen.like:
        if chosen.shares:
            raise ConfigError("--shares cannot be given with --like: they are measured in the run")
        from unstale.planner.measured import core_of_run

        return core_of_run(chosen.like, model)
    if chosen.device not in DEVICES:
        hint = "; for a processor give a run on it (--like RUN)" if chosen.device == "cpu" else ""
        raise ConfigError(
            f"unknown device {chosen.device!r}{nearest(chosen.device, list(DEVICES))}{hint}"
        )
    return DEVICES[chosen.device], Shares.parse(chosen.shares)
