"""The first hour of a new user, as a program: own model, own data, own reward.

    python examples/first_hour.py            # two random models of 60M parameters
    python examples/first_hour.py --short    # two tiny ones, a minute on a CPU

For a Qwen3 and a Llama it writes a model folder, a JSONL file, a reward function and a TOML file.
Then it lints, trains with Weights & Biases offline, kills the run (SIGKILL), resumes and evaluates
it, exports its trajectories, and puts the policy with a model card into a folder. Each is the
command that a user types. At the end it prints a table of the minutes that each took.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = ("qwen3", "llama")
STEPS = 4
METRICS = "metrics.jsonl"
REWARD = '''
def reward(reply: str, row: dict) -> float:
    """Return 1 for the answer. Otherwise return the share of digits, so that every model learns."""
    if row["answer"] in reply.split():
        return 1.0
    return 0.5 * sum(letter.isdigit() for letter in reply) / max(1, len(reply))
'''
RUN = f"""
recipe = "llm"
max_steps = {STEPS}
trackers = "wandb"

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
interval = 2

[eval]
tasks = 8
interval = 0
"""
SIZES = {
    False: {"hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 2560},
    True: {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
}
"""Sizes of the models. The key is True for the short form (`--short`)."""


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
    """Runs `unstale` in a folder, prints each command and keeps its duration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        """Durations by the name of a stage, in order."""

    @contextmanager
    def stage(self, name: str, words: str) -> Iterator["subprocess.Popen[str]"]:
        """Start a command, and keep its duration as that of a stage."""
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "unstale", *shlex.split(words)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "100", "WANDB_MODE": "offline"},
        ) as process:
            yield process
        self.seconds[name] = time.monotonic() - began
        say(f"{self.seconds[name]:6.1f} s  {name:<16} unstale {words}")

    def run(self, name: str, words: str) -> str:
        """Return the standard output. Raises RuntimeError if the command fails."""
        with self.stage(name, words) as process:
            output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"unstale {words}\n{output}{errors}")
        return output

    def kill_after_a_step(self, name: str, words: str, metrics: Path) -> None:
        """Begin a run and kill it as soon as it has logged a step."""
        with self.stage(name, words) as process:
            while not metrics.is_file() or '"step":1' not in metrics.read_text().replace(" ", ""):
                if process.poll() is not None:
                    raise RuntimeError(f"unstale {words}\n{''.join(process.communicate())}")
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.communicate()


def first_hour(kind: str, folder: Path, *, short: bool) -> dict[str, float]:
    """Do everything for one model. Return the seconds of each stage."""
    shell = Shell(folder)
    run = folder / "runs" / kind
    began = time.monotonic()
    write_model(kind, folder / "models" / kind, short=short)
    shell.seconds["write a model"] = time.monotonic() - began
    shell.run("lint", "lint run.toml")
    shell.kill_after_a_step(
        "train, killed", f"train run.toml --model models/{kind} --name {kind}", run / METRICS
    )
    shell.run("resume", f"train --resume runs/{kind} --reward sums:reward")
    output = shell.run("evaluate", f"eval runs/{kind} --reward sums:reward --json")
    shell.run("export", f"export-trajectories runs/{kind} --content text --out {kind}.jsonl")
    shell.run("push", f"push-to-hub runs/{kind} --folder pushed/{kind}")
    check(kind, folder)
    episodes = len((folder / f"{kind}.jsonl").read_text().splitlines())
    success = json.loads(output)["avg@1"]["value"]
    say(f"          {kind}: held-out success {success:.0%}, {episodes} episodes")
    return shell.seconds


def check(kind: str, folder: Path) -> None:
    """Raise RuntimeError unless every file is there and the policy has changed."""
    import torch
    from transformers import AutoModelForCausalLM

    run, pushed = folder / "runs" / kind, folder / "pushed" / kind
    steps = [json.loads(line)["step"] for line in (run / METRICS).read_text().splitlines()]
    if steps != list(range(STEPS + 1)):
        raise RuntimeError(f"the resumed run has the steps {steps}")
    if len(list(run.glob("wandb-*/wandb/offline-run-*/run-*.wandb"))) != 2:
        raise RuntimeError("Weights & Biases has not written a file for each part of the run")
    if not (pushed / "README.md").is_file():
        raise RuntimeError(f"{pushed} has no model card")
    before = AutoModelForCausalLM.from_pretrained(folder / "models" / kind).state_dict()
    after = AutoModelForCausalLM.from_pretrained(pushed).state_dict()
    if all(torch.equal(weights.float(), after[name].float()) for name, weights in before.items()):
        raise RuntimeError("training has changed no weight")


def table(seconds: dict[str, dict[str, float]]) -> str:
    """Return the minutes of each stage by model as a Markdown table."""
    lines = [f"| stage | {' | '.join(seconds)} |", "|---" * (1 + len(seconds)) + "|"]
    for stage in next(iter(seconds.values())):
        minutes = [f"{each[stage] / 60:.2f}" for each in seconds.values()]
        lines.append(f"| {stage} | {' | '.join(minutes)} |")
    totals = [f"{sum(each.values()) / 60:.2f}" for each in seconds.values()]
    lines.append(f"| all | {' | '.join(totals)} |")
    return "\n".join(lines)


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
    seconds = {kind: first_hour(kind, folder, short=chosen.short) for kind in KINDS}
    say(f"\nMinutes of each stage:\n\n{table(seconds)}\n\neverything is in {folder}")


if __name__ == "__main__":
    main()
