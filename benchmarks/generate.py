"""Question 1: sampled tokens per second of the embedded engine beside transformers and vLLM, `make bench-generate`.

All play the same episodes of several turns: the same lengths of replies, at temperature 1, and the same tool results,
which cost no time. Each contestant is a process that is stopped while another plays.
"""

import argparse
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.generate_peers import MAX_CONTEXT, Episode, Probe
from benchmarks.tables import CONSOLE, alternate, columns, picture, ratios, row, spread, verdict, write

ROOT = Path(__file__).parents[1]
SIZES = {
    "tiny": (2, 64, 2, 1, 128),
    "1M": (4, 128, 4, 2, 1024),
    "5M": (6, 256, 8, 4, 2048),
    "20M": (8, 448, 14, 7, 4096),
}
"""Layers, hidden size, heads, key-value heads, vocabulary; each head has 32 dimensions."""
GROUP = 8
"""Episodes with the same opening."""
LABELS = {
    "ours": "ours",
    "generate": "transformers generate",
    "continuous": "transformers continuous batching",
    "vllm": "vLLM (CPU build)",
}
PYTHONS = {"ours": ".venv", "generate": ".venv-peers", "continuous": ".venv-peers", "vllm": ".venv-engines"}
GOALS = {"generate": 2.0, "vllm": 1.5, "continuous": 1.0}
WIDER = 1.5
"""At 256 episodes over 64."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference of log-probabilities from the plain forward pass in float32, beyond which it is another model."""


def workload(count: int, vocab: int, seed: int) -> list[Episode]:
    """Contexts grow from 60 to 140 tokens to several hundred in 4 to 8 turns.

    >>> opening, turns = workload(1, 100, seed=0)[0]
    >>> 60 <= len(opening) <= 140 and 4 <= len(turns) <= 8 and all(5 <= length <= 80 for length, _ in turns)
    True
    """
    random = np.random.default_rng(seed)
    episodes: list[Episode] = []
    opening: list[int] = []
    for number in range(count):
        if number % GROUP == 0:
            opening = random.integers(2, vocab, int(random.integers(60, 141))).tolist()
        turns = [
            (int(random.integers(5, 81)), random.integers(2, vocab, int(random.integers(5, 61))).tolist())
            for _ in range(int(random.integers(4, 9)))
        ]
        episodes.append((opening, turns))
    return episodes


