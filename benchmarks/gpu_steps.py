"""Train a run and record how long each part of its steps takes, for `benchmarks.gpu_check`.

    python -m benchmarks.gpu_steps FOLDER unstale-train-words...   # FOLDER gets the seconds

The run is a real one. Its methods are replaced by ones that also note their seconds, in the process
of the run and in each trainer rank. A part does not contain the seconds of parts inside it. On a
GPU each part waits until its work is done, so that a step takes a little longer. Checkpoints are
not written.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from unstale.builders import ranked
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.cluster.ranks_worker import Rank
from unstale.config import RunConfig
from unstale.durability.checkpoint import Checkpoint, Checkpoints
from unstale.engines.pool import EnginePool
from unstale.engines.remote import RemoteEngine
from unstale.model.peers import RankGroup
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.trainer.local import LocalTrainer
from unstale.trainer.loss import Loss
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import VersionStore

PROFILED = 2
"""The step, from 0, whose communication is profiled. It is not one of those that are reported."""
TRAINER: tuple[tuple[Any, str, str], ...] = (
    (LocalTrainer, "prepare", "prepare"),
    (LocalScorer, "score", "score"),
    (VersionStore, "move_to", "move"),
    (VersionStore, "begin_put", "put"),
    (VersionStore, "begin_keep", "put"),
    (VersionStore, "wait", "put"),
    (Loss, "of", "forward"),
    (torch.Tensor, "backward", "backward"),
    (LocalTrainer, "backward", "backward"),
    (LocalTrainer, "step", "optimizer"),
    (DirectPublisher, "begin", "encode"),
    (Rank, "publish", "encode"),
    (RankedTrainer, "advance", "apply"),
)
"""Methods in the trainer's thread of each process: the class, its method, and the part."""
ENGINES: tuple[tuple[Any, str, str], ...] = (
    (EnginePool, "interrupt", "interrupt"),
    (EnginePool, "load", "load"),
    (EnginePool, "stage", "stage"),
    (RemoteEngine, "_probe", "probe"),
)
"""Methods in the event loop, which may wait for others."""


