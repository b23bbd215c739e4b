"""Check the GPUs of one machine: where the time of a step goes, and what is wrong or slow.

    python -m benchmarks.gpu_check            # all GPUs; at most an hour, nothing is downloaded
    python -m benchmarks.gpu_check --tiny     # every part at tiny sizes, also without GPUs

A Qwen3 with random weights is trained by a real run, of the largest preset that fits: half of the
GPUs train, the others sample with vLLM if it is installed. A single GPU does both. The report is
printed, and written with all numbers to `gpu-check.json`, which you can send back. A part that
needs a GPU says so without one. Several GPUs need the extra `cluster`.
"""

import argparse
import json
import shlex
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_experts, tables
from benchmarks.gpu import Chip, collect
from benchmarks.gpu_case import Case, choose, device_here, mean, planned, tiny
from benchmarks.gpu_machine import (
    NO_GPU,
    Compared,
    Fact,
    bandwidths,
    compare_kernels,
    in_use,
    room,
    software,
)
from benchmarks.gpu_peers import GOAL, PEERS, SOURCES, Speed, nearest
from benchmarks.gpu_steps import Budget
from unstale.analysis.planner.route_costs import route_cost
from unstale.cluster.session import end_after
from unstale.durability.console import Console
from unstale.durability.run_folder import plain
from unstale.engines.remote import TOLERANCE

WIDTH = 80
PARTS = ("environment", "kernels", "steps", "exactness", "experts", "verdicts", "share")
STANDSTILL_S = 4.0
"""Longest standstill for a version of 4B."""
PLAN_LIMIT = 0.2
"""Largest deviation of a step from its plan."""
FAILURES = (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired, ExceptionGroup)
"""Errors that end one part. An out-of-memory error is one of the first kind."""
TRAINER = {
    "wait": "wait for episodes",
    "prepare": "prepare the batch (CPU)",
    "score": "old log-probabilities: forward",
    "move": "old log-probabilities: move",
    "put": "keep the version (put)",
    "forward": "train: forward",
    "backward": "train: backward",
    "communication": "communication, exposed",
    "optimizer": "optimizer",
    "encode": "publish: encode",
    "apply": "publish: driver applies deltas",
    "rest": "rest",
    "step": "step",
}
"""Parts of a step in the trainer's thread, with their names in the report."""
ENGINES = {
    "stage": "publish: stage",
    "interrupt": "publish: interrupt",
    "load": "publish: load",
    "probe": "publish: probe",
    "reprefill": "contexts again",
}
"""Parts of a step beside the trainer's thread."""


@dataclass
class Check:
    """The machine, the sizes of the check, and the measurements so far."""

    folder: Path
    is_tiny: bool = False
    trainers: int = 0
    """Trainer ranks of a tiny run. 0 has none."""
    lora_rank: int = 0
    more: tuple[str, ...] = ()
    """More words of `unstale train` for the run."""
    moe: Path | None = None
    budget: Budget | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    kernels: Sequence[Compared] = ()
    times: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Seconds of a step's parts: measured, and as planned."""

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count()

    @cached_property
    def chip(self) -> Chip:
        return Chip.measure("cuda" if self.gpus else "cpu")

    @cached_property
    def case(self) -> Case:
        """The run that is measured. Raises RuntimeError if no preset fits."""
        if self.is_tiny:
            return tiny(self.folder, device_here(self.chip), trainers=self.trainers)
        device = device_here(self.chip)
        chosen = choose(self.gpus, self.folder, device, lora_rank=self.lora_rank)
        return replace(chosen, more=self.more)

    @property
    def tokens(self) -> float:
        """Mean number of trained tokens of a step."""
        episodes = mean(self.rows, "rollout/episodes") or 0.0
        return episodes * (mean(self.rows, "rollout/total_tokens_mean") or 0.0)

    @property
    def speed(self) -> Speed:
        """The speed of the trainer without its waiting for episodes."""
        setup = self.case.setup
        busy_s = self.times["step"][0] - self.times["wait"][0]
        each = self.tokens / busy_s / max(1, self.case.trainers)
        passes = 2 if setup.lora_rank else 3
        flops = passes * setup.model.forward_flops(setup.episodes.attended)
        return Speed(setup.model, each, each * flops / setup.device.flops)

    def need_run(self) -> None:
        if self.budget is None:
            raise RuntimeError("needs the part `steps`, which broke off")


@dataclass(frozen=True, slots=True)
class Found:
    """What a part measured: its lines in the report, and its values for programs."""

    lines: Sequence[str]
    values: Mapping[str, Any]
    not_run: str = ""
    """Why nothing was measured. Empty if something was."""


