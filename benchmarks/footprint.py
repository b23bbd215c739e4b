"""Measure the memory and disk space of a run by the size of its model.

    python -m benchmarks.footprint --before TREE     # TREE is a checkout of an earlier commit

A random Qwen3 trains a few steps on the calculator, in float32 and in bfloat16, by the command line
of this tree and of an earlier one. Peaks of resident memory are the kernel's (VmHWM), read from
outside; shared pages count in each process. Bytes per weight are the growth from the smallest model
on, so that programs and activations of a fixed size are left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.config import SHIPPED_POLICY

ROOT = Path(__file__).parent.parent
SIZES = {"1M": (128, 4), "60M": (768, 8), "300M": (1280, 15)}
"""Width and layers of a model of about that size."""
OPTIONS = (
    "--minutes 0 --max_steps 4 --checkpoint.interval 2 --eval.tasks 0 --audit.share 0 "
    "--trainer.lr 1e-6 --schedule.groups_per_step 2 --schedule.group_size 2 "
    "--schedule.max_staleness 1 --engine.max_running 4 --engine.max_completion_tokens 32 "
    "--engine.max_context 2048 --rollout.max_turns 2 --objective.entropy_coef 0.001 "
    "--trainer.max_tokens_per_microbatch 512 --name run"
)
"""The entropy bonus gives every token a gradient, also if no episode of a random model succeeds."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one run."""

    weights: int
    trainer: int
    engine: int
    checkpoint: int
    journal: int


def make_model(folder: Path, size: str) -> int:
    """Save a random model with the shipped tokenizer. Return the number of its weights."""
    hidden, layers = SIZES[size]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY, local_files_only=True)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def measure(tree: Path, model: Path, weights: int, dtype: str) -> Measured:
    """Train in `tree` and return the peaks of its processes and the sizes of its files."""
    with tempfile.TemporaryDirectory() as runs:
        words = f"train calculator {OPTIONS} --model {model} --runs {runs}"
        words += f" --trainer.dtype {dtype} --engine.dtype {dtype}"
        with (Path(runs) / "output").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "unstale.cli.main", *words.split()],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            peaks = watch(process)
            if process.returncode:
                output.seek(0)
                raise SystemExit(f"{' '.join(words.split())} failed:\n{output.read()[-3000:]}")
        run = Path(runs) / "run"
        newest = max((run / "checkpoints").iterdir())
        return Measured(
            weights=weights,
            trainer=peaks[0],
            engine=max(peaks[1:]),
            checkpoint=sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
            journal=(run / "journal.sqlite").stat().st_size,
        )


def watch(supervisor: "subprocess.Popen[bytes]") -> list[int]:
    """Return the peaks of resident memory of a run: of its trainer first, then of its engines.

    The trainer's process is the child of the command's process, which only supervises it.
    """
    peaks: dict[int, int] = {}
    while supervisor.poll() is None:
        with suppress(OSError, ValueError, StopIteration):
            (trainer,) = children(supervisor.pid)
            for number in [trainer, *children(trainer)]:
                lines = Path(f"/proc/{number}/status").read_text().splitlines()
                peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                peaks[number] = 1024 * peak
        time.sleep(_POLL_S)
    return list(peaks.values())


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def table(found: dict[str, Measured], smallest: str) -> list[str]:
    """Return the rows of a table. Keys are `tree, dtype, size`."""
    lines = columns(
        "run", "weights", "trainer", "a weight", "engine", "a weight", "checkpoint", "a weight",
        "journal",
    )  # fmt: skip
    for key, held in found.items():
        base = found[", ".join([*key.split(", ")[:2], smallest])]
        more = held.weights - base.weights
        cells = [f"{held.weights:,}"]
        for name in ("trainer", "engine"):
            peak = getattr(held, name)
            grown = f"{(peak - getattr(base, name)) / more:.1f}" if more else ""
            cells += [f"{peak / 1e6:,.0f} MB", grown]
        cells += [f"{held.checkpoint / 1e6:,.1f} MB", f"{held.checkpoint / held.weights:.1f}"]
        lines.append(row(key, *cells, f"{held.journal / 1e3:,.0f} kB"))
    return lines


def _order(entry: tuple[str, Measured]) -> tuple[bool, str, int]:
    """Sort "before" before "after", then by precision, then by size."""
    tree, dtype, _ = entry[0].split(", ")
    return tree == "after", dtype, entry[1].weights


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "60M"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--raw", type=Path, help="file that keeps figures between calls")
    chosen = parser.parse_args()
    trees = {"before": chosen.before.resolve()} if chosen.before else {}
    trees["after"] = ROOT
    raw = json.loads(chosen.raw.read_text()) if chosen.raw and chosen.raw.exists() else {}
    for size in chosen.sizes:
        folder = Path(tempfile.mkdtemp())
        weights = make_model(folder, size)
        for name, tree in trees.items():
            for dtype in chosen.dtypes:
                key = f"{name}, {dtype}, {size}"
                if key in raw:
                    continue
                CONSOLE.print(key)
                held = measure(tree, folder, weights, dtype)
                raw[key] = [getattr(held, each) for each in Measured.__dataclass_fields__]
                if chosen.raw:
                    chosen.raw.write_text(json.dumps(raw))
        shutil.rmtree(folder)
    measured = {key: Measured(*values) for key, values in raw.items()}
    found = dict(sorted(measured.items(), key=_order))
    text = (
        "Peak resident memory, and bytes per weight: for memory the growth from the smallest "
        "model, for checkpoints all bytes of the newest one, deltas included."
    )
    write("footprint", "Memory and disk by model size", [text, "", *table(found, chosen.sizes[0])])


if __name__ == "__main__":
    main()
