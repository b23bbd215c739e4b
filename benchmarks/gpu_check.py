"""Check the GPUs of one machine against the goals for trainer ranks, engines and runs.

    python -m benchmarks.gpu_check            # all GPUs of this machine; nothing is downloaded
    python -m benchmarks.gpu_check --tiny     # tries the script at tiny sizes, also without GPUs

A Qwen3-shaped model of 4B parameters with random weights in bfloat16. The embedded engine samples
the first batch. Then trainer ranks train: one, two, and all GPUs (at most 8). The table says for
each goal whether it is met. A goal that needs more GPUs than there are is never met. The numbers of
the goals are those of docs/scale-out.md, which also says what is not checked. Goals 3-vllm, 5 and 6
use vLLM where it is installed, and otherwise the embedded engine; they are then open.

Needs the extra `cluster`. Goals 1 and 3 train the whole model on the first GPU, which takes about
140 GB by estimate.
"""

import argparse
import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks import gpu_engines, gpu_runs, publish
from benchmarks.gpu import PROMPT, REPLY, Big, collect
from benchmarks.gpu_engines import Finding
from benchmarks.routes import MIXED, episodes, scored, settle
from benchmarks.tables import CONSOLE, columns, row, write
from unstale.analysis.planner.analytic import PASS_TOKENS, TrainingSetup
from unstale.analysis.planner.hardware import DEVICES, Shares
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.workload import EpisodeStats
from unstale.builders import build_rank
from unstale.cluster.ranks import Ranks
from unstale.cluster.ranks_worker import Rank
from unstale.cluster.session import end_after
from unstale.config import (
    ClusterConfig,
    CorrectionConfig,
    ObjectiveConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.model.peers import RankGroup
from unstale.model.sharding import local
from unstale.records import (
    Batch,
    ContextPiece,
    ScoredTrajectory,
    collate,
)
from unstale.weights.bits import checksum

RATE = 1e-6
STEPS = 20
WARM = 2
"""Steps that are not timed. The first makes the optimizer's state, both make kept versions."""
MAX_RANKS = 8
TINY = Model(2, 64, 128, 4, 2, name="tiny", head_dim=16, vocab=256, tied=True)
TINY_STEPS = 4
LENGTH = 1024
"""Number of tokens of a trajectory."""
FAILURES = (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired, ExceptionGroup)
"""Errors that end the check of one goal. An out-of-memory error is one of the first kind."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The measurements of ranks that trained. Lists have one number for each step."""

    losses: list[float]
    grad_norms: list[float]
    exact: float
    """The smallest share of tokens of a step whose old log-probabilities are exact."""
    log_d: float
    """Mean absolute log-discrepancy of the first batch, which the engine sampled."""
    tokens_per_s: list[float]
    """Trained tokens per second, of all ranks together."""
    publish_s: list[float]
    """Seconds of the trainer's thread for the route to keep a new version."""
    restore_s: list[float]
    """Seconds to restore one version, mean over the versions of a step."""
    peak_bytes: int
    """Largest memory of a rank after the first step. 0 without CUDA."""
    checksums: tuple[str, ...]
    """Checksums of the trained weights, in float32, rank by rank."""


@dataclass(frozen=True, slots=True)
class CheckedRank:
    """A trainer rank that measures its steps."""

    rank: Rank

    def learn(self, size: Big, first: Sequence[ScoredTrajectory], steps: int) -> Learned:
        """Train on the batch `first`, and then on random tokens of the last three versions."""
        policy, trainer = self.rank.policy, self.rank.trainer
        metrics, tokens_per_s, publish_s, restore_s = [], [], [], []
        for version in range(steps):
            policy.version = version
            began = clock()
            trainer.old.before_publish()
            trainer.old.on_published(range(max(0, version - 2), version + 1))
            publish_s.append(clock() - began)
            batch = lopsided(collate(first if version == 0 else random_batch(size, version)))
            minibatches = trainer.prepare(batch)
            began = clock()
            for minibatch in minibatches:
                trainer.backward(minibatch)
                trainer.step()
            tokens_per_s.append(len(batch.tokens) / (clock() - began))
            metrics.append(trainer.metrics())
            older = batch.version[batch.sampled & (batch.version < version)].unique()
            restore_s.append(metrics[-1]["old_logps/restore_s"] / max(1, len(older)))
            if version == 0 and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        weights = trainer.state()["weights"]
        mine = checksum({name: local(tensor).cpu() for name, tensor in weights.items()})
        peers = policy.peers
        return Learned(
            losses=[each["objective/loss"] for each in metrics],
            grad_norms=[each["trainer/grad_norm"] for each in metrics],
            exact=min(each["old_logps/exact_share"] for each in metrics),
            log_d=metrics[0]["correction/log_d_abs_mean"],
            tokens_per_s=tokens_per_s,
            publish_s=publish_s,
            restore_s=restore_s,
            peak_bytes=max(peers.gather(peak)),
            checksums=tuple(peers.gather(mine)),
        )

    def close(self) -> None:
        self.rank.close()


def clock() -> float:
    """Return the time in seconds, when the GPU has done all its work."""
    settle()
    return time.perf_counter()


def random_batch(size: Big, version: int) -> list[ScoredTrajectory]:
    return episodes(size, MIXED, version=version, first=version * size.sequences)


def lopsided(batch: Batch) -> Batch:
    """Return a batch whose negative advantages are halved.

    The loss is then far from 0, so that its relative error means something.
    """
    advantage = batch.advantage
    return replace(batch, advantage=torch.where(advantage < 0, advantage / 2, advantage))


def rank_config(size: Big, count: int, steps: int) -> RunConfig:
    """Return the configuration of trainer ranks. It has no correction: no token is dropped."""
    return RunConfig(
        recipe="",
        model=str(size.folder),
        max_steps=steps,
        correction=CorrectionConfig(mode="none", token_veto_threshold=0.0),
        objective=ObjectiveConfig(loss_type="none"),
        trainer=TrainerConfig(dtype="bfloat16", lr=RATE, warmup_steps=0, **size.options),
        cluster=ClusterConfig(trainers=count),
    )


def make_rank(config: RunConfig, peers: RankGroup) -> CheckedRank:
    return CheckedRank(build_rank(config, peers))


async def sample_batch(size: Big) -> list[ScoredTrajectory]:
    """Return a batch of replies that the embedded engine sampled with the initial weights."""
    reply = min(REPLY, size.length - PROMPT)
    options = EngineOptions(size.folder, max_running=size.sequences, max_context=2 * size.length)
    engine = EmbeddedEngine(options)
    prompts = [
        tuple((31 * number + place) % size.vocab for place in range(PROMPT))
        for number in range(size.sequences)
    ]
    try:
        await engine.start()
        await engine.load(size.policy().weights(), 0)
        await engine.resume()
        replies = await asyncio.gather(
            *(
                engine.sample(prompt, SamplingParams(reply, (), seed=seed))
                for seed, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    pairs = zip(prompts, replies, strict=True)
    return [
        scored((ContextPiece(prompt), sampled.piece), number)
        for number, (prompt, sampled) in enumerate(pairs)
    ]


@dataclass
class Check:
    """The machine and the sizes of the check, and the measurements so far."""

    folder: Path
    """Folder for the model."""
    gpus: int
    is_tiny: bool = False
    """True if the sizes are not those of the goals."""
    sequences: int = 128
    """Number of trajectories in a batch."""
    repeats: int = 3
    """Number of versions that are published."""
    torchtitan: float = 0.0
    """Tokens per second of TorchTitan at the same sizes. 0 if they were not measured."""
    moe: Path | None = None
    """Folder of a trained MoE model. None takes a small one with random weights."""
    policy: Path | None = None
    """Folder of the policy of the long run. None takes the small one of the package."""
    run_options: str = ""
    """More options of the long run, as on the command line."""
    _learned: dict[tuple[int, int], Learned] = field(default_factory=dict, init=False)

    @property
    def model(self) -> Model:
        return TINY if self.is_tiny else PRESETS["4B"]

    @property
    def steps(self) -> int:
        return TINY_STEPS if self.is_tiny else STEPS

    @property
    def length(self) -> int:
        """The number of tokens of a trajectory."""
        return 2 * PROMPT if self.is_tiny else LENGTH

    @property
    def most(self) -> int:
        """The largest number of ranks."""
        return min(MAX_RANKS, self.gpus) if self.gpus else 2

    @cached_property
    def size(self) -> Big:
        """The sizes of model and batch. The folder holds the model, with random weights."""
        CONSOLE.print(f"a random model: {self.model.name}")
        device = "cuda" if self.gpus else "cpu"
        size = make_size(self.model, self.folder, device, self.sequences, self.length)
        size.policy().save(size.folder)
        collect()
        return size

    @cached_property
    def first(self) -> list[ScoredTrajectory]:
        """The first batch, which an engine sampled."""
        CONSOLE.print("sampling a batch")
        batch = asyncio.run(sample_batch(self.size))
        collect()
        return batch

    def can_measure(self, goal: "Goal") -> bool:
        """Return True if there is something to measure here. Ranks never share a GPU."""
        return self.gpus >= goal.least if self.gpus else self.is_tiny

    def learn(self, count: int, *, turn: int = 1) -> Learned:
        """Return the measurements of `count` ranks. They train once for each `turn`."""
        if (count, turn) not in self._learned:
            size, first = self.size, self.first
            CONSOLE.print(f"training on {count} rank{'s' * (count > 1)}")
            ranks = Ranks(count)
            try:
                ranks.make(partial(make_rank, rank_config(size, count, self.steps)))
                found = ranks.call("learn", size, first, self.steps)
            finally:
                ranks.close()
            self._learned[count, turn] = found
        return self._learned[count, turn]


def same_step(check: Check) -> Finding:
    """Compare two ranks with one.

    At this learning rate the loss hardly depends on the weights, but the gradient does.
    """
    one, two = check.learn(1), check.learn(2)
    loss = largest_difference(one.losses, two.losses)
    gradient = largest_difference(one.grad_norms, two.grad_norms)
    log_d = largest_difference([one.log_d], [two.log_d])
    exact = min(one.exact, two.exact)
    return Finding(
        f"loss {loss:.1e}, gradient norm {gradient:.1e}; exact share {exact:g}; "
        f"mean of abs log D {two.log_d:.5f}, on one rank {one.log_d:.5f}",
        loss <= 1e-3 and gradient <= 0.01 and exact == 1.0 and log_d <= 0.01,
    )


def largest_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Return the largest relative difference.

    >>> largest_difference([-1.0, 2.0], [-1.0, 2.5])
    0.25
    """
    pairs = zip(expected, found, strict=True)
    return max(abs(one - other) / abs(one) for one, other in pairs)


def passes(check: Check) -> Finding:
    """Compare the speed of the passes with TorchTitan's, and the memory with the planner's."""
    count = check.most
    found = check.learn(count)
    rate = median(found.tokens_per_s[WARM:])
    planned = planned_bytes(check, count)
    is_memory_met = abs(found.peak_bytes / planned - 1) <= 0.1
    peak = f"{found.peak_bytes / 1e9:.1f}" if found.peak_bytes else "unknown (needs CUDA)"
    figure = (
        f"{rate:,.0f} tokens/s on {count} ranks; peak GB {peak}, as planned {planned / 1e9:.1f}"
    )
    if check.torchtitan:
        figure += f"; TorchTitan {check.torchtitan:,.0f} tokens/s"
        return Finding(figure, is_memory_met and rate >= 0.9 * check.torchtitan)
    is_installed = find_spec("torchtitan") is not None
    peer = "give --torchtitan TOKENS_PER_S" if is_installed else "no peer installed"
    return Finding(figure, is_memory_met, open=peer)


def planned_bytes(check: Check, count: int) -> float:
    """Return the bytes that `unstale plan` counts for each rank."""
    length = check.length
    setup = TrainingSetup(
        model=check.model,
        device=DEVICES["H100"],  # its figures do not change the number of bytes
        shares=Shares(),
        lr=RATE,
        episodes=EpisodeStats(length, length / 2, length, PROMPT),
        gradient_checkpointing=True,
    )
    return setup.trainer_bytes(count, route_cost("snapshot_old"))


def publication(check: Check) -> Finding:
    """Measure the standstill of embedded engines, and the bytes of a delta."""
    (cell,) = asyncio.run(publish.measure(check.model.name, check.size, [RATE], check.repeats))
    collect()
    standstill = {way: median(cell.spent[way].standstill_s) for way in publish.WAYS}
    share = median(cell.over("bytes"))
    return Finding(
        f"standstill {standstill['full']:.2f} s for whole weights, {standstill['delta']:.2f} s for "
        f"a delta; a delta is {share:.2%} of a copy",
        max(standstill.values()) <= 2.0 and share <= 0.03,
    )


def kept_versions(check: Check) -> Finding:
    """Measure how long ranks restore and keep versions."""
    found = check.learn(check.most)
    restore, kept = max(found.restore_s[WARM:]), max(found.publish_s[WARM:])
    return Finding(
        f"on {check.most} ranks, restored in at most {restore:.2f} s, kept in at most {kept:.2f} s",
        restore <= 0.5 and kept <= 0.5,
    )


def determinism(check: Check) -> Finding:
    """Train twice, and compare the weights bit for bit."""
    one, two = (check.learn(check.most, turn=turn) for turn in (1, 2))
    is_same = one.checksums == two.checksums and one.losses == two.losses
    result = "bitwise equal" if is_same else "differ"
    return Finding(f"weights and losses of {check.most} ranks: {result}", is_same)


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, with the number of GPUs that it needs."""

    name: str
    text: str
    gpus: int
    measure: Callable[[Check], Finding]
    least: int = 2
    """The number of GPUs with which something is measured."""


GOALS = (
    Goal(
        "1",
        "2 ranks train as 1 in 20 steps: loss within 0.1%, gradient norm and abs log D within 1%, "
        "exact share 1",
        4,
        same_step,
    ),
    Goal(
        "2",
        "90% of the tokens/s of TorchTitan's FSDP2; peak memory within 10% of `unstale plan`",
        2,
        passes,
    ),
    Goal("3", "standstill <= 2 s; a delta <= 3% of a copy at lr 1e-6", 1, publication, 1),
    Goal(
        "3-vllm",
        "standstill of vLLM <= 2 s with weights in a file, and not longer by NCCL",
        2,
        gpu_engines.transfers,
        1,
    ),
    Goal(
        "4",
        "`snapshot_old` on 8 ranks: a version restored in 0.5 s, and kept in 0.5 s",
        8,
        kept_versions,
    ),
    Goal(
        "5",
        "replayed routes at least halve the p99 of abs log D with vLLM, at 95% of its speed",
        1,
        gpu_engines.replay,
        1,
    ),
    Goal(
        "6",
        "a killed rank, raylet, engine host and vLLM process: back within 60 s and a start, "
        "nothing lost or trained twice (simulated nodes)",
        1,
        gpu_runs.deaths,
        1,
    ),
    Goal(
        "7",
        "500 steps of 30B-A3B on 64 GPUs: memory grows by < 1 GB/h, tokens/s within 20% of "
        "`unstale plan`",
        64,
        gpu_runs.endurance,
        1,
    ),
    Goal("8", "two runs of 20 steps with the same ranks are bitwise equal", 2, determinism),
)


def verdict(goal: Goal, check: Check, finding: Finding | None) -> str:
    """Return whether a goal is met, missed or open, with the reason if it is open.

    `finding` is None if nothing was measured.
    """
    result = "not measured" if finding is None else "met" if finding.met else "missed"
    if check.gpus < goal.gpus:
        here = "" if check.is_tiny or finding is None else f" ({result} on {check.gpus})"
        return f"open: needs {goal.gpus} GPU{'s' * (goal.gpus > 1)}{here}"
    if check.is_tiny:
        return "open: the sizes are not those of the goal"
    if finding is None:
        return "open: not measured"
    if finding.met and finding.open:
        return f"open: {finding.open}"
    return result


def judge(goal: Goal, check: Check) -> str:
    """Measure what this machine can measure for a goal. Return its row of the table."""
    finding, figure = None, "-"
    if check.can_measure(goal):
        CONSOLE.print(f"goal {goal.name}: {goal.text}")
        try:
            finding = goal.measure(check)
            figure = finding.figure
        except FAILURES as error:
            CONSOLE.print_exception()
            figure = (
                f"**Broke off:** {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            )
    result = verdict(goal, check, finding)
    CONSOLE.print(f"goal {goal.name}: {result}", markup=False)
    return row(goal.name, goal.text, figure, result)


def make_size(model: Model, folder: Path, device: str, sequences: int, length: int) -> Big:
    """Return a model of this shape, which is not written yet, with the sizes of a batch."""
    return Big(
        folder / model.name,
        model.layers,
        model.hidden,
        model.vocab,
        sequences,
        length,
        1,
        device,
        model.ffn,
        model.heads,
        model.kv_heads,
        model.head_dim,
        PASS_TOKENS,
        {"gradient_checkpointing": True},
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, also on CPUs; no goal is judged"
    )
    names = [goal.name for goal in GOALS]
    parser.add_argument("--goals", nargs="+", choices=names, default=names)
    parser.add_argument("--sequences", type=int, default=128, help="trajectories in a batch")
    parser.add_argument("--repeats", type=int, default=3, help="versions published for goal 3")
    parser.add_argument(
        "--torchtitan",
        type=float,
        default=0.0,
        metavar="TOKENS_PER_S",
        help="speed of TorchTitan at these sizes on as many GPUs, measured by you",
    )
    parser.add_argument("--moe", type=Path, help="folder of a trained MoE model, for goal 5")
    parser.add_argument("--model", type=Path, help="folder of the policy for goal 7")
    parser.add_argument(
        "--run-options", default="", help="more options of `unstale train` for goal 7, in quotes"
    )
    return parser.parse_args(words)


@end_after()
def main(words: Sequence[str] | None = None) -> Path:
    chosen = arguments(words)
    began, gpus = time.monotonic(), torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(
            Path(folder),
            gpus,
            is_tiny=chosen.tiny,
            sequences=4 if chosen.tiny else chosen.sequences,
            repeats=1 if chosen.tiny else chosen.repeats,
            torchtitan=chosen.torchtitan,
            moe=chosen.moe,
            policy=chosen.model,
            run_options=chosen.run_options,
        )
        rows = [judge(goal, check) for goal in GOALS if goal.name in chosen.goals]
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "a machine without GPUs"
    model = check.model
    head = [
        f"On {device}; {(time.monotonic() - began) / 60:.1f} minutes. Random weights of the shape "
        f"{model.name}; {check.sequences} trajectories a step.",
        "Not checked: machines that are apart, a pulled cable, SGLang (docs/scale-out.md).",
        "",
    ]
    title = "Ranks, engines and runs on GPUs" + ", tiny sizes" * chosen.tiny
    table = [*columns("goal", "wanted", "measured", "verdict"), *rows]
    return write("gpu-check" + "-tiny" * chosen.tiny, title, [*head, *table])


if __name__ == "__main__":
    from benchmarks import gpu_check  # ranks import the classes by this name, not as __main__

    gpu_check.main()