def environment(check: Check) -> Found:
    """Measure the machine, and compare its memory with the need."""
    runs = Path.cwd()
    case, chip = check.case, check.chip
    model = case.model
    shared = model.copy_bytes * (case.engines if case.gpus else 1)
    setup = case.setup
    trainers = max(1, case.trainers)
    deltas = route_cost("snapshot_old").main_bytes(model, live=4, rate=setup.delta_rate)
    main = setup.checkpoint_bytes(trainers) * trainers + deltas + 2 * model.copy_bytes
    limits = [
        Fact("large products", f"{chip.flops / 1e12:,.3g} TFLOP/s", chip.flops),
        Fact("large copies", f"{chip.bandwidth / 1e9:,.4g} GB/s", chip.bandwidth),
    ]
    facts = [
        *software(),
        *in_use(),
        *limits,
        *bandwidths(runs, is_tiny=check.is_tiny),
        *room(shared, main),
    ]
    return of_facts(facts)


def of_facts(facts: Sequence[Fact]) -> Found:
    lines = [line for fact in facts for line in labelled(fact.name, fact.text)]
    return Found(lines, {fact.name: asdict(fact) for fact in facts})


def kernels(check: Check) -> Found:
    """Compare the kernels with torch."""
    check.kernels = compare_kernels(is_tiny=check.is_tiny)
    lines = [cells("kernel", "max error", "ms", "torch ms", "")]
    for each in check.kernels:
        right = "" if each.is_right else "WRONG"
        times = (f"{each.ms:.3g}", f"{each.torch_ms:.3g}")
        lines.append(cells(each.name, f"{each.error:.1e}", *times, right))
    lines.append(f"Errors are relative to the largest value. Device: {check.case.device.name}.")
    return Found(lines, {each.name: asdict(each) for each in check.kernels})


def steps(check: Check) -> Found:
    """Measure the parts of the steps of a run, beside what `unstale plan` predicts."""
    case = check.case
    collect()  # the run needs the memory of the parts before
    budget, rows = case.run()
    check.rows = rows
    versions = 1 + (mean(rows, "schedule/mixed_version_share") or 0.0)
    check.times = budget_times(budget, rows, planned(case, versions))
    check.budget = budget
    busy_share = 1 - sum(check.times[name][0] for name in ("wait", "rest")) / budget.step_s
    idle = {
        "engines": 1 - (mean(rows, "engine/busy_share") or 0.0),
        "trainer": 1 - busy_share,
    }
    needed = case.passes.trainer_bytes(max(1, case.trainers), route_cost("snapshot_old"))
    peak = f"{budget.peak / 1e9:.1f} GB" if case.gpus else NO_GPU
    lines = [
        *textwrap.wrap(describe(case, check.tokens), WIDTH),
        "",
        cells("part of a step, mean", "measured s", "planned s", "share"),
        *(part_line(check, name, label) for name, label in TRAINER.items()),
        "beside the trainer's thread:",
        *(part_line(check, name, label) for name, label in ENGINES.items()),
        cells("idle: engines, trainer", f"{idle['engines']:.0%}", f"{idle['trainer']:.0%}"),
        f"Trained: {check.tokens / budget.step_s:,.0f} tokens/s, "
        f"{check.speed.tokens_per_s:,.0f} a training GPU if it never waits for episodes.",
        f"Peak memory of a trainer: {peak}; as planned {needed / 1e9:.2g} GB.",
    ]
    values = {
        "case": {"model": case.model.name, "gpus": case.gpus, "trainers": case.trainers},
        "tokens": check.tokens,
        "seconds": {name: {"measured": a, "planned": b} for name, (a, b) in check.times.items()},
        "idle": idle,
        "peak_bytes": budget.peak,
        "planned_bytes": needed,
    }
    return Found(lines, values)


def describe(case: Case, tokens: float) -> str:
    place = f"{case.trainers} ranks train" if case.trainers else "one process trains"
    adapters = f", adapters of rank {case.lora_rank}" * (case.lora_rank > 0)
    sample = "engines sample" if case.engines > 1 else "engine samples"
    return (
        f"{case.model.name} with random weights{adapters}: {place}, {case.engines} {sample}; "
        f"{case.groups} groups of {case.group_size}, "
        f"{tokens:,.0f} tokens a step, microbatches of {case.passes.microbatch:,}. Mean of "
        f"{case.steps} steps. Checkpoints are not written."
    )


