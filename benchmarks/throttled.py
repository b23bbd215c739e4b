"""Compare a plan with the real loop, whose engine and trainer sleep as long as large weights take.

    python -m benchmarks.throttled          # 12 minutes, hardly any CPU time

A real run trains a tiny model and samples from a fake vLLM server. Each part of a step and of a
publication sleeps for the bytes of 4B on 8 GPUs, or of 30B-A3B on 64, divided by `SCALE`. The same
seconds go through the planner's virtual clock: its formulas give those of a publication from the
bytes and the bandwidth.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from benchmarks.gpu_case import TINY, save_model, write_rows
from benchmarks.standstill import Case, SlowServer, sleeping
from benchmarks.tables import CONSOLE, columns, row, write
from unstale.analysis.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.hardware import DEVICES, Shares
from unstale.analysis.planner.models import PRESETS
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.simulate import Constant, Fleet, Workload, simulate
from unstale.analysis.planner.workload import EpisodeStats
from unstale.cli.main import parse
from unstale.cli.recipe_options import configure
from unstale.cli.session import train
from unstale.config import RunConfig, ScheduleConfig
from unstale.config.routes import Needs
from unstale.durability.console import Console
from unstale.engines.remote import _PROBE_PARAMS
from unstale.model.policy import Policy
from unstale.trainer.local import LocalTrainer
from unstale.weights.publish import DirectPublisher

SCALE = 2.0
"""All seconds and bytes are divided by this."""
SCHEDULE = ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=2)
PROMPT, REPLY = 16, 40
WARM = 3
"""Steps that are not measured, in which the queue fills up."""
LIMIT = 0.15


@dataclass(frozen=True, slots=True)
class Throttled:
    """A model with its place, and the whole times of a step that are not those of a publication."""

    name: str
    place: Placement
    loader_gb_s: float
    reference_s: float
    """Seconds of the probe's reference."""
    generation_s: float
    """Seconds in which the engines sample a batch."""
    batch: float
    """Tokens of a step."""

    @property
    def costs(self) -> AnalyticCosts:
        """The costs on H100s. One core in all decodes a version, as in benchmarks/standstill.py."""
        shares = Shares(cores=1 / self.place.tp, loader_gb_s=self.loader_gb_s)
        setup = TrainingSetup(
            model=PRESETS[self.name],
            device=DEVICES["H100"],
            shares=shares,
            lr=1e-6,
            rounding="nearest",
            episodes=EpisodeStats(4000, 2000, 8000, 1000, 1600),
            gradient_checkpointing=True,
        )
        return AnalyticCosts(
            setup=setup,
            placement=self.place,
            route=route_cost("snapshot_old"),
            batch=self.batch,
            live=3,
        )

    @property
    def linear(self) -> LinearCosts:
        """The scaled seconds of the plan."""
        costs, tokens = self.costs, round(self.batch)
        rounds = SCHEDULE.max_staleness + 1
        return LinearCosts(
            decode=rounds * self.generation_s / REPLY / SCALE,
            train=costs.train_s(tokens) / SCALE,
            optimizer_s=costs.optimizer_s / SCALE,
            old=costs.old_logps_s(tokens, 2) / SCALE,
            publish=1.0 / SCALE,
            stage=costs.stage_s() / SCALE,
            load=costs.load_s() / SCALE,
            probe=costs.probe_s() / SCALE,
        )

    @property
    def case(self) -> Case:
        """The bytes of a version, for the sleeps of the engine."""
        gb = PRESETS[self.name].copy_bytes / 1e9
        return Case(self.name, gb / SCALE, self.place.tp, self.reference_s / SCALE, "delta")


CASES = tuple(
    case
    for loader in (2.5, 5.0)
    for case in (
        Throttled("4B", Placement(4, 1, 1), loader, 3.0, 31.0, 680e3),
        Throttled("30B-A3B", Placement(32, 1, 4), loader, 8.0, 33.0, 2.7e6),
    )
)


class PacedServer(SlowServer):
    """A server that samples and loads as slowly as the plan says. The probe is not slowed."""

    tick_s = 0.005
    decode_s = 0.0

    def pace(self, asked: Mapping[str, Any]) -> float:
        is_probe = asked["temperature"] == _PROBE_PARAMS.temperature
        return super().pace(asked) if is_probe else self.decode_s


