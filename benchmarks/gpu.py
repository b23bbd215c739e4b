"""Measure training, scoring and decoding on one GPU against the GPU's limits.

    python -m benchmarks.gpu              # under 25 minutes on one GPU; nothing is downloaded

Dense Qwen3-shaped models of 0.6B and 1.7B parameters with random weights in bfloat16. The GPU's
limits are measured in the same run, by large matrix products and a large copy. `--parts` and
`--sizes` select a part. On a CPU it only tests the script (`--device cpu --layers 2 --hidden 64
...`) and skips parts that need CUDA.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.routes import (
    MIXED,
    WARM,
    History,
    Size,
    copy_bytes,
    episodes,
    make_trainer,
    play,
    settle,
    timed,
    train,
)
from benchmarks.tables import CONSOLE, columns, row, spread, verdict, write
from unstale.config.routes import routes
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.model.loading import DTYPES
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import collate
from unstale.testing import tiny_policy

RATE = 1e-6
GOAL = 0.45
"""Goal for the FLOPs per second of training, as a share of large matrix products."""
SHAPES = {"0.6B": (28, 1024, 3072), "1.7B": (28, 2048, 6144)}
"""Layers, width and inner width. All have 16 query heads, 8 key heads and tied embeddings."""
VOCABULARIES = (1024, 32_768, 151_936)
PARTS = ("train", "routes", "decode", "memory")
PROMPT, REPLY = 32, 256
"""Tokens of prompt and reply for the decoding speed."""


@dataclass(frozen=True, slots=True)
class Big(Size):
    """A model that is created on its device on demand. The folder holds only its shape."""

    device: str
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens_per_microbatch: int
    more: dict[str, Any] = field(default_factory=dict)

    def make(self) -> None:
        self.config.save_pretrained(self.folder)

    @property
    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
        )

    def policy(self, dtype: str = "bfloat16") -> Policy:
        """Return a model with seeded random weights."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=DTYPES[dtype])
        return Policy(model, tiny_policy().tokenizer)

    def scorer(self, policy: Policy) -> LocalScorer:
        return LocalScorer(policy, 1.0, self.max_tokens_per_microbatch)

    @property
    def options(self) -> dict[str, Any]:
        return {"max_tokens_per_microbatch": self.max_tokens_per_microbatch, **self.more}

    @property
    def body(self) -> int:
        """Return the number of weights in the matrices that every token passes."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head(self) -> int:
        """Return the number of weights in the matrix of the logits."""
        return self.vocab * self.hidden


def train_flops(size: Big, lengths: Sequence[int], sampled: int) -> float:
    """Return the FLOPs of a forward and backward pass over sequences of these lengths.

    Per token they are 6 times the weights, plus causal attention. Logits count for `sampled` tokens
    only. Recomputation to save memory does not count.
    """
    matrices = 6 * (size.body * sum(lengths) + size.head * sampled)
    return matrices + 6 * size.layers * size.heads * size.head_dim * sum(
        length**2 for length in lengths
    )


def decode_bytes(size: Big, rows: int) -> float:
    """Return the bytes read from memory to sample one token of `rows` sequences.

    These are all weights once, and each sequence's keys and values, half of its reply long.
    """
    context = PROMPT + REPLY / 2
    return (
        2.0 * (size.body + size.head)
        + rows * context * 4 * size.layers * size.kv_heads * size.head_dim
    )


@dataclass(frozen=True, slots=True)
class Chip:
    """Measured limits of the device."""

    flops: float
    """FLOPs per second of products of large bfloat16 matrices."""
    bandwidth: float
    """Bytes read and written per second by a large copy."""

    @classmethod
    def measure(cls, device: str) -> "Chip":
        large = device != "cpu"
        n, words = (8192, 2**31) if large else (512, 2**22)
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.ones(words, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        products, copies = list[float](), list[float]()
        for _ in range(13):
            with timed(products):
                torch.mm(a, b)
            with timed(copies):
                target.copy_(source)
        return cls(2 * n**3 / median(products[3:]), 4 * words / median(copies[3:]))


def batches_of(size: Big, count: int) -> list[list[Any]]:
    return [
        episodes(size, MIXED, version=number, first=number * size.sequences)
        for number in range(count)
    ]


def training(name: str, size: Big, chip: Chip, history: History) -> list[str]:
    batch = collate(batches_of(size, 1)[0])
    flops = train_flops(
        size, [end - start for start, end in batch.spans()], int(batch.sampled.sum())
    )
    steps = history.step_s[size.warm_steps :]
    shares = [flops / seconds / chip.flops for seconds in steps]
    rates = [len(batch.tokens) / seconds for seconds in steps]
    return [
        f"- {name}, {size.body + size.head:,} weights in matrices: {spread(rates, '{:,.0f}')} "
        f"tokens/s trained, {spread(shares, '{:.1%}')} of the matrix rate; goal "
        f"{verdict(shares, GOAL)}.",
    ]


def scoring(name: str, size: Big, history: History, chosen: Sequence[str]) -> list[str]:
    """Return a table of the time that some old-log-probability routes add to a training step."""
    lines = columns(
        "model", "route", "extra time a step", "idle time", "resident copies", "movable models"
    )
    batches, step = batches_of(size, len(history.copies)), median(history.step_s)
    for route in chosen:
        CONSOLE.print(f"{name}: {route}")
        played = play(route, size, history, batches)
        resident = played.costs.get("memory_bytes", 0.0) / copy_bytes(history.copies[0])
        idle = median(played.idle_s[WARM:]) / step
        lines.append(
            row(
                name,
                f"`{route}`",
                f"{played.extra_s / step:+.1%}",
                f"{idle:.1%}",
                f"{resident:.3f}",
                played.models,
            )
        )
        collect()
    return [f"Over a step of {step:.2f} s.", "", *lines]


async def decoding(name: str, size: Big, chip: Chip, rows: Sequence[int]) -> list[str]:
    lines = columns("model", "replies at once", "tokens/s", "memory limit, tokens/s", "share of it")
    engine = EmbeddedEngine(
        EngineOptions(size.folder, max_running=max(rows), max_context=2 * (PROMPT + REPLY))
    )
    try:
        await engine.start()
        await engine.load(size.policy().weights(), 0)
        await engine.resume()
        for count in rows:
            rates = [await _decoded(engine, count, size.vocab) for _ in range(4)][1:]
            limit = count * chip.bandwidth / decode_bytes(size, count)
            shares = [rate / limit for rate in rates]
            told = [spread(rates, "{:,.0f}"), f"{limit:,.0f}", spread(shares, "{:.1%}")]
            lines.append(row(name, count, *told))
    finally:
        await engine.close()
    return [f"`{engine.runner}`, prompts of {PROMPT} tokens, replies of {REPLY}.", "", *lines]


async def _decoded(engine: EmbeddedEngine, count: int, vocab: int) -> float:
    prompts = [
        [(31 * number + place) % vocab for place in range(PROMPT)] for number in range(count)
    ]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for seed, prompt in enumerate(prompts):
            tasks.create_task(engine.sample(prompt, SamplingParams(REPLY, (), seed=seed)))
    return count * REPLY / (time.perf_counter() - began)


def memory(name: str, size: Big) -> list[str]:
    """Return a table of the memory peaks of scoring and training.

    Memory that is always held does not count: weights, float32 copies, Adam's state and gradients.
    """
    if size.device == "cpu":
        return ["Not run: needs CUDA, whose allocator says what its peak was."]
    lines = columns("model", "vocabulary", "held GB", "scoring, peak GB", "training, peak GB")
    for vocab in VOCABULARIES:
        own = replace(size, vocab=vocab)
        trainer = make_trainer(own, RATE, 2)
        batch = collate(batches_of(own, 1)[0])
        for counted in (False, True):  # the first makes the optimizer's state
            part = trainer.prepare(batch)[0]
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer.backward(part)
            gradients = sum(6 * weight.numel() for weight in trainer.policy.weights().values())
            trained = torch.cuda.max_memory_allocated() - held - gradients
            trainer.step()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            own.scorer(trainer.policy).score(batch, batch.sampled)
            if counted:
                scored = torch.cuda.max_memory_allocated() - held
                lines.append(
                    row(name, vocab, *(f"{size / 1e9:.2f}" for size in (held, scored, trained)))
                )
        del trainer, part
        collect()
    return lines


def collect() -> None:
    """Free the memory of objects that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(name: str, size: Big, chip: Chip, chosen: argparse.Namespace) -> list[str]:
    """Return the report of one model. If a part fails, the report has the parts before it."""
    lines = ["", f"## {name}", ""]
    try:
        if {"train", "routes"} & set(chosen.parts):
            CONSOLE.print(f"{name}: training")
            history = train(size, RATE, WARM + chosen.repeats)
            collect()
            lines += training(name, size, chip, history)
            if "routes" in chosen.parts:
                lines += ["", "### Scoring", "", *scoring(name, size, history, chosen.routes)]
            del history
            collect()
        if "decode" in chosen.parts:
            CONSOLE.print(f"{name}: decoding")
            lines += ["", "### Decoding", "", *asyncio.run(decoding(name, size, chip, chosen.rows))]
        if "memory" in chosen.parts:
            CONSOLE.print(f"{name}: memory by vocabulary")
            lines += ["", "### Memory by vocabulary", "", *memory(name, size)]
    except (
        RuntimeError,
        OSError,
        ExceptionGroup,
    ) as error:  # an out-of-memory error is one of the first
        lines += ["", f"**Broke off here:** {type(error).__name__}: {str(error).splitlines()[0]}"]
        CONSOLE.print_exception()
    return lines


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--routes", nargs="+", choices=list(routes()), default=list(routes()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64, 256], help="replies decoded at once"
    )
    sizes = {
        "vocab": 151_936,
        "sequences": 32,
        "length": 1024,
        "heads": 16,
        "kv-heads": 8,
        "head-dim": 128,
    }
    for name, default in (sizes | {"max-tokens-per-microbatch": 16_384, "warm-steps": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("layers", "hidden", "inner"):
        parser.add_argument(f"--{name}", type=int, help="in place of each size's own")
    parser.add_argument(
        "--trainer", type=json.loads, default={}, help="knobs, as in '{\"compile\": true}'"
    )
    chosen = parser.parse_args(words)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device here: --device cpu runs the same code, at sizes that you "
            "choose"
        )
    return chosen


def main(words: Sequence[str] | None = None) -> Path:
    chosen = arguments(words)
    began, lines = time.monotonic(), list[str]()
    chip = Chip.measure(chosen.device)
    device = (
        torch.cuda.get_device_name()
        if chosen.device == "cuda"
        else "the CPU: sizes to try the script with"
    )
    collect()
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.sizes:
            own = zip(("layers", "hidden", "inner"), SHAPES[name], strict=True)
            layers, hidden, inner = (getattr(chosen, key) or default for key, default in own)
            size = Big(
                Path(folder) / name,
                layers,
                hidden,
                chosen.vocab,
                chosen.sequences,
                chosen.length,
                chosen.warm_steps,
                chosen.device,
                inner,
                chosen.heads,
                chosen.kv_heads,
                chosen.head_dim,
                chosen.max_tokens_per_microbatch,
                chosen.trainer,
            )
            size.make()
            lines += measure(name, size, chip, chosen)
    settle()
    head = [
        f"On {device}: {chip.flops / 1e12:,.1f} TFLOP/s in products of large bfloat16 matrices and"
        f" {chip.bandwidth / 1e9:,.0f} GB/s in a large copy, both seen in this run."
        f" {(time.monotonic() - began) / 60:.1f} minutes.",
        f"Random weights, {chosen.vocab:,} words; {chosen.sequences} trajectories of "
        f"{chosen.length} tokens a step,",
        f"passes of {chosen.max_tokens_per_microbatch:,} tokens, learning rate {RATE:g}.",
    ]
    question = "gpu" if set(chosen.parts) == set(PARTS) else f"gpu-{'-'.join(chosen.parts)}"
    return write(question, "What one GPU gives", [*head, *lines])


if __name__ == "__main__":
    main()
