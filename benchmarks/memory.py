"""Measure the memory of scoring and training by vocabulary size.

    python -m benchmarks.memory          # about ten minutes; `--help` for other sizes

A random Qwen3 with a small body and a vocabulary of 1k, 32k and 150k runs one scoring and one
training pass over the same packed sequences, each in a new process, and passes that form all logits
in float32. The figure is the peak growth of the process: weights, gradients and optimizer moments
exist before. Autograd's two temporary tensors of the embedding's size are listed separately.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tables import CONSOLE, columns, picture, row, write
from unstale.config import SHIPPED_POLICY
from unstale.model.forward import ForwardOptions
from unstale.model.loading import load_tokenizer
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed

ROOT = Path(__file__).parent.parent
HIDDEN = 256
PASSES = (
    "scoring",
    "training",
    "training, recompute",
    "all logits, scoring",
    "all logits, training",
)

FLAT = 1.5
"""Highest ratio of peaks that counts as constant memory, without tables of the embedding's size.

With all logits in memory, the ratio is in the tens.
"""


def grown_mb(what: str, vocabulary: int, tokens: int) -> float:
    """Return the peak growth of the process by one pass, above what a trainer holds in any case."""
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        tie_word_embeddings=True,
    )
    policy = Policy(Qwen3ForCausalLM(config), load_tokenizer(SHIPPED_POLICY))
    policy.set_forward_options(ForwardOptions(gradient_checkpointing="recompute" in what))
    optimizer = torch.optim.AdamW(policy.model.parameters(), fused=True)
    length = tokens // 4
    packed = Packed(
        torch.randint(0, vocabulary, (4 * length,)), tuple(range(0, 4 * length + 1, length))
    )
    every = torch.ones(len(packed.tokens), dtype=torch.bool)
    for weight in policy.model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # its moments are there, and every page of them has been written to
    policy.score(
        Packed(packed.tokens[:64], (0, 64)),
        every[:64],
        temperature=1.0,
        max_tokens_per_microbatch=64,
    )
    before = _now_mb()
    _reset_peak()
    if "all logits" in what:
        with torch.set_grad_enabled("training" in what):
            logits = policy.model(
                input_ids=packed.tokens.view(4, length), use_cache=False
            ).logits.float()
            logps = (
                logits[:, :-1].log_softmax(-1).gather(2, packed.tokens.view(4, length)[:, 1:, None])
            )
            if "training" in what:
                logps.sum().backward()
    elif what == "scoring":
        policy.score(packed, every, temperature=1.0, max_tokens_per_microbatch=tokens)
    else:
        policy.logps(packed, temperature=1.0).sum().backward()
    return _peak_mb() - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def _now_mb() -> float:
    return _status("VmRSS:")


def _peak_mb() -> float:
    return _status("VmHWM:")


def _reset_peak() -> None:
    """Reset the peak, so that it does not include the preparation."""
    Path("/proc/self/clear_refs").write_text("5")
    if _peak_mb() > 1.05 * _now_mb():
        raise RuntimeError(
            f"the peak stays at {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB"
        )


def table_mb(vocabulary: int) -> float:
    """Return the MB of one tensor of the embedding's size.

    >>> round(table_mb(2**20))
    1024
    """
    return vocabulary * HIDDEN * 4 / 2**20


def measure(vocabularies: list[int], tokens: int, repeats: int) -> list[str]:
    found: dict[str, list[float]] = {}
    for what in PASSES:
        for vocabulary in vocabularies:
            if "all logits" in what and 3 * vocabulary * tokens * 4 > 12 * 2**30:
                found.setdefault(what, []).append(float("nan"))
                continue
            CONSOLE.print(f"{what}, vocabulary {vocabulary:,}")
            command = [
                sys.executable,
                "-m",
                "benchmarks.memory",
                "--child",
                what,
                "--vocabularies",
                str(vocabulary),
            ]
            told = [
                float(
                    subprocess.run(
                        [*command, "--tokens", str(tokens)],
                        cwd=ROOT,
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout.split()[-1]
                )
                for _ in range(repeats)
            ]
            found.setdefault(what, []).append(sorted(told)[repeats // 2])
    lines = [
        f"MB that one pass over {tokens:,} tokens adds, every one of them asked about. In "
        "brackets: beside the two tables of the embedding's size that a gradient in flight takes.",
        "",
        *columns(
            "pass",
            *(f"{vocabulary:,}" for vocabulary in vocabularies),
            "most over least, in brackets",
            "as it is",
            "goal",
        ),
    ]
    for what, sizes in found.items():
        extra = [
            2 * table_mb(vocabulary) if "training" in what else 0.0 for vocabulary in vocabularies
        ]
        rest = [size - more for size, more in zip(sizes, extra, strict=True)]
        cells = [
            (
                "does not fit"
                if size != size
                else f"{size:.0f}" + (f" ({own:.0f})" if own != size else "")
            )
            for size, own in zip(sizes, rest, strict=True)
        ]
        known, whole = [own for own in rest if own == own], [size for size in sizes if size == size]
        if min(known) <= 0:
            raise SystemExit(
                f"{what}: {tokens:,} tokens are too few beside two tables of the embedding's size"
            )
        flat = max(known) / min(known)
        goal = (
            ""
            if "all logits" in what
            else f"{'met' if flat <= FLAT else 'missed'}: {flat:.2f} of {FLAT}"
        )
        lines.append(row(what, *cells, f"{flat:.2f}", f"{max(whole) / min(whole):.2f}", goal))
    draw(vocabularies, found)
    return [*lines, "", f"The goal is judged without the two tables. {repeats} repeats, medians."]


def draw(vocabularies: list[int], found: dict[str, list[float]]) -> None:
    with picture("memory") as axes:
        for what, sizes in found.items():
            axes.plot(
                vocabularies,
                sizes,
                marker="o",
                label=what,
                linestyle="--" if "all" in what else "-",
            )
        axes.set(xscale="log", yscale="log", xlabel="vocabulary", ylabel="MB that a pass adds")
        axes.legend(frameon=False, fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1_000, 32_000, 150_000])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", choices=PASSES, help="what this process is to measure")
    chosen = parser.parse_args()
    if chosen.child:
        CONSOLE.print(grown_mb(chosen.child, chosen.vocabularies[0], chosen.tokens))
        return
    write(
        "memory",
        "Memory by vocabulary",
        measure(chosen.vocabularies, chosen.tokens, chosen.repeats),
    )


if __name__ == "__main__":
    main()
