"""`python -m afterimage.recipes.base_policy`: make the shipped base policy again, or a short form of it."""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import afterimage
from afterimage.envs.retail import RetailTasks
from afterimage.recipes.base_policy.make import SHIPPED, make, shortened
from afterimage.recipes.base_policy.measure import play, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m afterimage.recipes.base_policy", description=__doc__)
    shipped = Path(afterimage.__file__).parent / "base_policy"
    parser.add_argument("--out", type=Path, default=shipped, help="folder to write (default: the shipped one)")
    parser.add_argument("--steps", type=int, default=0, help="steps a stage, for a try; 0 runs the whole recipe")
    parser.add_argument("--resume", action="store_true", help="keep the stages that the folder has been through")
    options = parser.parse_args()
    start = time.perf_counter()
    recipe = shortened(SHIPPED, options.steps) if options.steps else SHIPPED
    make(recipe, options.out, resume=options.resume)
    print(f"made in {(time.perf_counter() - start) / 60:.1f} min: {options.out}")  # noqa: T201
    model = AutoModelForCausalLM.from_pretrained(options.out, dtype="float32")
    tokenizer, tasks = AutoTokenizer.from_pretrained(options.out), RetailTasks(level=1).held_out(256)
    for temperature in (1.0, 0.0):
        print(table(play(model, tokenizer, tasks, temperature=temperature)))  # noqa: T201


if __name__ == "__main__":
    main()
