"""Compare ways to divide a staleness bound between groups in flight and a window, by simulation.

    python -m benchmarks.windows        # 5 minutes on two cores; the result does not depend on them

A bound of B versions can be had with more groups in flight (`schedule.max_staleness`) or with a
wider window (`schedule.lookahead_window`), and with `schedule.adaptive_window` the queue divides it
itself; docs/staleness.md derives the bound of each. The simulation runs the real queue on a virtual
clock.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.tables import CONSOLE, columns, ratios, row, spread, write
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.simulate import Constant, Fleet, LogNormal, Workload, simulate
from unstale.config import ScheduleConfig
from unstale.weights.child_process import cores

GROUPS, SIBLINGS = 8, 4
COSTS = LinearCosts(decode=0.01, decode_reply=1e-4, prefill_token=1e-4, train_token=2e-4)
SHORT_TOOLS = Workload(
    prompt_tokens=Constant(60),
    turns=LogNormal(3, 0.6, 8),
    reply_tokens=LogNormal(40, 0.9, 400),
    tool_tokens=Constant(20),
    tool_s=LogNormal(0.5, 1.0, 10),
)
WORKLOADS = {
    "tools of 0.5 s, at most 10 s": SHORT_TOOLS,
    "tools of 4 s, at most 120 s": replace(
        SHORT_TOOLS, turns=LogNormal(4, 0.6, 12), tool_s=LogNormal(4, 1.5, 120)
    ),
}


def division(bound: int, tickets: int | None) -> ScheduleConfig:
    """Return the schedule with this staleness bound and `max_staleness` `tickets`.

    Without `tickets` the queue divides the bound itself.

    >>> division(4, 3).lookahead_window, division(4, 3).staleness_bound
    (9, 4)
    """
    if tickets is None:
        return ScheduleConfig(
            max_staleness=bound,
            groups_per_step=GROUPS,
            group_size=SIBLINGS,
            adaptive_window=True,
        )
    return ScheduleConfig(
        max_staleness=tickets,
        groups_per_step=GROUPS,
        group_size=SIBLINGS,
        lookahead_window=(bound - tickets) * GROUPS + 1,
    )


@dataclass(frozen=True)
class Case:
    """One simulated run. Without `tickets` the queue divides the bound itself."""

    workload: str
    bound: int
    tickets: int | None
    seed: int
    steps: int

    def run(self) -> tuple[float, float]:
        """Return the mean seconds of a step, and the mean staleness of a token in versions."""
        result = simulate(
            WORKLOADS[self.workload],
            Fleet(max_running=128),
            division(self.bound, self.tickets),
            COSTS,
            steps=self.steps,
            seed=self.seed,
        )
        ages = result.staleness_histogram
        mean_age = sum(age * tokens for age, tokens in ages.items()) / sum(ages.values())
        return result.mean_step_s, mean_age


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument(
        "--window-versions", type=int, default=2, help="versions that a window takes at most"
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args(words)
    lines = columns(
        "workload",
        "bound",
        "`max_staleness`",
        "`lookahead_window`",
        "seconds a step",
        "over tickets alone",
        "mean staleness",
    )
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        for name, bound in product(WORKLOADS, chosen.bounds):
            CONSOLE.print(f"{name}, bound {bound}")
            divisions = [None, *range(bound, max(0, bound - chosen.window_versions - 1), -1)]
            cases = [
                Case(name, bound, tickets, seed, chosen.steps)
                for tickets in divisions
                for seed in range(chosen.seeds)
            ]
            results = dict(zip(cases, pool.map(Case.run, cases), strict=True))
            found = {
                str(tickets): [results[case][0] for case in cases if case.tickets == tickets]
                for tickets in divisions
            }
            for tickets in divisions:
                window: int | str = division(bound, tickets).lookahead_window
                ages = [results[case][1] for case in cases if case.tickets == tickets]
                lines.append(
                    row(
                        name,
                        bound,
                        bound if tickets is None else tickets,
                        "adaptive" if tickets is None else window,
                        f"{median(found[str(tickets)]):.3g}",
                        spread(ratios(found, str(tickets), over=str(bound))),
                        f"{median(ages):.2f}",
                    )
                )
    head = [
        f"{GROUPS} groups of {SIBLINGS} episodes a step, {chosen.steps} steps, medians and ranges "
        f"of {chosen.seeds} seeds. A ratio is of the same seed. Below 1, a step is shorter than "
        "with tickets alone, whose window is 1. The mean staleness is in versions, of all tokens.",
        "",
    ]
    return write("windows", "Tickets or a window under the same bound", [*head, *lines])


if __name__ == "__main__":
    main()
