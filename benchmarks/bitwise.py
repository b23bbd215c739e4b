"""Compare log-probabilities of engine and trainer bit for bit in whole runs, and time this mode.

    python -m benchmarks.bitwise bits                       # 200 steps, two settings: 20 minutes
    python -m benchmarks.bitwise bits --model smollm2 --steps 4
    python -m benchmarks.bitwise cost [--model smollm2]    # tokens per second with and without

The runs are asynchronous (`max_staleness` 2): weights change in the middle of replies, which
continue with the new weights, and contexts share cache pages. A run ends with an error at the first
token whose two values differ. The default policy trains on the retail desk. Another policy writes
short texts, which are paid for the letter e.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.tables import CONSOLE, alternate, columns, ratios, row, spread, write
from unstale.config import RunConfig
from unstale.durability.run_folder import Row, RunFolder
from unstale.engines.embedded.batcher import Batcher, SampleRequest
from unstale.engines.embedded.worker import build_runner, build_sampler
from unstale.envs import Message, Turn
from unstale.model.forward import ForwardOptions
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.records import Task

BASE = "base"
"""The name of the policy that the package has."""
DTYPES = ("float32", "bfloat16")
SETTINGS = (("float32", 4), ("bfloat16", 8))
"""The precisions, each with its batch size: a number of groups of 4 episodes."""
GROUP_SIZE = 8
"""Episodes of a group whose speed is measured. There are 8 groups."""
PROMPT, REPLY = 40, 24
"""Tokens of a prompt, which the episodes of a group share, and of a reply."""
WORDS = ("river", "mountain", "winter", "music", "bread", "letter", "garden", "engine", "harbour")


class LetterEnv:
    """An environment that pays the share of letters of a reply that are an e."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def begin(self) -> Turn:
        word = WORDS[self._task.index % len(WORDS)]
        return Turn((Message("user", f"Write one sentence about a {word}."),))

    async def step(self, reply: Message) -> Turn:
        letters = [letter for letter in reply.content.lower() if letter.isalpha()]
        share = letters.count("e") / max(1, len(letters))
        return Turn((), done=True, rewards={"letters": share})


class Letters:
    """Tasks whose rewards differ within nearly every group, whatever the policy can do."""

    name = "letters"
    tools: tuple[dict[str, Any], ...] = ()

    def train(self, seed: int) -> Iterator[Task]:
        return (Task("letters", "train", index) for index in count(seed * 10**6 + 1))

    def held_out(self, number: int) -> list[Task]:
        return [Task("letters", "held-out", -1 - index) for index in range(number)]

    def env(self, task: Task, seed: int) -> LetterEnv:
        return LetterEnv(task)


def train(policy: str, steps: int, options: Mapping[str, object]) -> list[Row]:
    """Return the metrics of an asynchronous run."""
    given: dict[str, object] = {
        "max_steps": steps,
        "minutes": 0,
        "eval.tasks": 0,
        "schedule.max_staleness": 2,
        "schedule.group_size": 4,
        "checkpoint.interval": steps,
        **options,
    }
    recipe = "retail"
    if policy != BASE:
        recipe = "llm"
        given |= {"model": policy, "task.env": "benchmarks.bitwise:Letters"}
        given |= {"engine.max_completion_tokens": REPLY, "engine.max_context": 256}
        given |= {"trainer.lr": 1e-5, "engine.max_running": 64}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unstale", "train", recipe, "--runs", folder]
        command += ["--name", "run", *(f"--{name}={value}" for name, value in given.items())]
        CONSOLE.print(" ".join(f"{name}={value}" for name, value in options.items()))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"bitwise: {' '.join(command)}\n{done.stderr or done.stdout}")
        return RunFolder(Path(folder) / "run").metrics()


def settings(dtype: str, *, bitwise: bool) -> dict[str, object]:
    return {
        "engine.dtype": dtype,
        "trainer.dtype": dtype,
        "engine.bitwise": str(bitwise).lower(),
        "old_logps.route": "snapshot_old",
    }


def bits(policy: str, steps: int) -> list[str]:
    lines = columns(
        "dtype",
        "episodes of a batch",
        "steps",
        "tokens trained",
        "values compared",
        "episodes of mixed versions",
        "largest staleness",
        "mean abs log D",
        "mean abs log D without the mode",
    )
    for dtype, groups in SETTINGS:
        size = {"schedule.groups_per_step": groups}
        rows = train(policy, steps, settings(dtype, bitwise=True) | size)
        plain = train(policy, min(steps, 20), settings(dtype, bitwise=False) | size)
        trained = [each for each in rows if each.get("trainer/action_tokens")]
        lines.append(
            row(
                dtype,
                4 * groups,
                len(trained),
                f"{sum(each['trainer/action_tokens'] for each in trained):,.0f}",
                f"{sum(each['trainer/bitwise_tokens'] for each in trained):,.0f}",
                f"{mean(each['schedule/mixed_version_share'] for each in trained):.0%}",
                f"{max(each['schedule/staleness_max'] for each in trained):.0f}",
                f"{_log_d(trained):g}",
                f"{_log_d(plain):.2g}",
            )
        )
    return lines


