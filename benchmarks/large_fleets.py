"""Simulate 30B-A3B on 64 and 1,024 GPUs with several rollout processes, on the planner's clock.

    python -m benchmarks.large_fleets          # 10 minutes, one core

The loop, its staleness queue and the routing are the real ones. The seconds of each part of a step
are those of a paper budget for H200s (36 + 28 and 512 + 512 GPUs): generation as fast as the budget
says, training, scoring and the update of the weights. Measured on a CPU are the seconds that a turn
of 200 tokens takes of a rollout process and of the run's (`benchmarks.rollout_processes`), and
those of the arithmetic on all tokens of a batch, which ranks do not divide
(`benchmarks.token_arithmetic`). The goal is a step of at most 1.2 times that of the budget.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from benchmarks import tables
from unstale.analysis.planner.costs import LinearCosts, Overheads
from unstale.analysis.planner.simulate import Constant, Fleet, LogNormal, Workload, simulate
from unstale.config import ScheduleConfig

LIMIT = 1.2
GROUP_SIZE, TURNS, REPLY, ANSWER, PROMPT = 16, 16, 200, 10, 100
"""The shape of an episode: 3,200 sampled tokens of 3,450."""
RUNNING, CACHE_TOKENS = 112, 10**9
STEP_S = 0.01
"""Seconds of a decoding step: an engine of four GPUs samples 11,200 tokens a second."""
STEPS = 16
"""The steps differ, because the groups of the first batches begin together: their mean counts."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A fleet with the seconds of its budget."""

    gpus: int
    engines: int
    groups: int
    scale: int
    """Only one of so many engines and groups is simulated, and a turn takes an event loop so many
    times as long. 1,024 GPUs would otherwise take an hour.
    """
    train_s: float
    score_s: float
    codec_s: float
    standstill_s: float
    calls_s: float
    """Seconds of the calls of all ranks and of gathering their results."""
    step_s: float
    """The step of the budget, with everything of it built."""

    @property
    def tokens(self) -> int:
        return self.groups * GROUP_SIZE * (PROMPT + TURNS * (REPLY + ANSWER))


BUDGETS = (
    Budget(64, 7, 50, 1, 9.4, 3.5, 0.5, 6.0, 0.3, 38.0),
    Budget(1024, 128, 832, 16, 11.0, 5.0, 0.5, 7.5, 1.0, 45.0),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured seconds of one core."""

    single_s: float
    """Of a turn in a single process."""
    turn_s: float
    """Of a turn in its rollout process, of several."""
    run_turn_s: float
    """Of a turn in the run's process, with several rollout processes."""
    token_s: float
    """Of the undivided arithmetic, for each token of a batch."""


def step_s(budget: Budget, processes: int, measured: Measured) -> float:
    """Return the mean seconds of a simulated step, after the queue has filled."""
    scale, prepare_s = budget.scale, measured.token_s * budget.tokens
    turn_s = measured.single_s if processes == 1 else measured.turn_s
    run_turn_s = 0.0 if processes == 1 else measured.run_turn_s
    result = simulate(
        Workload(
            prompt_tokens=Constant(PROMPT),
            turns=Constant(TURNS),
            reply_tokens=LogNormal(REPLY, 0.3),
            tool_tokens=Constant(ANSWER),
        ),
        Fleet(engines=budget.engines // scale, max_running=RUNNING, cache_tokens=CACHE_TOKENS),
        ScheduleConfig(
            max_staleness=2, groups_per_step=budget.groups // scale, group_size=GROUP_SIZE
        ),
        LinearCosts(
            decode=STEP_S,
            prefill_token=1e-6,
            train=budget.train_s + budget.calls_s,
            old=budget.score_s + prepare_s,
            publish=budget.codec_s,
            load=budget.standstill_s,
        ),
        steps=STEPS,
        overheads=Overheads(
            turn_s=scale * turn_s, run_turn_s=scale * run_turn_s, processes=processes
        ),
    )
    return fmean(result.steps_s[result.filling :])


def lines(cases: Sequence[tuple[int, int]], measured: Measured) -> list[str]:
    found = tables.columns(
        "GPUs", "rollout processes", "turns in a step", "step s", "budget", "ratio", "verdict"
    )
    for gpus, processes in cases:
        budget = next(each for each in BUDGETS if each.gpus == gpus)
        seconds = step_s(budget, processes, measured)
        ratio = seconds / budget.step_s
        found.append(
            tables.row(
                f"{gpus:,}",
                processes,
                f"{budget.groups * GROUP_SIZE * TURNS:,}",
                f"{seconds:.1f}",
                f"{budget.step_s:g}",
                f"{ratio:.2f}",
                "met" if ratio <= LIMIT else "missed",
            )
        )
        tables.CONSOLE.print(found[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--single-ms", type=float, required=True)
    parser.add_argument("--turn-ms", type=float, required=True)
    parser.add_argument("--run-turn-ms", type=float, required=True)
    parser.add_argument("--token-ns", type=float, required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 8))
    options = parser.parse_args()
    cases = list(product((64, 1024), options.processes))
    turns_s = (options.single_ms / 1e3, options.turn_ms / 1e3, options.run_turn_ms / 1e3)
    table = lines(cases, Measured(*turns_s, options.token_ns / 1e9))
    text = [
        f"Episodes of {TURNS} turns of {REPLY} tokens. A turn takes {options.single_ms:g} ms of a",
        f"single process; of several it takes {options.turn_ms:g} ms of its rollout process, then",
        f"{options.run_turn_ms:g} ms of the run's process. Each token of a batch takes",
        f"{options.token_ns:g} ns of undivided arithmetic. The goal is {LIMIT:g} times the step of",
        "the budget. Steps are means after the queue has filled; 1,024 GPUs are simulated as one",
        "engine and group of 16.",
        "",
        *table,
    ]
    tables.write("large-fleets", "30B-A3B on many GPUs, simulated", text)


if __name__ == "__main__":
    main()
