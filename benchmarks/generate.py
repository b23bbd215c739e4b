"""Compare the sampled tokens per second of the embedded engine, transformers and vLLM.

All engines play the same episodes of several turns at temperature 1: the same lengths of replies,
and the same tool results, which cost no time. A number of episodes is played at the same time, and
one that ends is replaced by the next. Each engine is a process that is stopped while another one is
measured.
"""

import argparse
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.generate_peers import GROUP, MAX_CONTEXT, Episode, Probe, shortened
from benchmarks.tables import (
    CONSOLE,
    OURS,
    alternate,
    columns,
    environ,
    peers,
    picture,
    ratios,
    row,
    spread,
    verdict,
    write,
    written_today,
)

ROOT = Path(__file__).parents[1]
SIZES = {
    "tiny": (2, 64, 2, 1, 128),
    "1M": (4, 128, 4, 2, 1024),
    "5M": (6, 256, 8, 4, 2048),
    "20M": (8, 448, 14, 7, 4096),
}
"""Layers, hidden size, heads, key-value heads, vocabulary; each head has 32 dimensions."""
_WINDOW = 128
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3": {"model_type": "qwen3"},
    "Llama": {"model_type": "llama"},
    "Mistral": {"model_type": "mistral", "sliding_window": _WINDOW},
    "Gemma 2": {"model_type": "gemma2", "sliding_window": _WINDOW},
    "Gemma 3": {"model_type": "gemma3_text", "sliding_window": _WINDOW},
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
    },
}
"""What each architecture adds to the configuration. Windows are shorter than most contexts."""
LABELS = {
    "ours": "ours",
    "ours-threads": "ours, one process",
    "generate": "transformers generate",
    "generate-divided": "transformers generate, divided",
    "continuous": "transformers continuous batching",
    "vllm": "vLLM (CPU build), compiled",
    "vllm-divided": "vLLM (CPU build), compiled, divided",
    "eager": "vLLM (CPU build), eager",
}
PYTHONS = {
    "ours": ".venv",
    "ours-threads": ".venv",
    "generate": ".venv-peers",
    "generate-divided": ".venv-peers",
    "continuous": ".venv-peers",
    "vllm": ".venv-engines",
    "vllm-divided": ".venv-engines",
    "eager": ".venv-engines",
}
LIVE = dict.fromkeys(LABELS, (64,)) | {"ours": (64, 16, 256), "continuous": (16,)}
"""Concurrent episodes by default. Continuous batching takes a minute for 64."""
GOALS = {
    "generate": 2.0,
    "generate-divided": 2.0,
    "continuous": 1.5,
    "vllm": 2.5,
    "vllm-divided": 2.5,
    "eager": 2.5,
}
"""The lowest goals, which hold for every size and precision. Over vLLM the goal is 3 for 1M, and 4
in bfloat16.
"""
WIDER = 1.6
"""Goal for our tokens per second with 256 concurrent episodes, over those with 64."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats: a larger mean difference from a plain float32 forward pass means another model."""


