"""Compare ways to divide a staleness bound between tickets and a look-ahead window, by simulation.

    python -m benchmarks.windows        # 3 minutes on one core; the result does not depend on it

A bound of B versions can be had with more groups in flight (`schedule.max_staleness`) or with a
wider window (`schedule.lookahead_window`); docs/staleness.md derives both. The simulation runs the
real queue on a virtual clock.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.tables import CONSOLE, columns, ratios, row, spread, write
from unstale.config import ScheduleConfig
from unstale.planner.costs import LinearCosts
from unstale.planner.simulate import Constant, Fleet, LogNormal, Workload, simulate

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


def division(bound: int, tickets: int) -> ScheduleConfig:
    """Return the schedule with this staleness bound and `max_staleness` `tickets`.

    >>> division(4, 3).lookahead_window, division(4, 3).staleness_bound
    (9, 4)
    """
    return ScheduleConfig(
        max_staleness=tickets,
        groups_per_step=GROUPS,
        group_size=SIBLINGS,
        lookahead_window=(bound - tickets) * GROUPS + 1,
    )


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args(words)
    lines = columns(
        "workload",
        "bound",
        "`max_staleness`",
        "`lookahead_window`",
        "seconds a step",
        "over tickets alone",
    )
    for name, workload in WORKLOADS.items():
        for bound in chosen.bounds:
            CONSOLE.print(f"{name}, bound {bound}")
            found = {
                str(tickets): [
                    simulate(
                        workload,
                        Fleet(max_running=128),
                        division(bound, tickets),
                        COSTS,
                        steps=chosen.steps,
                        seed=seed,
                    ).mean_step_s
                    for seed in range(chosen.seeds)
                ]
                for tickets in range(1, bound + 1)
            }
            for tickets, seconds in found.items():
                schedule = division(bound, int(tickets))
                over = spread(ratios(found, tickets, over=str(bound)))
                step = f"{median(seconds):.3g}"
                lines.append(row(name, bound, tickets, schedule.lookahead_window, step, over))
    head = [
        f"{GROUPS} groups of {SIBLINGS} episodes a step, {chosen.steps} steps, medians and ranges "
        f"of {chosen.seeds} seeds. A ratio is of the same seed. Below 1, a step is shorter than "
        "with tickets alone, whose window is 1.",
        "",
    ]
    return write("windows", "Tickets or a window under the same bound", [*head, *lines])


if __name__ == "__main__":
    main()
