"""`unstale plan`: what is asked on the command line, and how it is answered. Imports no torch before it must."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from unstale.config import ConfigError, nearest
from unstale.planner.assignments import parse_assignments
from unstale.planner.hardware import DEVICES, Device, Shares
from unstale.planner.models import PRESETS, Model
from unstale.planner.route_costs import ROUTES
from unstale.planner.workload import Distribution, EpisodeStats, Workload

_ABOUT = """Predicts memory and time of every old-logit route, staleness, the split of the devices and the throughput,
and suggests a configuration, with reasons. Splits are estimated by a formula, and the best are simulated: the real
scheduler on a virtual clock. docs/planning.md says where each figure comes from."""


def add_plan(verbs: Any) -> None:
    """The verb and its options."""
    parser = verbs.add_parser(
        "plan", help="what to run on so many devices, and why", allow_abbrev=False
    )
    parser.description = _ABOUT
    parser.set_defaults(act=_plan)
    add = parser.add_argument
    presets = ", ".join(PRESETS)
    shares = ", ".join(f"{name}={value:g}" for name, value in asdict(Shares()).items())
    add(
        "--model",
        required=True,
        help=f"a model folder, `base`, Qwen3's {presets}, or layers=36,hidden=2560,...",
    )
    add(
        "--gpus",
        type=int,
        required=True,
        metavar="N",
        help="devices in all (processor cores with --like)",
    )
    add("--device", default="H100", help=f"{', '.join(DEVICES)}. Now: H100")
    add(
        "--shares",
        default="",
        metavar="NAME=VALUE,...",
        help=f"reached of the data sheet's figures. Now: {shares}",
    )
    lag = "versions that no token may be older than, or choices of which the smallest that is fast enough. Now: 1 2 4"
    add("--lag", type=int, nargs="+", default=[1, 2, 4], metavar="S", help=lag)
    add(
        "--groups",
        type=int,
        nargs="+",
        default=[16],
        metavar="G",
        help="a step, or choices. Now: 16",
    )
    add("--group-size", type=int, default=8, metavar="N", help="episodes of a group. Now: 8")
    add(
        "--window",
        type=int,
        metavar="W",
        help="look-ahead. Now: strict order, half a batch where that gives 5%% more",
    )
    add("--route", help=f"{', '.join(ROUTES)}. Now: the exact one that gives most")
    add(
        "--lr",
        type=float,
        default=1e-6,
        help="learning rate: how many weights a step changes. Now: 1e-6",
    )
    add("--prompt", default="2000", metavar="TOKENS", help="that an episode begins with. Now: 2000")
    add(
        "--turns",
        default="8~0.4<32",
        metavar="N",
        help="replies of an episode: MEAN~SIGMA<MOST. Now: 8~0.4<32",
    )
    add("--reply", default="200~0.8<4096", metavar="TOKENS", help="of a reply. Now: 200~0.8<4096")
    add("--said", default="150", metavar="TOKENS", help="of an environment's answer. Now: 150")
    add(
        "--tool-s",
        default="1~0.8<60",
        metavar="SECONDS",
        help="that an answer takes. Now: 1~0.8<60",
    )
    add(
        "--longest",
        type=int,
        default=16384,
        metavar="TOKENS",
        help="an episode may hold. Now: 16384",
    )
    add(
        "--rounds",
        type=int,
        default=10,
        metavar="N",
        help="of lag + 1 steps that are simulated, once full. Now: 10",
    )
    add(
        "--like",
        type=Path,
        metavar="RUN",
        help="in place of --device: a core of this machine, as this run had it",
    )
    add("--json", action="store_true", help="for programs")


def _plan(chosen: argparse.Namespace) -> int:
    least = {
        "lag": 0,
        "groups": 1,
        "gpus": 2,
        "rounds": 2,
        "lr": 1e-12,
        "group_size": 1,
        "longest": 1,
        "window": 1,
    }
    for name, low in least.items():
        value = getattr(chosen, name)
        if (
            value is not None
            and not (value := min(value) if isinstance(value, list) else value) >= low
        ):
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {low}, got {value}")
    if chosen.route is not None and chosen.route not in ROUTES:
        raise ConfigError(f"unknown route {chosen.route!r}{nearest(chosen.route, list(ROUTES))}")
    model, work = Model.parse(chosen.model), workload(chosen)
    device, shares = _device(chosen, model)
    from unstale.planner.analytic import TrainingSetup
    from unstale.planner.page import as_json, page
    from unstale.planner.suggest import PlanRequest, suggest

    episodes, console = EpisodeStats.of(work, group_size=chosen.group_size), Console(stderr=True)
    request = PlanRequest(
        setting=TrainingSetup(model=model, device=device, shares=shares, lr=chosen.lr, episodes=episodes), workload=work,
        devices=chosen.gpus, lags=tuple(sorted(set(chosen.lag))), groups=tuple(sorted(set(chosen.groups))),
        group_size=chosen.group_size, windows=(chosen.window,) if chosen.window else (), route=chosen.route,
        rounds=chosen.rounds, tell=lambda text: console.print(text, style="dim"),
    )  # fmt: skip
    plan = suggest(request)
    if chosen.json:
        Console(soft_wrap=True).print_json(json.dumps(as_json(plan)))
    else:
        Console().print(page(plan), highlight=False)
    return 0


def workload(chosen: argparse.Namespace) -> Workload:
    """What the options say of an episode, in the words of `unstale simulate`."""
    fields = {
        "prompt": "prompt_tokens",
        "turns": "turns",
        "reply": "reply_tokens",
        "said": "tool_tokens",
    }
    fields["tool_s"] = "tool_s"
    words = [f"--{option.replace('_', '-')}={getattr(chosen, option)}" for option in fields]
    found = parse_assignments(
        "plan", words, {word.partition("=")[0]: Distribution for word in words}
    )
    return Workload(
        **dict(zip(fields.values(), found.values(), strict=True)), max_tokens=chosen.longest
    )


def _device(chosen: argparse.Namespace, model: Model) -> tuple[Device, Shares]:
    """From data sheets, or as it was measured."""
    if chosen.like:
        if chosen.shares:
            raise ConfigError("--shares belong to a data sheet; a run brings its own")
        from unstale.planner.measured import as_device

        return as_device(chosen.like, model)
    if chosen.device not in DEVICES:
        told = (
            "; a processor is read from a run on it (--like RUN)" if chosen.device == "cpu" else ""
        )
        raise ConfigError(
            f"unknown device {chosen.device!r}{nearest(chosen.device, list(DEVICES))}{told}"
        )
    return DEVICES[chosen.device], Shares.parse(chosen.shares)