TURNS, REPLY, RESULT, OPENING = (2, 4), (5, 80), (5, 60), (60, 140)
"""The smallest and largest number of turns, and of tokens of a reply, tool result or prompt."""
Figures = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by model, then by contestant and concurrent episodes."""


def workload(live: int, vocab: int, seed: int) -> list[Episode]:
    """Return random episodes, a quarter more than are played at the same time (`live`).

    >>> episodes = workload(4, 100, seed=0)
    >>> opening, turns = episodes[0]
    >>> len(episodes), 60 <= len(opening) <= 140, 2 <= len(turns) <= 4
    (5, True, True)
    >>> all(5 <= length <= 80 for length, _ in turns)
    True
    """
    random = np.random.default_rng(seed)

    def count(bounds: tuple[int, int]) -> int:
        return int(random.integers(*bounds, endpoint=True))

    episodes: list[Episode] = []
    opening: list[int] = []
    for number in range(live + live // 4):
        if number % GROUP == 0:
            opening = random.integers(2, vocab, count(OPENING)).tolist()
        turns = [
            (count(REPLY), random.integers(2, vocab, count(RESULT)).tolist())
            for _ in range(count(TURNS))
        ]
        episodes.append((opening, turns))
    return episodes


def make_model(size: str, folder: Path, architecture: str = "Qwen3") -> None:
    """Save a model of random weights, the same for all contestants."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    layers, hidden, heads, kv_heads, vocab = SIZES[size]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2 * MAX_CONTEXT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        }
        | ARCHITECTURES[architecture]
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class Player:
    """The processes of one contestant. They are stopped while another contestant is measured."""

    def __init__(
        self, kind: str, folder: Path, *, arguments: argparse.Namespace, dtype: str
    ) -> None:
        python = ROOT / PYTHONS[kind] / "bin" / "python"
        self.error = (
            ""
            if python.exists() or kind.startswith("ours")
            else f"no {PYTHONS[kind]}: make env-peers"
        )
        self._limit_s = arguments.limit
        self._cpu_time = arguments.cpu_time
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []
        if self.error:
            return
        threads = str(arguments.threads)
        environment = {
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": str(ROOT),
        }
        self._process = subprocess.Popen(
            [
                str(python) if python.exists() else sys.executable,
                *("-m", "benchmarks.generate_peers", kind, str(folder), dtype, threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=environ(OURS if kind.startswith("ours") else {}) | environment,
            cwd=ROOT,
            start_new_session=True,
        )
        self._groups = [self._process.pid]
        ready = self._read()
        self._groups += ready["pids"] if ready else []
        self._signal(signal.SIGSTOP)

    def play(
        self, episodes: Sequence[Episode], live: int, *, warm: bool = False
    ) -> tuple[float, Probe] | None:
        """Return sampled tokens per second and one reply.

        If the contestant fails, return None and set `error`.
        """
        if self.error or self._process is None or self._process.stdin is None:
            return None
        cpu_start_s = self._cpu_s()
        self._signal(signal.SIGCONT)
        asked = {"episodes": episodes, "live": live, "warm": warm}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        if answer is None:
            return None
        played = shortened(episodes) if warm else episodes
        wanted = sum(length for _, turns in played for length, _ in turns)
        if answer["sampled"] != wanted:
            raise RuntimeError(f"{answer['sampled']} tokens sampled of {wanted}")
        took_s = self._cpu_s() - cpu_start_s if self._cpu_time else answer["seconds"]
        return wanted / took_s, answer["probe"]

    def _cpu_s(self) -> float:
        """Return the CPU time of all live processes of this contestant since their start."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) in self._groups:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Kill the process and its children."""
        self._signal(signal.SIGKILL)
        self._groups = []
        process, self._process = self._process, None
        if process is not None:
            process.communicate()
        self._words.close()

    def _read(self) -> Any:
        """Return the contestant's next line. If there is none, return None and set `error`."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit_s)[0]:
            self.error = f"no answer within {self._limit_s:g} s"
            self.close()
            return None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        self.error = said[-1][:200] if said else "it ended without a word"
        self.close()
        return None

    def _signal(self, number: int) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)


@contextmanager
def players(arguments: argparse.Namespace, folder: Path, dtype: str) -> Iterator[dict[str, Player]]:
    with ExitStack() as stack:
        found = {}
        for kind in arguments.contestants:
            CONSOLE.print(f"starting {LABELS[kind]}, {dtype}")
            found[kind] = Player(kind, folder, arguments=arguments, dtype=dtype)
            stack.callback(found[kind].close)
        yield found


def check(player: Player, probe: Probe, folder: Path, dtype: str) -> float:
    """Return the mean difference of a reply's log-probabilities from a plain forward pass.

    A contestant with too large a difference is not measured.
    """
    import torch
    from transformers import AutoModelForCausalLM

    context, tokens, logp = probe
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([[*context, *tokens]])
        )
    own = (
        logits.logits[0, len(context) - 1 : -1]
        .log_softmax(-1)
        .gather(1, torch.tensor(tokens)[:, None])[:, 0]
    )
    error = float((own - torch.tensor(logp)).abs().mean())
    if not error < TOLERANCE[dtype]:
        player.error = f"log-probabilities are off by {error:.2g}: it runs another model"
    return error


def measure(
    arguments: argparse.Namespace, what: tuple[str, str], folder: Path
) -> tuple[list[str], dict[str, Any]]:
    """Return the table's rows for one model, and its tokens per second by contestant.

    Raises SystemExit if our engine fails.
    """
    model, dtype = what
    vocab = SIZES[model.split()[-1]][4]
    plays = [
        (kind, live) for kind in arguments.contestants for live in arguments.episodes or LIVE[kind]
    ]
    with players(arguments, folder, dtype) as each:
        errors: dict[str, float] = {}
        for kind, live in plays:
            CONSOLE.print(f"{model} {dtype}: warming {LABELS[kind]}, {live} live")
            answer = each[kind].play(workload(live, vocab, seed=1000), live, warm=True)
            if answer and kind not in errors:
                errors[kind] = check(each[kind], answer[1], folder, dtype)
            _must_play(kind, each[kind])
        rounds = {
            _key(kind, live): partial(_rate, kind, each[kind], _seeds(live, vocab), live=live)
            for kind, live in plays
            if not each[kind].error
        }
        found = alternate(rounds, arguments.repeats)
        found = {name: rates for name, rates in found.items() if not any(map(math.isnan, rates))}
        lines = [
            _line((*what, live), kind, found, each[kind].error, errors.get(kind))
            for kind, live in plays
        ]
    return lines, found


def _key(kind: str, live: int) -> str:
    return f"{kind} {live}"


def _must_play(kind: str, player: Player) -> None:
    if kind.startswith("ours") and player.error:
        raise SystemExit(f"ours: {player.error}")


def _seeds(live: int, vocab: int) -> Callable[[], list[Episode]]:
    """Return a function whose n-th call returns the n-th round's workload."""
    seeds = iter(range(10**6))
    return lambda: workload(live, vocab, next(seeds))


def _rate(kind: str, player: Player, episodes: Callable[[], list[Episode]], *, live: int) -> float:
    """Return tokens per second, or NaN for a contestant that failed."""
    answer = player.play(episodes(), live)
    _must_play(kind, player)
    rate = answer[0] if answer else math.nan
    CONSOLE.print(f"    {rate:,.0f} tokens/s")
    return rate


def _line(
    what: tuple[str, str, int],
    kind: str,
    found: dict[str, list[float]],
    error: str,
    off: float | None,
) -> str:
    live = what[-1]
    if _key(kind, live) not in found:
        return row(*what, LABELS[kind], f"not run: {error}", "", "", "")
    rates, own = found[_key(kind, live)], _key("ours", live)
    ratio, goal = "", ""
    if kind != "ours" and own in found:
        shares = ratios(found, own, over=_key(kind, live))
        ratio, goal = spread(shares), verdict(shares, GOALS[kind]) if kind in GOALS else ""
    return row(*what, LABELS[kind], spread(rates, "{:,.0f}"), ratio, goal, f"{off:.1e}")


def own_growth(figures: Figures) -> list[str]:
    """Return a table of our tokens per second with 256 concurrent episodes, over those with 64."""
    lines = ["", *columns("model", "ours with 256 live over ours with 64", f"goal {WIDER:g}")]
    for name, found in figures.items():
        if {"ours 64", "ours 256"} <= found.keys():
            shares = ratios(found, "ours 256", over="ours 64")
            lines.append(row(name, spread(shares), verdict(shares, WIDER)))
    return lines if len(lines) > 3 else []


def draw(figures: Figures) -> None:
    """Draw a panel for each model, with a bar for each contestant and number of episodes."""
    with picture(
        "generate", width=4.2 * len(figures) + 0.6, height=3.9, panels=len(figures)
    ) as axes:
        panels = axes if len(figures) > 1 else [axes]
        for axis, (name, found) in zip(panels, figures.items(), strict=True):
            played = [tuple(of.split()) for of in found]
            counts = sorted({live for _, live in played}, key=int)
            kinds = [kind for kind in LABELS if any(kind == of for of, _ in played)]
            wide = 0.9 / max(len([1 for _, of in played if of == live]) for live in counts)
            for kind in kinds:
                shown = [live for live in counts if (kind, live) in played]
                beside = {live: [of for of in kinds if (of, live) in played] for live in shown}
                where = [
                    counts.index(live)
                    + wide * (beside[live].index(kind) - (len(beside[live]) - 1) / 2)
                    for live in shown
                ]
                rates = [found[f"{kind} {live}"] for live in shown]
                middle = [median(each) for each in rates]
                error = [[m - min(each) for m, each in zip(middle, rates, strict=True)]]
                error.append([max(each) - m for m, each in zip(middle, rates, strict=True)])
                look = {
                    "label": LABELS[kind],
                    "color": f"C{list(LABELS).index(kind)}",
                    "error_kw": {"linewidth": 0.8},
                }
                axis.bar(where, middle, 0.94 * wide, yerr=error, **look)
            axis.set_xticks(range(len(counts)), counts)
            axis.set_xlabel("live episodes")
            axis.set_title(name, fontsize=10)
        panels[0].set_ylabel("sampled tokens/s")
        named = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(
            *named, loc="outside upper center", ncols=2, fontsize=7, frameon=False
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=ARCHITECTURES,
        default=["Qwen3"],
        help="with others than the default, the table is named generate-architectures, and keeps "
        "today's rows of other models, so that each model can be measured by a separate command",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "5M"])
    parser.add_argument(
        "--episodes",
        nargs="+",
        type=int,
        default=[],
        help=f"live at once, for everyone; else {LIVE}",
    )
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=["float32"])
    parser.add_argument("--contestants", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=150, help="seconds for one start or play of a contestant"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="tokens per second of CPU time, for a machine that other programs load",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and nothing written: seconds"
    )
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.smoke:
        arguments.sizes, arguments.episodes, arguments.repeats = ["tiny"], [4], 1
    lines = columns(
        "model", "precision", "live", "engine", "sampled tokens/s", "ours over it", "goal", "log D"
    )
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        for architecture, size in product(arguments.architectures, arguments.sizes):
            model = f"{architecture} {size}"
            folder = Path(scratch, model)
            make_model(size, folder, architecture)
            for dtype in arguments.dtypes:
                rows, figures[f"{model}, {dtype}"] = measure(arguments, (model, dtype), folder)
                lines += rows
                CONSOLE.print("\n".join(rows), markup=False)
            if not arguments.smoke and arguments.architectures != ["Qwen3"]:
                _write_architectures(arguments, lines)
    if arguments.smoke or arguments.architectures != ["Qwen3"]:
        return
    about = _about(arguments)
    write("generate", "Sampled tokens per second", [about, "", *lines, *own_growth(figures)])
    draw(figures)


