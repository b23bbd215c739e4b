"""Make the shipped base policy again, or a short version of it."""

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import unstale
from tools.base_policy.make import SHIPPED, make, shortened
from tools.base_policy.measure import play, table
from unstale.envs.retail import RetailTasks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.base_policy", description=__doc__)
    shipped = Path(unstale.__file__).parent / "recipes" / "base_policy"
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
    parser.add_argument("--workers", type=int, default=SHIPPED.workers, help="training processes")
    options = parser.parse_args()
    if (options.steps or options.experts) and not options.out:
        parser.error("--steps and --experts make another model and need --out FOLDER")
    out: Path = options.out or shipped
    start = time.perf_counter()
    recipe = replace(SHIPPED, experts=options.experts, workers=options.workers)
    if options.steps:
        recipe = shortened(recipe, options.steps)
    with tempfile.TemporaryDirectory() as made:  # an interrupted run changes nothing
        make(recipe, Path(made))
        shutil.copytree(made, out, dirs_exist_ok=True)
    print(f"made in {(time.perf_counter() - start) / 60:.1f} min: {out}")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    tokenizer, tasks = AutoTokenizer.from_pretrained(out), RetailTasks(level=1).held_out(256)
    for temperature in (1.0, 0.0):
        print(table(play(model, tokenizer, tasks, temperature=temperature)))


if __name__ == "__main__":
    main()