def budget_times(
    budget: Budget, rows: Sequence[Mapping[str, Any]], plan: Mapping[str, float]
) -> dict[str, tuple[float, float | None]]:
    """Return the measured and planned seconds of each part. What was not measured is 0."""
    spent = {**budget.trainer, **budget.engines}
    exposed = budget.exposed * (spent.get("forward", 0.0) + spent.get("backward", 0.0))
    for name in ("forward", "backward"):
        spent[name] = spent.get(name, 0.0) * (1 - budget.exposed)
    spent |= {
        "communication": exposed,
        "wait": mean(rows, "schedule/wait_for_batch_s") or 0.0,
        "reprefill": mean(rows, "engine/reprefill_s") or 0.0,
        "step": budget.step_s,
    }
    on_path = [name for name in TRAINER if name not in ("rest", "step")]
    spent["rest"] = max(0.0, budget.step_s - sum(spent.get(name, 0.0) for name in on_path))
    return {name: (spent.get(name, 0.0), plan.get(name)) for name in (*TRAINER, *ENGINES)}


def part_line(check: Check, name: str, label: str) -> str:
    took, expected = check.times[name]
    share = f"{took / check.times['step'][0]:.0%}"
    return cells(f"  {label}", f"{took:.3g}", "-" if expected is None else f"{expected:.3g}", share)


def exactness(check: Check) -> Found:
    """Return how exact the old log-probabilities and the engines were."""
    check.need_run()
    names = {
        "exact share": "old_logps/exact_share",
        "abs log D, mean": "correction/log_d_abs_mean",
        "abs log D, p99": "correction/log_d_abs_p99",
        "probe error": "engine/probe_logp_error",
    }
    facts = []
    for name, metric in names.items():
        value = mean(check.rows, metric)
        text = "not run: embedded engines have no probe" if value is None else f"{value:.5g}"
        if name == "probe error" and value is not None:
            text += f" nats, of {TOLERANCE['bfloat16']:g} allowed"
        facts.append(Fact(name, text, value))
    return of_facts(facts)