def _write_architectures(arguments: argparse.Namespace, lines: Sequence[str]) -> None:
    """Write the table so far, so that a run that is interrupted leaves what it has measured.

    Today's rows of models that are not measured in this run are kept.
    """
    about = (
        " Sliding windows are 128 tokens (Mistral, and some layers of Gemma). The MoE has 8 "
        "experts, of which a token uses 2. Qwen3 runs in its own decoder, the others packed. The "
        "peers from transformers compute Gemma 2 by eager attention, because of its soft caps, and "
        "the others by sdpa."
    )
    if missing := unmeasured(arguments.architectures, arguments.sizes, lines):
        about += f" **Incomplete: {', '.join(missing)} not measured.**"
    question, title = "generate-architectures", "Sampled tokens per second by architecture"
    kept = other_rows(written_today(question), lines[2:])
    if kept:
        about += " Each model had a run of its own, by this command with its name."
    write(question, title, [_about(arguments) + about, "", *lines[:2], *kept, *lines[2:]])


def other_rows(table: str, rows: Sequence[str]) -> list[str]:
    """Return the rows of an earlier table that are of other models than `rows`.

    >>> table = "| model | a |\\n| --- | --- |\\n| Llama 1M | 1 |\\n| M 1M | 2 |"
    >>> other_rows(table, ["| M 1M | 3 |"])
    ['| Llama 1M | 1 |']
    """
    models = {"model", "---", *(line.split(" | ")[0].removeprefix("| ") for line in rows)}
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [line for line in lines if line.split(" | ")[0].removeprefix("| ") not in models]