@contextmanager
def throttled(case: Throttled) -> Iterator[None]:
    """Let the trainer's parts sleep as long as the plan says, and the engine by bytes."""
    costs = case.linear

    def slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return call(*args, **options)

        return run

    with ExitStack() as patches:
        patches.enter_context(sleeping(case.case))
        for owner, name, seconds in (
            (LocalTrainer, "prepare", costs.old),
            (LocalTrainer, "backward", costs.train - costs.optimizer_s),
            (LocalTrainer, "step", costs.optimizer_s),
            (DirectPublisher, "prepare", costs.publish),
        ):
            slow = slowed(getattr(owner, name), seconds)
            patches.enter_context(patch.object(owner, name, slow))
        yield


def run_config(folder: Path, url: str, steps: int) -> RunConfig:
    options = {
        "model": folder / "model",
        "task.env": f"dataset:{folder / 'rows.jsonl'}",
        "reward": "benchmarks.gpu_steps:parity",
        "runs": folder,
        "name": "run",
        "max_steps": WARM + steps,
        "minutes": 0,
        "old_logps.route": "snapshot_old",
        "schedule.max_staleness": SCHEDULE.max_staleness,
        "schedule.groups_per_step": SCHEDULE.groups_per_step,
        "schedule.group_size": SCHEDULE.group_size,
        "engine.backend": "vllm",
        "engine.urls": url,
        "engine.max_completion_tokens": REPLY,
        "engine.max_context": 128,
        "rollout.max_turns": 1,
        "eval.tasks": 0,
        "checkpoint.interval": 10**6,
        "trainer.dtype": "bfloat16",
        "correction.mode": "none",
        "correction.token_veto_threshold": 0,
        "audit.share": 0,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return configure(parse(["train", "llm", *words]))


def measure(case: Throttled, steps: int) -> tuple[float, float]:
    """Return the median seconds of the standstill, and the mean of a step in the real loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(TINY, folder / "model", "cpu")
        write_rows(folder / "rows.jsonl", PROMPT)
        policy = Policy.load(folder / "model", dtype="bfloat16")
        with PacedServer(folder, policy) as server:
            server.load_s = case.case.gb / (case.loader_gb_s * case.place.tp)
            server.decode_s = case.linear.decode
            with throttled(case):
                run = train(run_config(folder, server.url, steps), console=Console(quiet=True))
        rows = [each for each in run.metrics if each["step"] >= WARM]
        standstills = [each["publish/standstill_s"] for each in rows[1:]]
        steps_s = [after["time_s"] - before["time_s"] for before, after in pairwise(rows)]
        return median(standstills), fmean(steps_s)


def predict(case: Throttled) -> tuple[float, float]:
    """Return the same by the planner's formulas and its virtual clock."""
    workload = Workload(prompt_tokens=Constant(PROMPT), reply_tokens=Constant(REPLY))
    result = simulate(
        workload,
        Fleet(max_running=64),
        SCHEDULE,
        case.linear,
        steps=20,
        needs=Needs(snapshots=True),
    )
    return case.linear.load, result.mean_step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    chosen = parser.parse_args()
    lines = columns(
        "model",
        "GB",
        "GB/s to each GPU",
        "standstill s, planned",
        "measured",
        "step s, planned",
        "measured",
        "step off by",
        "verdict",
    )
    for case in CASES:
        planned, measured = predict(case), measure(case, chosen.steps)
        off = [found / wanted - 1 for wanted, found in zip(planned, measured, strict=True)]
        figures = [
            f"{SCALE * each:.1f}" for pair in zip(planned, measured, strict=True) for each in pair
        ]
        met = "met" if max(map(abs, off)) <= LIMIT else "missed"
        gb = f"{SCALE * case.case.gb:.1f}"
        lines.append(row(case.name, gb, case.loader_gb_s, *figures, f"{off[1]:+.0%}", met))
        CONSOLE.print(lines[-1])
    lines += ["", f"Seconds are those of the whole model; the runs were {SCALE:g} times as fast."]
    write("throttled", "A plan beside the real loop with throttled engines", lines)


if __name__ == "__main__":
    main()