def experts(check: Check) -> Found:
    """Measure D of an MoE policy with and without replayed routes."""
    if not (check.gpus or check.is_tiny):
        return Found([], {}, NO_GPU)
    found, engine = gpu_experts.measure(check.folder, check.moe, is_tiny=check.is_tiny)
    facts = [
        Fact("engine", engine, engine),
        Fact("p99 of abs log D", f"{found.own:.2g}, replayed {found.replayed:.2g}", found.replayed),
        Fact("tokens without routes", f"{found.missing:.1%}", found.missing),
        Fact("speed with recording", f"{found.speed:.0%}", found.speed),
    ]
    return of_facts(facts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal, what was found, and whether it is met."""

    name: str
    wanted: str
    found: str
    result: str


def verdicts(check: Check) -> Found:
    """Judge the measurements against fixed goals and the speed of other trainers."""
    check.need_run()
    found = list(judged(check))
    lines = []
    for each in found:
        told = f": {each.found}" if each.found else ""
        lines += labelled(each.name, f"{each.result}{told} (wanted {each.wanted})")
    for name, source in SOURCES.items():
        lines += textwrap.wrap(f"{name}: {source}", WIDTH)
    values = {each.name: asdict(each) for each in found}
    return Found(lines, {"verdicts": values, "peers": [asdict(peer) for peer in PEERS]})


def judged(check: Check) -> Iterator[Verdict]:
    """Yield the verdicts. Those on speed need a GPU."""
    wrong = [each.name for each in check.kernels if not each.is_right]
    yield _verdict("kernels", "as torch", ", ".join(wrong) or "as torch", not wrong)
    exact = mean(check.rows, "old_logps/exact_share") or 0.0
    yield _verdict("exact share", "1", f"{exact:g}", exact == 1)
    took, expected = check.times["step"]
    deviation = took / expected - 1 if expected else float("nan")
    slow = not check.gpus
    yield _verdict(
        "step beside its plan",
        f"within {PLAN_LIMIT:.0%}",
        f"{deviation:+.0%}",
        abs(deviation) <= PLAN_LIMIT,
        slow=slow,
    )
    load_s = check.times["load"][0] + check.times["interrupt"][0]
    wanted = f"at most {STANDSTILL_S:g} s for 4B"
    yield _verdict("standstill", wanted, f"{load_s:.2f} s", load_s <= STANDSTILL_S, slow=slow)
    for peer in PEERS:
        found, of_what = check.speed.share_of(peer)
        told = f"{found:.0%} of {of_what}"
        yield _verdict(str(peer), f"{GOAL:.0%}", told, found >= GOAL, slow=slow)


def _verdict(name: str, wanted: str, found: str, met: bool, *, slow: bool = False) -> Verdict:
    if slow:
        return Verdict(name, wanted, "", NO_GPU)
    return Verdict(name, wanted, found, "met" if met else "missed")


def share(check: Check) -> Found:
    """Return the share of prime-rl's throughput, and what takes the rest."""
    check.need_run()
    peer = nearest(check.case.model, "prime-rl")
    of_peer, _ = check.speed.share_of(peer)
    step_s, wait_s = (check.times[name][0] for name in ("step", "wait"))
    groups = {
        "publish": ("put", "encode", "apply"),
        "score": ("prepare", "score", "move"),
        "communication": ("communication",),
        "other": ("rest",),
    }
    lost = {
        name: sum(check.times[part][0] for part in parts) / (step_s - wait_s)
        for name, parts in groups.items()
    }
    told = ", ".join(f"{name} {value:.0%}" for name, value in lost.items())
    expected = f"{of_peer:.0%}" if check.gpus else NO_GPU
    line = f"expected share of prime-rl's throughput: {expected}, lost: {told}"
    values = {"share": of_peer if check.gpus else None, "peer": asdict(peer), "lost": lost}
    return Found(textwrap.wrap(line, WIDTH), values)


MEASURE: Mapping[str, Callable[[Check], Found]] = {
    "environment": environment,
    "kernels": kernels,
    "steps": steps,
    "exactness": exactness,
    "experts": experts,
    "verdicts": verdicts,
    "share": share,
}


def cells(first: str, *others: str) -> str:
    """Return a line of a table: a name, and figures on the right.

    >>> cells("norm", "1e-3", "2")
    'norm                                     1e-3           2'
    """
    return f"{first:<33.33}" + "".join(f"{other:>12}" for other in others).rstrip()


def labelled(name: str, text: str) -> list[str]:
    """Return a name and its text, in lines that fit the terminal."""
    return textwrap.wrap(
        f"{name + ':':<31} {text}", WIDTH, subsequent_indent=" " * 32, drop_whitespace=True
    )


def measure(name: str, check: Check) -> Found:
    """Run a part. An error ends only this part, which then says what broke it off."""
    try:
        return MEASURE[name](check)
    except FAILURES as error:
        reason = f"broke off: {type(error).__name__}: {error}"
        return Found([], {}, reason)


def report(check: Check, printed: Console) -> dict[str, Any]:
    """Run all parts and print them. Return their values by name."""
    values = {}
    for number, name in enumerate(PARTS, 1):
        head = f"{number}. {name} "
        printed.print(head + "-" * (WIDTH - len(head)), markup=False)
        began = time.monotonic()
        found = measure(name, check)
        seconds = time.monotonic() - began
        lines = [*found.lines, *textwrap.wrap(found.not_run, WIDTH)]
        printed.print("\n".join([*lines, ""]), markup=False)
        values[name] = {
            "status": found.not_run or "measured",
            "seconds": seconds,
            "lines": lines,
            "values": found.values,
        }
    return values


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also on CPUs")
    parser.add_argument("--trainers", type=int, default=0, help="ranks of the tiny run")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--run-options", default="", help="more options of the run, in quotes")
    parser.add_argument("--moe", type=Path, help="folder of a trained MoE model")
    chosen = parser.parse_args(words)
    if not (chosen.tiny or torch.cuda.is_available()):
        raise SystemExit("there is no GPU here: --tiny runs every part at tiny sizes")
    return chosen


@end_after()
def main(words: Sequence[str] | None = None) -> Path:
    chosen = arguments(words)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(
            Path(folder),
            chosen.tiny,
            chosen.trainers,
            chosen.lora_rank,
            tuple(shlex.split(chosen.run_options)),
            chosen.moe,
        )
        parts = report(check, tables.CONSOLE)
    data = {
        "date": str(date.today()),
        "commit": tables.revision(),
        "tiny": chosen.tiny,
        "minutes": (time.monotonic() - began) / 60,
        "parts": parts,
    }
    tables.RESULTS.mkdir(parents=True, exist_ok=True)
    target = tables.RESULTS / ("gpu-check" + "-tiny" * chosen.tiny + ".json")
    target.write_text(json.dumps(plain(data), indent=1) + "\n")
    tables.CONSOLE.print(f"All numbers, to send back: {target}", markup=False)
    return target


if __name__ == "__main__":
    main()