def unmeasured(
    architectures: Sequence[str], sizes: Sequence[str], lines: Sequence[str]
) -> list[str]:
    """Return the models that have no row in a table.

    >>> unmeasured(["Llama", "Gemma 2"], ["1M"], ["| Llama 1M | float32 |"])
    ['Gemma 2 1M']
    """
    models = [f"{architecture} {size}" for architecture, size in product(architectures, sizes)]
    return [name for name in models if not any(line.startswith(f"| {name} |") for line in lines)]


def _about(arguments: argparse.Namespace) -> str:
    """Return the paragraph above a table: who runs what, and how it is counted."""
    about = (
        f"{arguments.threads} threads each, ours and those `divided` one in each of "
        f"{arguments.threads} processes that share the episodes (`engine.processes`); every "
        f"episode has {_range(TURNS)} turns, replies of {_range(REPLY)} tokens, tool results of "
        f"{_range(RESULT)}, {GROUP} share an opening of {_range(OPENING)}. One that ends is "
        "replaced until a quarter more have begun than are live; tokens and time are those of the "
        "whole play. `generate` plays in rounds of 1, 2 or 4 batches, whichever is best, and "
        f"computes each context anew. Peers are {peers('.venv-peers', 'transformers', 'torch')}, "
        f"and {peers('.venv-engines', 'vllm-cpu', 'torch')}. All contestants of a round play the "
        "same; they take turns in coming first. `log D`: mean difference of a reply's "
        "log-probabilities from the plain float32 forward pass. Medians (range)."
    )
    if arguments.cpu_time:
        about += (
            " **Other programs loaded the machine, so a second is one of CPU time, summed over the "
            "processes of a contestant: only the ratios mean something.**"
        )
    return about


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


if __name__ == "__main__":
    main()