class Parts:
    """The seconds of the parts of each step, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
        """The number of optimizer steps that this process has taken."""
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._open = threading.local()

    def note(self, part: str, seconds: float) -> None:
        row = {"step": self.step, "part": part, "s": seconds, "at": time.time()}
        self._file.write(json.dumps(row) + "\n")

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that notes its seconds without those of parts inside."""

        @wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            stack = self._open.__dict__.setdefault("stack", [])
            _settle()
            began = time.perf_counter()
            stack.append(0.0)
            try:
                return call(*args, **options)
            finally:
                _settle()
                seconds = time.perf_counter() - began
                self.note(part, seconds - stack.pop())
                if stack:
                    stack[-1] += seconds

        return run

    def awaited(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a coroutine function that notes its seconds, with all that it waits for."""

        @wraps(call)
        async def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*args, **options)
            finally:
                self.note(part, time.perf_counter() - began)

        return run

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer step after which the next step's parts are noted."""

        @wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            self.note("end", torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
            self.step += 1
            return result

        return run

    def profiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a pass of a minibatch that is profiled in one step, for its communication."""

        @wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            (trainer, *_) = args
            if self.step != PROFILED or trainer.policy.peers.count < 2:
                return call(*args, **options)
            with profile(activities=_activities()) as found:
                began = time.perf_counter()
                result = call(*args, **options)
                _settle()
                seconds = time.perf_counter() - began
            self.note("exposed", min(1.0, exposed_s(found.events()) / seconds))
            return result

        return run


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()


def parity(reply: str, row: Mapping[str, Any]) -> float:
    """Return a reward that differs among the replies of a group, so that each has a gradient."""
    return float(sum(map(ord, reply)) % 2)


def exposed_s(events: Sequence[Any]) -> float:
    """Return the seconds of communication during which the device does not compute.

    On a GPU these are NCCL's kernels, without the time of other kernels. On a CPU the process waits
    for gloo.
    """
    on_gpu = [each for each in events if each.device_type.name == "CUDA"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for each in on_gpu or events:
        sends = "nccl" in each.name.lower() if on_gpu else each.name.startswith("gloo:")
        if sends or on_gpu:
            spans[sends].append((each.time_range.start, each.time_range.end))
    both = _union(spans[True] + spans[False])
    return (both - _union(spans[False])) / 1e6


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of some spans.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _settle() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def install(folder: Path) -> None:
    """Replace the methods of this process by ones that note their seconds in `folder`."""
    parts = Parts(folder)
    LocalTrainer.backward = parts.profiled(LocalTrainer.backward)  # type: ignore[method-assign]
    for owner, name, part in TRAINER:
        setattr(owner, name, parts.timed(getattr(owner, name), part))
    for owner, name, part in ENGINES:
        setattr(owner, name, parts.awaited(getattr(owner, name), part))
    for trainer in (LocalTrainer, RankedTrainer):
        trainer.step = parts.counted(trainer.step)  # type: ignore[method-assign]
    Checkpoints.write = _unwritten  # type: ignore[method-assign]
    Checkpoints.prune = lambda self, known=None: {}  # type: ignore[method-assign]


def _unwritten(self: Checkpoints, checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint that is not written."""
    return f"step{checkpoint.progress.step:06d}-version{checkpoint.version:06d}"


def measured_rank(folder: Path, config: RunConfig, peers: RankGroup) -> Rank:
    """Return one trainer rank, whose parts are noted in `folder`."""
    make = ranked.build_rank
    if not getattr(LocalTrainer, "is_measured", False):
        LocalTrainer.is_measured = True  # type: ignore[attr-defined]
        install(folder)
    return make(config, peers)


@dataclass(frozen=True, slots=True)
class Budget:
    """Mean seconds of the parts of a step."""

    step_s: float
    trainer: Mapping[str, float]
    """Parts in the trainer's thread of one trainer process."""
    engines: Mapping[str, float]
    """Parts of a publication in the run's own process, with the driver's part of it."""
    exposed: float
    """Share of the passes that waits for communication between ranks."""
    peak: float
    """Largest memory of the trainer in bytes. 0 without a GPU."""


def read(folder: Path, warm: int) -> Budget:
    """Return the mean parts of the steps after the first `warm`.

    Raises RuntimeError without any.
    """
    files = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]
    trainers = [rows for rows in files if any(row["part"] == "forward" for row in rows)]
    drivers = [rows for rows in files if any(row["part"] == "load" for row in rows)]
    if not trainers or not drivers:
        raise RuntimeError("the run noted no parts of its steps")
    ends = [row["at"] for row in trainers[0] if row["part"] == "end"]
    if len(ends) <= warm:
        raise RuntimeError(f"the run took {len(ends)} steps, and {warm} are not measured")
    steps = len(ends) - warm
    own = {part for _, _, part in ENGINES} | ({"encode", "apply"} if len(files) > 1 else set())
    return Budget(
        step_s=(ends[-1] - ends[warm - 1]) / steps,
        trainer=_means(trainers[0], warm, steps, leave=own if len(files) == 1 else set()),
        engines={name: s for name, s in _means(drivers[0], warm, steps).items() if name in own},
        peak=max(row["s"] for row in trainers[0] if row["part"] == "end"),
        exposed=next((row["s"] for row in trainers[0] if row["part"] == "exposed"), 0.0),
    )


def _means(
    rows: Sequence[Mapping[str, Any]], warm: int, steps: int, leave: Collection[str] = ()
) -> dict[str, float]:
    """Return the seconds of each part per step, over `steps` steps."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        counts = warm <= row["step"] < warm + steps and row["part"] not in ("end", "exposed")
        if counts and row["part"] not in leave:
            sums[row["part"]] += row["s"]
    return {part: total / steps for part, total in sums.items()}


def main() -> None:
    folder, *words = sys.argv[1:]
    install(Path(folder))
    ranked.build_rank = partial(measured_rank, Path(folder))
    from unstale.cli.main import main as unstale

    unstale(words)


if __name__ == "__main__":
    from benchmarks import gpu_steps  # ranks import its functions by this name, not as __main__

    gpu_steps.main()