def make_model(size: str, folder: Path) -> None:
    """Random weights, the same for everyone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, heads, kv_heads, vocab = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2 * MAX_CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Player:
    """A contestant's process group, stopped whenever it has nothing to play."""

    def __init__(self, kind: str, folder: Path, dtype: str, *, threads: int) -> None:
        python = ROOT / PYTHONS[kind] / "bin" / "python"
        self.error = "" if python.exists() or kind == "ours" else f"no {PYTHONS[kind]}: make bench-peers"
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process: subprocess.Popen[str] | None = None
        if self.error:
            return
        environment = {
            "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [
                str(python) if python.exists() else os.sys.executable,  # type: ignore[attr-defined]
                *("-m", "benchmarks.generate_peers", kind, str(folder), dtype, str(threads)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={**os.environ, **environment},
            cwd=ROOT,
            start_new_session=True,
            text=True,
        )
        self._read()
        self._signal(signal.SIGSTOP)

    def play(self, episodes: Sequence[Episode], *, warm: bool = False) -> tuple[float, Probe] | None:
        """Sampled tokens per second and one reply, or None if it cannot, for the reason in `error`."""
        if self.error or self._process is None or self._process.stdin is None:
            return None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"episodes": episodes, "warm": warm}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        wanted = sum(length for _, turns in episodes for length, _ in turns)
        if not self.error and answer["sampled"] != wanted:
            raise RuntimeError(f"{answer['sampled']} tokens sampled of {wanted}")
        return None if self.error else (wanted / answer["seconds"], answer["probe"])

    def close(self) -> None:
        """End it and all it has started."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _read(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._words.seek(0)
            said = self._words.read().decode(errors="replace").strip().splitlines()
            self.error = said[-1][:200] if said else "it ended without a word"
            return None
        return json.loads(line)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number) if self._process else None


@contextmanager
def players(arguments: argparse.Namespace, folder: Path, dtype: str) -> Iterator[dict[str, Player]]:
    with ExitStack() as stack:
        found = {}
        for kind in arguments.contestants:
            CONSOLE.print(f"starting {LABELS[kind]}, {dtype}")
            found[kind] = Player(kind, folder, dtype, threads=arguments.threads)
            stack.callback(found[kind].close)
        yield found


def check(player: Player, probe: Probe, folder: Path, dtype: str) -> float:
    """Mean difference of a reply's log-probabilities from the plain forward pass. A contestant far off is left out."""
    import torch
    from transformers import AutoModelForCausalLM

    context, tokens, logp = probe
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([[*context, *tokens]]))
    own = logits.logits[0, len(context) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    error = float((own - torch.tensor(logp)).abs().mean())
    if not error < TOLERANCE[dtype]:
        player.error = f"log-probabilities are off by {error:.2g}: it runs another model"
    return error


def measure(arguments: argparse.Namespace, size: str, dtype: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Rows of the table for one model, and the figures by concurrency and contestant."""
    lines, found = [], {}
    vocab = SIZES[size][4]
    with players(arguments, folder, dtype) as each:
        errors = {}
        for count in arguments.episodes:
            for kind, player in each.items():
                CONSOLE.print(f"{size} {dtype} {count}: warming {kind}")
                answer = player.play(workload(count, vocab, seed=1000), warm=True)
                if answer and kind not in errors:
                    errors[kind] = check(player, answer[1], folder, dtype)
            able = {kind: player for kind, player in each.items() if not player.error}
            rounds = {kind: partial(_rate, player, _seeds(count, vocab)) for kind, player in able.items()}
            found[count] = alternate(rounds, arguments.repeats if count < MANY else arguments.wide_repeats)
            for kind, player in each.items():
                lines.append(_line((size, dtype, count), kind, found[count], player.error, errors.get(kind)))
    return lines, found


MANY = 256


def _seeds(count: int, vocab: int) -> Callable[[], list[Episode]]:
    """Another workload in every round, the same for each contestant."""
    seeds = iter(range(10**6))
    return lambda: workload(count, vocab, next(seeds))


def _rate(player: Player, episodes: Callable[[], list[Episode]]) -> float:
    answer = player.play(episodes())
    if answer is None:
        raise RuntimeError(player.error)
    return answer[0]


def _line(what: tuple[str, str, int], kind: str, found: dict[str, list[float]], error: str, off: float | None) -> str:
    if kind not in found:
        return row(*what, LABELS[kind], f"not run: {error}", "", "", "")
    ratio, goal = ["", ""]
    if kind != "ours" and "ours" in found:
        shares = ratios(found, "ours", over=kind)
        ratio, goal = spread(shares), verdict(shares, GOALS[kind])
    return row(*what, LABELS[kind], spread(found[kind], "{:,.0f}"), ratio, goal, f"{off:.1e}")


def own_growth(figures: dict[str, dict[int, dict[str, list[float]]]]) -> list[str]:
    """What four times as many episodes give, round by round as far as both were played."""
    lines = ["", *columns("model", "ours at 256 over ours at 64", f"goal {WIDER:g}")]
    for name, found in figures.items():
        if {64, 256} <= found.keys() and all("ours" in found[count] for count in (64, 256)):
            both = zip(found[256]["ours"], found[64]["ours"], strict=False)
            shares = [wide / narrow for wide, narrow in both]
            lines.append(row(name, spread(shares), verdict(shares, WIDER)))
    return lines if len(lines) > 3 else []


def draw(figures: dict[str, dict[int, dict[str, list[float]]]]) -> None:
    """A panel for each model, bars for each contestant by concurrency."""
    with picture("generate", width=3.6 * len(figures) + 1, height=3.4, panels=len(figures)) as axes:
        for axis, (name, found) in zip(axes if len(figures) > 1 else [axes], figures.items(), strict=True):
            kinds = [kind for kind in LABELS if any(kind in of for of in found.values())]
            for place, kind in enumerate(kinds):
                shown = [(at, of[kind]) for at, of in enumerate(found.values()) if kind in of]
                middle = [median(rates) for _, rates in shown]
                low = [m - min(rates) for m, (_, rates) in zip(middle, shown, strict=True)]
                high = [max(rates) - m for m, (_, rates) in zip(middle, shown, strict=True)]
                where = [at + (place - (len(kinds) - 1) / 2) * 0.2 for at, _ in shown]
                axis.bar(where, middle, 0.19, label=LABELS[kind], yerr=(low, high), error_kw={"linewidth": 0.8})
            axis.set_xticks(range(len(found)), [str(count) for count in found])
            axis.set_xlabel("concurrent episodes")
            axis.set_title(name, fontsize=10)
        first = axes[0] if len(figures) > 1 else axes
        first.set_ylabel("sampled tokens/s")
        first.legend(fontsize=7, frameon=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "5M"])
    parser.add_argument("--episodes", nargs="+", type=int, default=[16, 64, 256], help="live at once")
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=["float32"])
    parser.add_argument("--contestants", nargs="+", choices=LABELS, default=["ours", "generate", "vllm"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wide-repeats", type=int, default=2, help=f"with {MANY} episodes or more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and nothing written: seconds")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.smoke:
        arguments.sizes, arguments.episodes, arguments.repeats = ["tiny"], [4], 1
    lines = columns("model", "precision", "episodes", "engine", "sampled tokens/s", "ours over it", "goal", "log D")
    figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.sizes:
            folder = Path(scratch, size)
            make_model(size, folder)
            for dtype in arguments.dtypes:
                rows, figures[f"{size}, {dtype}"] = measure(arguments, size, dtype, folder)
                lines += rows
                CONSOLE.print("\n".join(rows), markup=False)
    if arguments.smoke:
        return
    about = (
        f"{arguments.threads} threads each; every episode has 4 to 8 turns, replies of 5 to 80 tokens, tool results of "
        f"5 to 60, {GROUP} share an opening of 60 to 140; all begin at once and none is replaced. `generate` plays in "
        "rounds of 1, 2 or 4 batches, whichever is best. `log D`: mean difference of one reply's log-probabilities "
        "from the plain float32 forward pass. Medians (range)."
    )
    write("generate", "Sampled tokens per second", [about, "", *lines, *own_growth(figures)])
    draw(figures)


if __name__ == "__main__":
    main()
