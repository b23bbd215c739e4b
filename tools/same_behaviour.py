"""Compare the behaviour of two source trees, bit for bit, on short runs with fixed seeds.

    python tools/same_behaviour.py OTHER_TREE [--runs FOLDER] [--only NAME ...]

Each run of `RUNS` is made by the package of this tree and by that of OTHER_TREE, with this
interpreter, and `unstale same` compares checkpoints, versions, trained weights, journals and
metrics. After a change of structure all of them are equal. The exit code is 1 if a run differs or
fails. OTHER_TREE is a worktree of the commit before the change:

    git worktree add --detach ../before v0.1.0 && python tools/same_behaviour.py ../before
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]

SMALL: dict[str, object] = {
    "max_steps": 4,
    "minutes": 0,
    "eval.tasks": 8,
    "eval.interval": 2,
    "checkpoint.interval": 2,
    "schedule.groups_per_step": 4,
    "schedule.group_size": 4,
    "audit.share": 0.5,
}
"""Options of all runs on the small model of the package."""

RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "exact": ("retail", SMALL),
    "minibatches": (
        "retail",
        SMALL | {"trainer.minibatches_per_batch": 2, "old_logps.route": "ppo_ewma_async"},
    ),
    "stream": ("retail", SMALL | {"trainer.stream": True}),
    "lora": ("retail", SMALL | {"trainer.lora_rank": 4}),
    "desks": (
        "desks_small",
        SMALL | {"objective.loss_type": "gspo", "correction.mode": "mask_weight"},
    ),
    "recompute": (
        "calculator",
        SMALL | {"old_logps.route": "current_recompute", "old_logps.baseline": True},
    ),
    "techniques": ("retail", SMALL | {"techniques": "ess_lr tool_bonus"}),
    "loglinear": ("retail", SMALL | {"old_logps.route": "interp_prox_loglinear"}),
}


def command(recipe: str, options: dict[str, object], name: str, runs: Path) -> list[str]:
    """Return the command of a run, in the environment of either tree."""
    words = [f"--{key}={value}" for key, value in options.items()]
    run = [*words, "--deterministic=true", f"--runs={runs}", f"--name={name}"]
    return [sys.executable, "-m", "unstale", "train", recipe, *run]


def unstale(tree: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with the package of `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(words, cwd=tree, env=environment, text=True, capture_output=True)


def compare(name: str, trees: tuple[Path, Path], folder: Path) -> list[str]:
    """Make a run in both trees. Return the differences, or the last lines of a failed run."""
    recipe, options = RUNS[name]
    folders = [folder / side / name for side in ("here", "there")]
    for tree, run in zip(trees, folders, strict=True):
        done = unstale(tree, command(recipe, options, name, run.parent))
        if done.returncode != 0:
            return [f"{tree.name} failed:", *(done.stdout + done.stderr).splitlines()[-5:]]
    words = [sys.executable, "-m", "unstale", "same", *map(str, folders)]
    done = unstale(trees[0], words)
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--runs", type=Path, default=TREE / "runs" / "same_behaviour")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    chosen = parser.parse_args(words)
    differ = False
    for name in chosen.only:
        found = compare(name, (TREE, chosen.other.resolve()), chosen.runs.resolve())
        differ |= bool(found)
        print(f"{name}: {'differs' if found else 'equal'}", *found, sep="\n  ", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
