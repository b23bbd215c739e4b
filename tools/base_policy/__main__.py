"""Make a shipped policy again, or a short version of it."""

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.base_policy.make import RECIPES, make, shortened
from tools.base_policy.measure import play, table
from unstale.config import SHIPPED_POLICIES
from unstale.envs.desk import shipped_desks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.base_policy", description=__doc__)
    parser.add_argument(
        "--model", choices=RECIPES, default="base", help="the policy to make (default: base)"
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: the shipped one)")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="steps per stage, for a short version; 0 runs the whole recipe",
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        help="make a Qwen3-MoE with this many experts in each layer; 0 makes the dense model",
    )
    parser.add_argument("--workers", type=int, help="training processes (default: the recipe's)")
    options = parser.parse_args()
    if (options.steps or options.experts) and not options.out:
        parser.error("--steps and --experts make another model and need --out FOLDER")
    out: Path = options.out or SHIPPED_POLICIES[options.policy]
    start = time.perf_counter()
    recipe = RECIPES[options.policy]
    recipe = replace(recipe, experts=options.experts, workers=options.workers or recipe.workers)
    if options.steps:
        recipe = shortened(recipe, options.steps)
    with tempfile.TemporaryDirectory() as made:  # an interrupted run changes nothing
        make(recipe, Path(made))
        shutil.copytree(made, out, dirs_exist_ok=True)
    print(f"made in {(time.perf_counter() - start) / 60:.1f} min: {out}")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(out)
    for name, tasks in shipped_desks(level="1").items():
        for temperature in (1.0, 0.0) if name in (recipe.desks or ("retail",)) else ():
            played = play(model, tokenizer, tasks.held_out(256), temperature=temperature)
            print(f"{name}, temperature {temperature:g}: {table(played)}")


if __name__ == "__main__":
    main()
