"""The command `plan`: suggest a configuration for a number of devices.

It imports torch only for the simulations.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unstale.analysis.planner.assignments import parse_assignments
from unstale.analysis.planner.hardware import DEVICES, Device, Shares
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.workload import Distribution, EpisodeStats, Workload
from unstale.config import ConfigError, nearest
from unstale.config.checks import bounded, check_value, option_types
from unstale.config.routes import route_names, routes
from unstale.durability.console import Console

if TYPE_CHECKING:
    from unstale.analysis.planner.candidates import PlanRequest

_ABOUT = """Suggest a configuration, with reasons: the devices that train and that sample, the
staleness, the batch and the route to old log-probabilities. Prints the predicted throughput, and
the memory and time of every route. A formula estimates every division of the devices; the best
ones are simulated with the real scheduler on a virtual clock. docs/planning.md gives the source of
each figure."""
_WORKLOAD = {
    "--prompt": ("prompt_tokens", "2000", "TOKENS", "tokens of the prompt of an episode"),
    "--turns": ("turns", "8~0.4<32", "N", "replies of an episode: MEAN~SIGMA<MAX"),
    "--reply": ("reply_tokens", "200~0.8<4096", "TOKENS", "tokens of a reply"),
    "--answer": ("tool_tokens", "150", "TOKENS", "tokens of the environment's answer to a reply"),
    "--tool-s": ("tool_s", "1~0.8<60", "SECONDS", "seconds of a tool call"),
}
"""Options of the command. Each has the field of `Workload` that it sets, its default, the
placeholder in the help, and the help's text.
"""


def add(verbs: Any) -> None:
    """Add the command and its options to the command line."""
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

    def number(name: str, help: str, low: int, high: int, **options: Any) -> None:
        option(name, help, type=bounded(int, low, high), **options)

    presets = ", ".join(PRESETS)
    sizes = (
        "a model folder, `org/name` in the local cache of the Hugging Face hub, `base`, "
        f"`base-desks`, Qwen3's {presets}, or layers=36,hidden=2560,ffn=..."
    )
    shares = ", ".join(f"{name}={value:g}" for name, value in asdict(Shares()).items())
    shares = f"shares that programs reach of the data sheet's figures. Now: {shares}"
    lag = (
        "largest staleness of a token, in versions. Of several values, the smallest is chosen "
        "whose throughput is within 5%% of the best"
    )
    groups = "task groups per step. Several values are compared"
    rate = "learning rate. The size of weight differences (deltas) depends on it"
    window = "look-ahead window. Now: strict order, or half a batch if that gives 5%% more"
    like = (
        "a run folder: plan for cores of this machine, at the speed that the run measured, in "
        "place of --device"
    )
    option("--model", sizes, required=True)
    gpus = "number of devices, or of cores with --like"
    number("--gpus", gpus, 1, 10**6, required=True, metavar="N")
    option("--device", ", ".join(DEVICES), default="H100")
    option("--shares", shares, default="", metavar="NAME=VALUE,...")
    number("--lag", lag, 0, 1000, nargs="+", default=[1, 2, 4], metavar="S")
    number("--groups", groups, 1, 10**4, nargs="+", default=[16], metavar="G")
    number("--group-size", "episodes per group", 1, 10**4, default=8, metavar="N")
    number("--window", window, 1, 10**4, metavar="W")
    option("--route", f"{', '.join(route_names())}. Now: the exact one with the highest throughput")
    lora = "rank of LoRA adapters, which are trained instead of all weights. Now: all weights"
    number("--lora-rank", lora, 1, 10**4, metavar="R")
    optimizer = "trainer.optimizer: AdamW8bit has moments of one byte"
    option("--optimizer", optimizer, choices=("AdamW", "AdamW8bit"), default="AdamW")
    critic = "a critic (advantage.estimator gae): on the policy's layers, or a model of its own"
    option("--critic", critic, choices=("trunk", "own"), default="")
    option("--lr", rate, type=bounded(float, 1e-12, 1), default=1e-6)
    for name, (_, default, metavar, text) in _WORKLOAD.items():
        option(name, text, default=default, metavar=metavar)
    longest = "tokens of the longest episode"
    number("--longest", longest, 2, 10**9, default=16384, metavar="TOKENS")
    rounds = "length of a simulation, in rounds of lag + 1 steps after the queue is full"
    number("--rounds", rounds, 2, 1000, default=10, metavar="N")
    option("--like", like, type=Path, metavar="RUN")
    option("--json", "print JSON", action="store_true")


def _plan(chosen: argparse.Namespace) -> int:
    model = Model.parse(chosen.model)  # before torch is imported
    from unstale.analysis.planner.page import as_json, page
    from unstale.analysis.planner.suggest import suggest

    suggestion = suggest(_request(chosen, model))
    if chosen.json:
        Console(soft_wrap=True).print_json(json.dumps(as_json(suggestion)))
    else:
        Console().print(page(suggestion), highlight=False, crop=False)
    return 0


def _request(chosen: argparse.Namespace, model: Model) -> "PlanRequest":
    from unstale.analysis.planner.analytic import TrainingSetup
    from unstale.analysis.planner.candidates import PlanRequest

    if chosen.route is not None and chosen.route not in routes():
        raise ConfigError(f"unknown route {chosen.route!r}{nearest(chosen.route, list(routes()))}")
    workload = workload_of(chosen)
    device, shares = _device(chosen, model)
    progress = Console(stderr=True)
    return PlanRequest(
        setup=TrainingSetup(
            model=model,
            device=device,
            shares=shares,
            lr=chosen.lr,
            lora_rank=chosen.lora_rank or 0,
            optimizer=chosen.optimizer,
            critic=chosen.critic,
            episodes=EpisodeStats.of(workload, group_size=chosen.group_size),
        ),
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


def workload_of(chosen: argparse.Namespace) -> Workload:
    """Return the workload (lengths and times of episodes) that the arguments `chosen` describe."""
    words = [f"{option}={getattr(chosen, option[2:].replace('-', '_'))}" for option in _WORKLOAD]
    values = parse_assignments("plan", words, dict.fromkeys(_WORKLOAD, Distribution))
    fields = {}
    for option, value in values.items():
        field = _WORKLOAD[option][0]
        check_value(option, value, option_types(Workload)[field])
        fields[field] = value
    return Workload(**fields, max_tokens=chosen.longest)


def _device(chosen: argparse.Namespace, model: Model) -> tuple[Device, Shares]:
    """Return the device, and the shares of its peak speed that programs reach.

    With `--like RUN`, both are measured in that run. Otherwise `--device` and `--shares` give them.
    """
    if chosen.like:
        if chosen.shares:
            raise ConfigError("--shares cannot be given with --like: they are measured in the run")
        from unstale.analysis.planner.measured import core_of_run

        return core_of_run(chosen.like, model)
    if chosen.device not in DEVICES:
        hint = "; for a processor give a run on it (--like RUN)" if chosen.device == "cpu" else ""
        raise ConfigError(
            f"unknown device {chosen.device!r}{nearest(chosen.device, list(DEVICES))}{hint}"
        )
    return DEVICES[chosen.device], Shares.parse(chosen.shares)
