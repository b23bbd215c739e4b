"""The first hour of a new user, as a program: own model, own data, own reward.

    python examples/first_hour.py            # two random models of 60M parameters
    python examples/first_hour.py --short    # two tiny ones, a minute on a CPU

For a Qwen3 and a Llama it writes a model folder, a JSONL file, a reward function and a TOML file.
Then it lints, trains, kills the run, resumes it, evaluates it and exports its trajectories, each
with the command that a user types, and prints how long each took.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 4
REWARD = '''
def reward(reply: str, row: dict) -> float:
    """Return 1 for the answer. Otherwise return the share of digits, so that every model learns."""
    if row["answer"] in reply.split():
        return 1.0
    return 0.5 * sum(letter.isdigit() for letter in reply) / max(1, len(reply))
'''
RUN = f"""
recipe = "llm"
steps = {STEPS}

[task]
env = "dataset:sums.jsonl"
reward = "sums:reward"

[schedule]
groups_per_step = 4
group_size = 4

[engine]
max_completion_tokens = 16
max_context = 128

[trainer]
lr = 1e-4
warmup_steps = 0

[checkpoint]
every = 2

[eval]
tasks = 8
every = 0
"""
SIZES = {
    False: {"hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 2560},
    True: {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
}
"""Sizes of the models by whether the short form is asked for."""


def write_model(kind: str, folder: Path, *, short: bool) -> None:
    """Save a random model with the tokenizer and chat template of the package's small model."""
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )
    from transformers.utils import logging

    from unstale.config import SHIPPED_POLICY

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        **SIZES[short],
    }
    torch.manual_seed(0)
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=sizes["hidden_size"] // 4))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_inputs(folder: Path) -> None:
    """Write the data, the reward and the options of the run."""
    draw = random.Random(0)
    with (folder / "sums.jsonl").open("w") as file:
        for _ in range(200):
            a, b = draw.randrange(100), draw.randrange(100)
            row = {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}
            file.write(json.dumps(row) + "\n")
    (folder / "sums.py").write_text(REWARD)
    (folder / "run.toml").write_text(RUN)


class Shell:
    """Runs `unstale` in a folder, and prints each command with its duration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "unstale", *shlex.split(words)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )

    def run(self, words: str) -> str:
        """Return the standard output. Raises RuntimeError if the command fails."""
        began = time.monotonic()
        with self.begin(words) as process:
            output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"unstale {words}\n{output}{errors}")
        say(f"{time.monotonic() - began:6.1f} s  unstale {words}")
        return output

    def kill_after_a_step(self, words: str, metrics: Path) -> None:
        """Begin a run and kill it as soon as it has logged a step."""
        began = time.monotonic()
        with self.begin(words) as process:
            while not metrics.is_file() or '"step":1' not in metrics.read_text().replace(" ", ""):
                if process.poll() is not None:
                    raise RuntimeError(f"unstale {words}\n{''.join(process.communicate())}")
                time.sleep(0.05)
            process.kill()
        say(f"{time.monotonic() - began:6.1f} s  unstale {words}    (killed)")


def first_hour(kind: str, folder: Path, *, short: bool) -> dict[str, Any]:
    """Do everything for one model. Return the result of its evaluation."""
    write_model(kind, folder / "models" / kind, short=short)
    shell = Shell(folder)
    run = folder / "runs" / kind
    shell.run("lint run.toml")
    shell.kill_after_a_step(
        f"train run.toml --policy models/{kind} --name {kind}", run / "metrics.jsonl"
    )
    shell.run(f"train --resume runs/{kind} --reward sums:reward")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if steps[-1] != STEPS or sorted(set(steps)) != steps:
        raise RuntimeError(f"the resumed run has the steps {steps}")
    result: dict[str, Any] = json.loads(shell.run(f"eval runs/{kind} --reward sums:reward --json"))
    shell.run(f"export-trajectories runs/{kind} --content text --out {kind}.jsonl")
    episodes = len((folder / f"{kind}.jsonl").read_text().splitlines())
    say(f"          {kind}: held-out success {result['avg@1']['value']:.0%}, {episodes} episodes")
    return result


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="tiny models")
    parser.add_argument("--folder", type=Path, help="default: a new one in the system's folder")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    for kind in ("qwen3", "llama"):
        first_hour(kind, folder, short=chosen.short)
    say(f"everything is in {folder}")


if __name__ == "__main__":
    main()
