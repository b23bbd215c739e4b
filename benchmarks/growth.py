"""Measure how a whole step grows with the model, against the limits of the machine.

    python -m benchmarks.growth         # 10 minutes on two cores; `--help` for smaller sizes

With `--rounds FILE` the rounds are also kept in a file. The table is then made of all rounds in the
file, so a size or a round can be measured by a call of its own.

Models of about 1, 20, 100 and 300 million random weights in float32. A step samples all
completions, trains on them and publishes the new weights, one after the other, by `unstale.train`.
Each part is compared with two bounds, measured in the same round. The comparison is of processor
time, which depends less on what else the machine does:

* *Limit*: the least time that the arithmetic and the memory traffic of the part can take, at the
  rate of large matrix products (by MKL or oneDNN, whichever is faster) and of large tensors that
  are read, copied or added (whichever is fastest).
* *Bare products*: the time of the model's own matrix products, in the sizes that the part needs and
  with nothing between them. Small matrices are slower than large ones.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.tables import CONSOLE, columns, row, spread, write
from benchmarks.train import MODELS, SIBLINGS, Bench, Shape, make_model
from benchmarks.train import options as train_options
from unstale.model import linear

SHAPES = {
    "1M": MODELS["1M"],
    "20M": Shape(10, 384, 6, 8192),
    "100M": Shape(12, 768, 12, 16_384),
    "300M": Shape(20, 1024, 16, 32_768),
}
PROMPTS = {"1M": 16, "20M": 8, "100M": 4, "300M": 2}
"""Prompts of a step, each with 8 completions. Larger models have fewer, to bound the time."""
STEPS = {"1M": 16, "20M": 3, "100M": 2, "300M": 2}
"""Measured steps of a round. One comes before them."""
PROCESSES = {"1M": 2, "20M": 2, "100M": 1, "300M": 1}
"""Engine processes, which divide the threads. Each reads all weights for each token."""
LEARNING_RATE = 1e-6
"""Small, so that large models do not learn to end their completions early."""
PROMPT = 8
"""Tokens of a prompt of `benchmarks.train.Words`."""


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic and the memory traffic of one step of a model.

    The small matrices of norms do not count, nor does attention: with 40 tokens a sequence it is
    below 1% of the FLOPs.
    """

    shape: Shape
    prompts: int
    tokens: int
    """Tokens of a completion."""

    @property
    def layer(self) -> list[tuple[int, int]]:
        """Return outputs and inputs of a layer's matrices. Keys and values have half the width."""
        hidden, inner = self.shape.hidden, 3 * self.shape.hidden
        attention = [(hidden, hidden), (hidden // 2, hidden), (hidden // 2, hidden)]
        return [*attention, (hidden, hidden), (inner, hidden), (inner, hidden), (hidden, inner)]

    @property
    def body(self) -> int:
        """Return the number of weights in the layers."""
        return self.shape.layers * sum(rows * width for rows, width in self.layer)

    @property
    def head(self) -> int:
        """Return the number of weights in the matrix of the logits, which is the embedding."""
        return self.shape.vocab * self.shape.hidden

    @property
    def sampled(self) -> int:
        return self.prompts * SIBLINGS * self.tokens

    @property
    def trained(self) -> int:
        """Return the tokens of a training pass. Siblings share their prompt."""
        return self.prompts * PROMPT + self.sampled

    def training_limit(self, flops: float, bandwidth: float) -> float:
        """Return the least seconds of training.

        It needs six FLOPs for each weight and token. AdamW reads weight, gradient and two moments,
        and writes all but the gradient: 28 bytes per weight.
        """
        products = 6 * (self.body * self.trained + self.head * self.sampled)
        return products / flops + 28 * (self.body + self.head) / bandwidth

    def sampling_limit(self, flops: float, bandwidth: float) -> float:
        """Return the least seconds of sampling.

        Each new token of all sequences reads all weights and needs two FLOPs for each weight and
        sequence. The two can overlap. Prompts are shared.
        """
        rows, weights = self.prompts * SIBLINGS, self.body + self.head
        prefill = 2 * self.body * self.prompts * PROMPT / flops
        return prefill + self.tokens * max(2 * weights * rows / flops, 4 * weights / bandwidth)


def machine_rates() -> dict[str, float]:
    """Return FLOPs of large products, and bytes moved in memory, per processor second."""
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    narrow = a.bfloat16(), b.bfloat16()
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    flops, moved = 2 * n**3, 4 * 2**26
    return {
        "MKL": flops / _least_s(lambda: functional.linear(a, b), 7),
        "oneDNN": flops / _least_s(lambda: linear.product(a, b), 7),
        "bfloat16": flops / _least_s(lambda: functional.linear(*narrow), 2),
        "read": moved / _least_s(source.sum, 5),
        "copy": 2 * moved / _least_s(lambda: target.copy_(source), 5),
        "add": 3 * moved / _least_s(lambda: torch.add(source, target, out=target), 5),
    }


def bare_products(work: Work, rows: int, *, logits: int) -> float:
    """Return the processor seconds of a forward pass's matrix products over `rows` tokens.

    The products of the logits have `logits` tokens. Each layer has weights of its own, as in the
    model, so they are read from memory if they do not fit the caches.
    """
    layers = [[torch.randn(size) for size in work.layer] for _ in range(work.shape.layers)]
    head = torch.randn(work.shape.vocab, work.shape.hidden)
    inputs = {width: torch.randn(rows, width) for _, width in work.layer}
    last = torch.randn(min(logits, 1024), work.shape.hidden)
    parts = max(1, round(logits / len(last)))

    def forward() -> Tensor:
        for matrices in layers:
            for matrix in matrices:
                linear.product(inputs[matrix.shape[1]], matrix)
        for _ in range(parts):
            found = linear.product(last, head)
        return found

    return _least_s(forward, 3)


def _least_s(call: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of some calls, after one that does not count."""
    call()
    took = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        took.append(time.process_time() - began)
    return min(took)


@dataclass(frozen=True, slots=True)
class Round:
    """The seconds and processor seconds of a step of one model in one round, and its bounds."""

    step_s: float
    sampling_s: float
    training_s: float
    step: float
    sampling: float
    training: float
    sampling_limit: float
    training_limit: float
    sampling_bare: float
    training_bare: float
    rates: dict[str, float]
    """The result of `machine_rates`."""


def measure(bench: Bench, name: str, work: Work, *, steps: int, processes: int) -> Round:
    rates = machine_rates()
    flops = max(rates["MKL"], rates["oneDNN"])
    bandwidth = max(rates["read"], rates["copy"], rates["add"])
    rows = work.prompts * SIBLINGS
    # A backward pass has two products for each one of the forward pass.
    training_bare = 3 * bare_products(work, work.trained, logits=work.sampled)
    sampling_bare = work.tokens * bare_products(work, rows, logits=rows)
    size = ("--prompts", work.prompts, "--tokens", work.tokens, "--steps", steps)
    how = ("--staleness", 0, "--warm", 1, "--processes", processes, "--lr", LEARNING_RATE)
    with bench.mine("whole", bench.folder / name, *size, *how) as turn:
        found = turn()
    return Round(
        step_s=1 / found["steps_per_s"],
        sampling_s=found["waiting_s"],
        training_s=found["training_s"],
        step=found["engine/cpu_s"] + found["trainer/cpu_s"],
        sampling=found["engine/cpu_s"],
        training=found["trainer/cpu_s"],
        sampling_limit=work.sampling_limit(flops, bandwidth),
        training_limit=work.training_limit(flops, bandwidth),
        sampling_bare=sampling_bare,
        training_bare=training_bare,
        rates=rates,
    )


def table(name: str, work: Work, rounds: Sequence[Round]) -> list[str]:
    """Return a model's rows: of sampling, training and the whole step."""

    def part(label: str, tokens: int, kind: str, bounds: list[list[float]]) -> str:
        seconds = [getattr(each, f"{kind}_s") for each in rounds]
        used = [getattr(each, kind) for each in rounds]
        return row(
            name,
            label,
            spread(seconds, "{:.3g}"),
            f"{tokens / median(seconds):,.0f}",
            spread(used, "{:.3g}"),
            *(spread(_shares(bound, used), "{:.0%}") for bound in bounds),
        )

    sampling, training = (
        [[getattr(each, f"{kind}_{bound}") for each in rounds] for bound in ("limit", "bare")]
        for kind in ("sampling", "training")
    )
    whole = [
        [a + b for a, b in zip(*both, strict=True)] for both in zip(sampling, training, strict=True)
    ]
    return [
        part("sampling", work.sampled, "sampling", sampling),
        part("training", work.trained, "training", training),
        part("whole step", work.sampled, "step", whole),
    ]


def _kept(file: Path | None) -> dict[str, list[Round]]:
    """Return the rounds of a file by model, none without a file."""
    if file is None or not file.exists():
        return {}
    kept = json.loads(file.read_text())
    return {name: [Round(**each) for each in of] for name, of in kept.items()}


def _shares(bounds: Sequence[float], took: Sequence[float]) -> list[float]:
    return [least / real for least, real in zip(bounds, took, strict=True)]


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, help="prompts of a step, in place of each model's")
    parser.add_argument("--steps", type=int, help="steps of a round, in place of each model's")
    parser.add_argument("--processes", type=int, help="engine processes, in place of each model's")
    parser.add_argument("--rounds", type=Path, help="a file of rounds, to continue or to begin")
    parser.add_argument("--folder", type=Path, help="a folder to keep the models and runs in")
    chosen = parser.parse_args(words)
    torch.set_num_threads(chosen.threads)
    works = {
        name: Work(SHAPES[name], chosen.prompts or PROMPTS[name], chosen.tokens)
        for name in chosen.models
    }
    rounds = _kept(chosen.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        bench = Bench(train_options().parse_args(["--threads", str(chosen.threads)]), folder)
        for name, work in works.items():
            if not (folder / name).exists():
                make_model(folder / name, work.shape)
        for number in range(chosen.repeats):
            for name, work in works.items():
                CONSOLE.print(f"round {number + 1} of {chosen.repeats}: {name}")
                steps = chosen.steps or STEPS[name]
                processes = chosen.processes or PROCESSES[name]
                found = measure(bench, name, work, steps=steps, processes=processes)
                rounds[name] = [*rounds.get(name, []), found]
                CONSOLE.print(f"{found}", markup=False)
                if chosen.rounds:
                    kept = {model: [asdict(each) for each in of] for model, of in rounds.items()}
                    chosen.rounds.write_text(json.dumps(kept, indent=1))
    works = {
        name: Work(SHAPES[name], chosen.prompts or PROMPTS[name], chosen.tokens)
        for name in SHAPES
        if name in rounds
    }
    sizes = ", ".join(
        f"{name} {work.body + work.head:,} weights, {work.prompts} prompts, "
        f"{chosen.processes or PROCESSES[name]} engine process(es), {len(rounds[name])} round(s)"
        for name, work in works.items()
    )
    measured = [found.rates for of in rounds.values() for found in of]
    giga = {name: spread([each[name] / 1e9 for each in measured], "{:.0f}") for name in measured[0]}
    lines = [
        f"A step has 8 completions of {chosen.tokens} tokens for each prompt of {PROMPT}, and "
        f"engines and trainer take turns on {chosen.threads} threads. Float32; {sizes}. Medians "
        "and ranges. Shares are the bound's processor time over the measured processor time, which "
        "for sampling is that of the engines' steps, and for training that of the whole process of "
        "the trainer: it also publishes the weights and writes records. The rate of a whole step "
        "counts sampled tokens.",
        "",
        f"The machine, in the same rounds, per processor second: {giga['MKL']} GFLOP by MKL and "
        f"{giga['oneDNN']} by "
        f"oneDNN in float32 products of 2048 x 2048 matrices, {giga['bfloat16']} in bfloat16; "
        f"{giga['read']} GB when reading, {giga['copy']} when copying and {giga['add']} when "
        "adding 268 MB. The limit of training is 6 FLOPs for each weight and token (prompts once "
        "for all siblings) and 28 bytes for each weight (AdamW). The limit of sampling is 2 FLOPs "
        "for each weight and token, or 4 bytes for each weight and new token of all sequences, "
        "whichever takes longer.",
        "",
        *columns(
            "model",
            "part",
            "seconds",
            "tokens/s",
            "processor seconds",
            "share of the limit",
            "share of bare products",
        ),
        *(line for name, work in works.items() for line in table(name, work, rounds[name])),
    ]
    return write("growth", "How a step grows with the model", lines)


if __name__ == "__main__":
    main()