def _log_d(rows: Sequence[Row]) -> float:
    name = "correction/log_d_abs_mean"
    return mean(each[name] for each in rows if each.get(name) is not None)


def sampling(folder: Path, dtype: str, policy: Policy, *, bitwise: bool) -> Callable[[], float]:
    """Return a function that samples a batch's replies, and returns tokens per second."""
    with torch.inference_mode():
        runner = build_runner(
            folder, dtype=dtype, max_slots=64, max_context=256, is_bitwise=bitwise
        )
        sampler = build_sampler((), is_bitwise=bitwise)
        engine = Batcher(runner, max_slots=64, max_context=256, sampler=sampler)

    def run() -> float:
        with torch.inference_mode():
            engine.load(policy.weights())  # drops the cache
            for number, prompt in enumerate(prompts(policy)):
                engine.submit(SampleRequest(number, prompt, REPLY, [], 1.0, number))
            began = time.perf_counter()
            sampled = 0
            while engine.has_work:
                sampled += sum(len(reply.tokens) for reply in engine.step())
        return sampled / (time.perf_counter() - began)

    return run


def prompts(policy: Policy) -> list[list[int]]:
    noise = torch.Generator().manual_seed(0)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    found = torch.randint(20, vocabulary, (8, PROMPT), generator=noise).tolist()
    return [prompt for prompt in found for _ in range(GROUP_SIZE)]


def training(policy: Policy, *, gradient: bool) -> float:
    """Return the tokens per second of the passes of a batch of 64 sequences."""
    noise = torch.Generator().manual_seed(1)
    replies = torch.randint(20, 100, (64, REPLY), generator=noise).tolist()
    sequences = [prompt + reply for prompt, reply in zip(prompts(policy), replies, strict=True)]
    offsets = tuple(accumulate(map(len, sequences), initial=0))
    packed = Packed(torch.tensor([token for each in sequences for token in each]), offsets)
    where = torch.zeros(len(packed.tokens), dtype=torch.bool)
    for end in offsets[1:]:
        where[end - REPLY : end] = True
    began = time.perf_counter()
    with torch.set_grad_enabled(gradient):
        logp = policy.logps(packed, temperature=1.0, where=where)
        if gradient:
            logp.sum().backward()
            policy.model.zero_grad(set_to_none=True)
    return len(where) / (time.perf_counter() - began)


def cost(folder: Path, repeats: int) -> list[str]:
    """Compare tokens per second of one process and one thread, in alternating rounds."""
    torch.set_num_threads(1)
    lines = columns("dtype", "work", "usual, tokens/s", "bitwise, tokens/s", "usual / bitwise")
    for dtype in DTYPES:
        policies = {}
        for name, is_bitwise in (("usual", False), ("bitwise", True)):
            policies[name] = Policy.load(folder, dtype=dtype, device="cpu")
            passes = ForwardOptions(bitwise=is_bitwise, published_dtype=dtype)
            policies[name].set_forward_options(passes)
        for work in ("sampling", "scoring", "training"):
            contestants = {
                name: sampling(folder, dtype, policy, bitwise=name == "bitwise")
                if work == "sampling"
                else partial(training, policy, gradient=work == "training")
                for name, policy in policies.items()
            }
            for run in contestants.values():
                run()
            found = alternate(contestants, repeats)
            slower = ratios(found, "usual", over="bitwise")
            speeds = [spread(found[name], "{:,.0f}") for name in ("usual", "bitwise")]
            lines.append(row(dtype, work, *speeds, spread(slower)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("bits", "cost"))
    parser.add_argument("--model", default=BASE, help="as the option --model of a run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    folder = RunConfig(recipe="", model=chosen.model).policy_folder
    name = Path(chosen.model).name.replace("_", "-")
    if chosen.part == "bits":
        lines = bits(chosen.model, chosen.steps)
        title = f"Bits of engine and trainer that differ: none ({name})"
    else:
        lines = cost(folder, chosen.repeats)
        title = f"The cost of engine.bitwise ({name})"
    write(f"bitwise-{chosen.part}-{name}", title, lines)


if __name__ == "__main__":
    main()
