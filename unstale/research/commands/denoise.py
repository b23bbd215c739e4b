"""The command `denoise`: train a policy that draws images, plans, texts or your own objects in
steps.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table

from unstale.cli.preflight import quick_imports
from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import COUNT, JSON, argument, command, console_of, options_of
from unstale.config import ConfigError
from unstale.config.checks import bounded, require_writable
from unstale.durability.console import Console
from unstale.observe.statistics import paired_difference

if TYPE_CHECKING:
    from unstale.research.denoise.recorded import Flow, Recorded
    from unstale.research.denoise.steps import Denoiser
    from unstale.research.denoise.train import Result

PRECISIONS = ("float32", "bfloat16", "fp8", "nvfp4", "mxfp4")
POLICIES = ("images", "plans", "text")
OPTIONS = {
    "--record": {"engine", "without_noise", "load", "microbatch"},
    "--recorded": {
        *("beta", "temperature", "best_weight", "without_noise", "lr", "load", "save"),
        *("microbatch", "held_out"),
    },
}
"""The options that --record and --recorded use beside those that all runs use."""


def _denoise(chosen: argparse.Namespace) -> int:
    with quick_imports():
        from unstale.research.denoise.policies import check_files
        from unstale.research.denoise.train import DenoiseOptions, train

    mode = _mode(chosen)
    model, judged = _policy(chosen)
    options: DenoiseOptions = options_of(DenoiseOptions, chosen)
    options.check(model.places)
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    check_files(options.load, options.save, seeds)
    console = console_of(chosen)
    flow = _flow(model, mode) if mode else None
    if flow and mode == "--record":
        return _record(flow, chosen, console, options, seeds)
    results = []
    recorded = _recorded(flow, chosen, console, seeds) if flow else {}
    for seed in seeds:
        if flow:
            results.append(_train_recorded(flow, chosen, console, recorded[seed], seed))
        else:
            results.append(train(model, options, seed, judged))
        after = ", ".join(f"{name} {value:.3f}" for name, value in results[-1].after.items())
        console.print(f"seed {seed}: {after}", highlight=False)
    names = ("log_d_abs_mean", "log_s_abs_mean", "clipped_share", "schedule/staleness_mean")
    means = {
        name.removeprefix("schedule/"): fmean(
            float(row.get(name, 0)) for each in results for row in each.rows
        )
        for name in (("order_share", "best_error_change") if mode else names)
    }
    if options.fusion != "leaves" and not mode:
        fused = [row["effective_leaves"] for each in results for row in each.rows]
        means["effective_leaves"] = fmean(fused)
    if chosen.json:
        counted = "images" if mode else "steps"
        runs = [
            {"before": each.before, "after": each.after, counted: each.computed, "rows": each.rows}
            for each in results
        ]
        print_json({"policy": chosen.policy, "runs": runs, "means": means})
    else:
        _show(results, means, seeds, mode)
    return 0


def _policy(chosen: argparse.Namespace) -> "tuple[Denoiser, Denoiser | None]":
    """Return the policy to train, and with --draft-only the one that is measured, else None.

    Raises `ConfigError` for an option that the policy does not have, such as --draft for images.
    """
    from unstale.research.denoise.images import Images
    from unstale.research.denoise.plans import Plans
    from unstale.research.denoise.policies import make_policy
    from unstale.research.denoise.text import Texts

    given = {"drafts": chosen.draft, "edits": chosen.edit}
    sizes = {name: each for name, each in given.items() if each is not None}
    if chosen.policy != "plans" and (sizes or chosen.draft_only):
        raise ConfigError(
            f"--draft, --edit and --draft-only are only of plans, got {chosen.policy}"
        )
    given = {name: getattr(chosen, name) for name in ("schedule", "eoser", "likelihood")}
    decoding = {name: each for name, each in given.items() if each is not None}
    if chosen.policy != "text" and decoding:
        raise ConfigError(
            f"--schedule, --eoser and --likelihood are only of text, got {chosen.policy}"
        )
    if chosen.policy == "images":
        return Images(), None
    if chosen.policy == "plans":
        whole = Plans(**sizes)
        return (Plans(**{**sizes, "edits": ()}), whole) if chosen.draft_only else (whole, None)
    if chosen.policy == "text":
        return Texts(**decoding), None
    if ":" in chosen.policy:
        return make_policy(chosen.policy, with_noise=not chosen.without_noise), None
    raise ConfigError(
        f"the policy must be {', '.join(POLICIES)} or module:Class of your own, got "
        f"{chosen.policy!r}"
    )


def _show(
    results: Sequence[Any], means: Mapping[str, float], seeds: Sequence[int], mode: str
) -> None:
    """Print held-out figures before and after training, and means over all updates."""
    from unstale.research.denoise.recorded import best_evaluation

    table = Table("held out", "before", "after", "gain", "95% interval", box=None)
    for name in results[0].before:
        first = [each.before[name] for each in results]
        last = [each.after[name] for each in results]
        table.add_row(name, f"{fmean(first):.3f}", f"{fmean(last):.3f}", *_gain(first, last))
    console = Console()
    console.print(table)
    steps = ", ".join(f"{count:,} {name}" for name, count in results[0].computed.items())
    figures = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
    for line in (f"{'images' if mode else 'steps'} of a run: {steps}", figures):
        console.print(line, highlight=False)
    if mode:
        for seed, each in zip(seeds, results, strict=True):
            judged = "corrected" if "corrected" in each.before else "reward"
            step, found = best_evaluation(each, judged)
            line = f"seed {seed}: highest {judged} {found[judged]:.3f} after {step}"
            console.print(f"{line} updates, with reward {found['reward']:.3f}", highlight=False)


def _mode(chosen: argparse.Namespace) -> str:
    """Return "--record", "--recorded" or "". Raises `ConfigError` if other options do not fit."""
    from unstale.research.denoise.recorded import RecordedOptions
    from unstale.research.denoise.train import DenoiseOptions

    given = [name for name in OPTIONS if getattr(chosen, name[2:]) is not None]
    mode = given[0] if given else ""
    if len(given) > 1:
        raise ConfigError("--record writes images and --recorded trains on them: choose one")
    if mode and chosen.policy in ("plans", "text"):
        raise ConfigError(f"{mode} needs a policy that estimates velocities, got {chosen.policy}")
    every = {
        each.name: each.default for each in (*fields(DenoiseOptions), *fields(RecordedOptions))
    }
    common = {"steps", "groups", "group_size", "noisy"}
    used = common | OPTIONS.get(mode, {each.name for each in fields(DenoiseOptions)})
    for name, default in every.items():
        if name not in used and getattr(chosen, name) != default:
            where = f"with {mode}" if mode else "without --record or --recorded"
            raise ConfigError(f"--{name.replace('_', '-')} has no effect {where}: leave it out")
    if chosen.without_noise and chosen.noisy:
        raise ConfigError("--noisy and --without-noise exclude each other: choose one")
    if mode == "--record" and chosen.seeds > 1 and "{seed}" not in chosen.record:
        raise ConfigError(
            "--record must name a file for each of --seeds, as images-{seed}.safetensors does, "
            f"got {chosen.record}"
        )
    return mode


def _flow(model: "Denoiser", mode: str) -> "Flow":
    """Return the policy if it is a `Flow`. Raises `ConfigError` otherwise."""
    if not hasattr(model, "can_draw"):
        raise ConfigError(
            f"{mode} needs a policy that estimates velocities and has the method can_draw, as "
            f"unstale.research.denoise.recorded.Flow says, got {type(model).__name__}"
        )
    return cast("Flow", model)


def _record(
    model: "Flow", chosen: argparse.Namespace, console: Console, options: Any, seeds: range
) -> int:
    from unstale.research.denoise.recorded import record

    files = [Path(chosen.record.replace("{seed}", str(seed))) for seed in seeds]
    if existing := [path for path in files if path.exists()]:
        raise ConfigError(f"{existing[0]} already exists: choose another name or remove it")
    if absent := [path.parent for path in files if not path.parent.is_dir()]:
        raise ConfigError(f"--record: there is no folder {absent[0]}")
    for path in files:
        require_writable(path)
    rows = []
    for path, seed in zip(files, seeds, strict=True):
        drawn = record(model, options, seed, without_noise=chosen.without_noise)
        drawn.save(path)
        reward = drawn.rewards.mean().item()
        rows.append({"file": str(path), "images": len(drawn.groups), "reward_mean": reward})
        line = f"{path}: {len(drawn.groups):,} images of mean reward {reward:.3f}"
        console.print(line, highlight=False)
    if chosen.json:
        print_json(rows)
    return 0


def _recorded(
    model: "Flow", chosen: argparse.Namespace, console: Console, seeds: range
) -> "dict[int, Recorded]":
    """Return the recorded images of each seed. Raises `ConfigError` for the first bad file."""
    from unstale.research.denoise.recorded import Recorded

    files = {seed: Path(chosen.recorded.replace("{seed}", str(seed))) for seed in seeds}
    known = {path: Recorded.load(path, model) for path in dict.fromkeys(files.values())}
    for path, each in known.items():
        if lone := each.lone():
            console.print(f"{path}: left out {lone:,} groups of one image", highlight=False)
    return {seed: known[path] for seed, path in files.items()}


def _train_recorded(
    model: "Flow", chosen: argparse.Namespace, console: Console, recorded: "Recorded", seed: int
) -> "Result":
    """Train on recorded images from the start of a seed, and return the result."""
    from unstale.research.denoise import policies
    from unstale.research.denoise.recorded import (
        RecordedOptions,
        check_flow,
        reference_error,
        train_recorded,
    )

    network = policies.start(model, chosen.load, seed)
    options: RecordedOptions = options_of(RecordedOptions, chosen)
    noisy = None if options.without_noise else options.noisy
    check_flow(model, network, network, noisy, options.held_out)
    error, zero = reference_error(model, network, recorded, options.microbatch)
    line = f"seed {seed}: reference error {error:.3f} of velocities, {zero:.3f} of velocity 0"
    console.print(line, highlight=False)
    if error >= zero:
        console.print(f"seed {seed}: warning: the network is worse than velocity 0")
    result = train_recorded(model, network, recorded, options, seed)
    if chosen.save:
        policies.save_weights(network, policies.weights_file(chosen.save, seed))
    return result


def _gain(before: Sequence[float], after: Sequence[float]) -> tuple[str, str]:
    """Return the mean gain, and its interval over runs, which is empty for fewer than two."""
    gains = [late - early for early, late in zip(before, after, strict=True)]
    paired = paired_difference(gains)
    interval = "{:+.3f} to {:+.3f}".format(*paired.interval(0.05)) if paired else ""
    return f"{fmean(gains):+.3f}", interval


add = command(
    "denoise",
    "train a small policy that draws images, plans, texts or your own objects in steps",
    argument(
        "policy",
        help="images: digits by flow matching; plans: by masked diffusion, drafted and then edited "
        "in place; text: by masked diffusion; or module:Class, a Denoiser of your own "
        "(docs/denoise.md)",
    ),
    argument("--steps", type=COUNT, default=100, metavar="N", help="updates; default: 100"),
    argument("--groups", type=COUNT, default=4, metavar="G", help="tasks of an update; default: 4"),
    argument(
        "--group-size",
        type=bounded(int, 2, 10_000),
        default=16,
        metavar="N",
        help="objects of a task with a beginning of their own; default: 16",
    ),
    argument(
        "--fork-at",
        type=bounded(int, 1, 10_000),
        nargs="+",
        default=(),
        metavar="STEP",
        help="continue each object twice from these steps on",
    ),
    argument(
        "--noisy",
        type=bounded(int, 0, 10_000),
        nargs="+",
        default=(),
        metavar="STEP",
        help="only these steps draw noise and are trained, and others follow the flow; default: "
        "all",
    ),
    argument(
        "--draft",
        type=COUNT,
        nargs="+",
        metavar="N",
        help="columns that each step of a draft adds to a plan; default: 1 2 4",
    ),
    argument(
        "--edit",
        type=COUNT,
        nargs="*",
        metavar="N",
        help="columns that each step of an edit draws anew; default: 2 2",
    ),
    argument(
        "--draft-only",
        action="store_true",
        help="train plans without edits, by the reward of the draft; held-out plans have edits",
    ),
    argument(
        "--schedule",
        choices=("ascending", "equal", "one"),
        help="tokens of each step of a text: 1, 2, 4 and so on, equal numbers in as many steps, or "
        "one; default: ascending",
    ),
    argument(
        "--eoser",
        type=bounded(float, 1e-6, 1),
        metavar="FACTOR",
        help="multiply the confidence of the end of a text by FACTOR in the first step, and by "
        "more in later ones; 1 turns it off; default: 0.01, or 0.4 for other schedules",
    ),
    argument(
        "--likelihood",
        choices=("trajectory", "tokens", "one-step"),
        help="log-probabilities of a text's steps: those of places and tokens from the recorded "
        "states, of tokens only, or of tokens from a text that is masked everywhere; default: "
        "trajectory",
    ),
    argument(
        "--likeliest",
        action="store_true",
        help="evaluate without noise: of the likeliest places and tokens, or along the flow",
    ),
    argument(
        "--rule",
        choices=("depth", "loo", "pooled"),
        default="depth",
        help="the rule of advantages, as tree_advantage.rule; default: depth, which is GRPO's "
        "without forks",
    ),
    argument(
        "--fusion",
        choices=("leaves", "path", "path_mean"),
        default="leaves",
        help="weights of leaves in the rewards of --rule depth: equal; path: by the probability "
        "of each branch; path_mean: by its mean per value, such as a pixel; default: leaves",
    ),
    argument(
        "--kept-depths",
        type=bounded(float, 0.01, 1),
        default=1.0,
        metavar="SHARE",
        help="share of the levels of a tree that have a gradient; default: 1",
    ),
    argument(
        "--kept-leaves",
        choices=("all", "extremes"),
        default="all",
        help="ends of trees that have a gradient: extremes are the best and the worst",
    ),
    argument(
        "--explore",
        type=bounded(int, 3, 10_000),
        default=0,
        metavar="N",
        help="draw N objects with rounding, and train only on the --group-size best and worst "
        "ones, which are drawn again without",
    ),
    argument(
        "--explorer",
        choices=PRECISIONS,
        default="nvfp4",
        help="precision that draws for --explore; default: nvfp4",
    ),
    argument(
        "--engine",
        choices=PRECISIONS,
        default="bfloat16",
        help="precision that draws what is trained on; default: bfloat16. The trainer computes in "
        "that of its weights, as does float32",
    ),
    argument(
        "--max-staleness",
        type=bounded(int, 0, 1000),
        default=2,
        metavar="K",
        help="versions that a step may lag behind the update that trains on it; default: 2",
    ),
    argument(
        "--pace",
        type=COUNT,
        default=4,
        metavar="N",
        help="steps that all objects advance between two updates; default: 4",
    ),
    argument(
        "--microbatch",
        type=COUNT,
        default=0,
        metavar="N",
        help="steps, or images of --recorded, in one pass of the network, so that larger updates "
        "fit into memory; default: all of an update",
    ),
    argument(
        "--held-out",
        type=COUNT,
        default=512,
        metavar="N",
        help="held-out tasks of an evaluation; default: 512",
    ),
    argument(
        "--lr",
        type=bounded(float, 1e-9, 1),
        default=0.0,
        help="learning rate; default: that of the policy",
    ),
    argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="write the trained weights of each seed to FOLDER/seed-N.safetensors",
    ),
    argument(
        "--load",
        type=Path,
        metavar="FOLDER",
        help="begin with the weights of the same seed in FOLDER, instead of the supervised ones",
    ),
    argument(
        "--record",
        metavar="FILE",
        help="train nothing, and write the images that the run would draw from its start, with "
        "their contexts, rewards and groups; {seed} in FILE is the seed",
    ),
    argument(
        "--recorded",
        metavar="FILE",
        help="train on the recorded groups of FILE, and draw nothing (GDRO); {seed} is the seed",
    ),
    argument(
        "--without-noise",
        action="store_true",
        help="draw by the flow itself: recorded images, and those that evaluate --recorded",
    ),
    argument(
        "--beta",
        type=bounded(float, 1e-6, 1e6),
        default=12.0,
        help="scale of implicit rewards for --recorded; lower ones move further; default: 12",
    ),
    argument(
        "--temperature",
        type=bounded(float, 1e-6, 1e6),
        default=0.05,
        help="difference of rewards at which one of two images is to be e times as probable as "
        "the other, for --recorded; default: 0.05",
    ),
    argument(
        "--best-weight",
        type=bounded(float, 0, 1e6),
        default=0.5,
        metavar="GAMMA",
        help="weight of the error of each group's best image for --recorded; default: 0.5",
    ),
    argument("--seed", type=bounded(int, 0, 2**31), default=0, help="default: 0"),
    argument("--seeds", type=COUNT, default=1, metavar="N", help="runs, each with another seed"),
    JSON,
)(_denoise)
