"""Suggest a configuration for a number of devices.

The throughput of many configurations, called candidates, is estimated by a formula. Those with the
highest estimates are simulated, and one of these is chosen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from unstale.analysis.planner.analytic import AnalyticCosts
from unstale.analysis.planner.candidates import (
    Candidate,
    PlanRequest,
    best_candidate,
    divisions,
    make_schedule,
    synchronous,
    with_route,
)
from unstale.analysis.planner.route_costs import RouteCost
from unstale.analysis.planner.simulate import Fleet, SimulationResult, simulate
from unstale.config import ScheduleConfig
from unstale.config.routes import routes
from unstale.observe.words import KEEPS_PACE

NEAR = 0.95
"""Configurations with at least this share of the highest throughput count as equally fast. Of them
the lowest staleness is chosen, then the smallest batch, then the smallest window. The standard
error of a simulated throughput is about as large as the difference (docs/planning.md has examples).
"""
REACH = 0.75
"""Share of the highest estimated throughput below which a configuration is not simulated. It is
well below 1, because estimates are not exact.
"""
MAX_CHOICES = 6
"""Largest number of schedules that are simulated."""
MAX_SPLITS = 3
"""Largest number of divisions of the devices among trainer and engines that are simulated."""
AVERAGE: str = "ppo_ewma_async"
"""The most exact way to get `old_logp` from averages of the weights (docs/old-logps.md). Exact ways
are compared with it.
"""


@dataclass(frozen=True)
class SimulatedCandidate:
    """A configuration and the result of its simulation."""

    candidate: Candidate
    result: SimulationResult

    @property
    def rate(self) -> float:
        """Throughput in trained tokens per second.

        The throughput is groups per second times the mean tokens of a group in the whole workload,
        because the groups of a few simulated steps may be unusually long or short.
        """
        episodes_per_s = self.result.groups_per_s * self.candidate.schedule.group_size
        return episodes_per_s * self.candidate.episodes.tokens

    @property
    def spread(self) -> float:
        """Standard error of `rate`, as a share of it.

        The error is computed from the durations of rounds of `max_staleness` + 1 steps, because
        steps that share running episodes are not independent.
        """
        steps = self.result.steady_s
        size = self.candidate.schedule.max_staleness + 1
        rounds = [
            sum(steps[first : first + size]) for first in range(0, len(steps) - size + 1, size)
        ]
        return stdev(rounds) / mean(rounds) / math.sqrt(len(rounds))


@dataclass(frozen=True)
class Suggestion:
    """The suggested configuration, and those with which it was compared."""

    best: SimulatedCandidate
    synchronous: SimulatedCandidate | None
    """The fastest configuration for synchronous training, in which all devices sample and train in
    turn. None if none fits the devices.
    """
    choices: tuple[SimulatedCandidate, ...]
    """The simulated configurations that compare schedules. Each is the one with the highest
    estimated throughput for its schedule.
    """
    splits: tuple[SimulatedCandidate, ...]
    """The simulated configurations that compare divisions of the devices among trainer and
    engines.
    """
    routes: tuple[Candidate, ...]
    """For each way to get `old_logp` that fits, a configuration with the suggested schedule and, if
    possible, the suggested division of the devices. It need not be simulated.
    """
    simulated: Mapping[str, SimulatedCandidate]
    """Way to get `old_logp` -> its simulated configuration, for exact ways with nearly the highest
    throughput and for `AVERAGE`.
    """

    def rate(self, candidate: Candidate) -> float:
        """Return the throughput of a configuration of `routes`, in trained tokens per second.

        If it was not simulated, its estimate is scaled by the ratio of simulated to estimated
        throughput of the suggestion.
        """
        if candidate.name in self.simulated:
            return self.simulated[candidate.name].rate
        return self.best.rate * candidate.rate / self.best.candidate.rate


def suggest(request: PlanRequest) -> Suggestion:
    """Return a configuration for `request`, and those with which it was compared.

    The configuration has nearly the highest simulated throughput (`NEAR`), with low staleness.
    Raises `ConfigError` if there are too few devices.
    """
    simulated = _Simulations()
    name: str = request.route or "snapshot_old"
    choices, central = _best_schedule(request, name, simulated)
    splits = _simulate_best(divisions(central.candidate), simulated, limit=MAX_SPLITS)
    central = max((central, *splits), key=lambda rated: rated.rate)
    if not request.windows and central.result.trainer_wait_share > KEEPS_PACE:
        schedule = central.candidate.schedule
        if schedule.max_staleness > 1:
            groups = schedule.groups_per_step
            half = make_schedule(request, schedule.max_staleness, groups, groups // 2 + 1)
            choices = (*choices, simulated(best_candidate(request, name, half)))
            central = _smallest([central, choices[-1]])
    by_route = [suited for other in routes() if (suited := with_route(central.candidate, other))]
    exact = [
        each for each in by_route if each.costs.route.exact and request.route in (None, each.name)
    ]
    near = [each for each in exact if each.rate >= NEAR * central.candidate.rate]
    average = [each for each in by_route if each.name == AVERAGE]
    by_name = {route.name: simulated(route) for route in (*near, *average)} | {name: central}
    best = _smallest([central, *(by_name[each.name] for each in exact if each.name in by_name)])
    in_turns = synchronous(request, central.candidate.schedule)
    return Suggestion(
        best,
        simulated(in_turns) if in_turns else None,
        choices,
        splits,
        tuple(by_route),
        by_name,
    )


def _best_schedule(
    request: PlanRequest, name: str, simulated: "_Simulations"
) -> tuple[tuple[SimulatedCandidate, ...], SimulatedCandidate]:
    """Return the simulated configurations, each the fastest of its schedule, and the one to use.

    Only the schedules with the highest estimates are simulated. `_smallest` chooses among them.
    `name` is the way to get `old_logp`.
    """
    window = request.windows[0] if request.windows else 1
    candidates = []
    for groups in request.groups:
        for lag in request.lags:
            candidates.append(
                best_candidate(request, name, make_schedule(request, lag, groups, window))
            )
    choices = _simulate_best(candidates, simulated, limit=MAX_CHOICES)
    return choices, _smallest(choices)


class _Simulations(dict[tuple[AnalyticCosts, ScheduleConfig], SimulationResult]):
    """Simulated configurations. Those with equal costs and schedules are simulated once."""

    def __call__(self, candidate: Candidate) -> SimulatedCandidate:
        costs = candidate.costs
        schedule = candidate.schedule
        needs = replace(costs.route.needs, now=False, inline=False, idle=False)
        key = (replace(costs, route=RouteCost(needs, exact=False)), schedule)
        if key not in self:
            self[key] = self._simulate(candidate)
        return SimulatedCandidate(candidate, self[key])

    def _simulate(self, candidate: Candidate) -> SimulationResult:
        request = candidate.request
        placement = candidate.placement
        schedule = candidate.schedule
        request.on_progress(
            f"simulating {candidate.name}: {candidate.place}; {describe_schedule(schedule)}"
        )
        fleet = Fleet(
            engines=placement.engines,
            max_running=candidate.max_running,
            colocated=placement.colocated,
            cache_tokens=int(candidate.costs.context_tokens),
        )
        return simulate(
            request.workload,
            fleet,
            schedule,
            candidate.costs,
            steps=(schedule.max_staleness + 1) * (request.rounds + 1),
            needs=candidate.costs.route.needs,
        )


def describe_schedule(schedule: ScheduleConfig) -> str:
    return (
        f"max_staleness {schedule.max_staleness}, {schedule.groups_per_step} groups, "
        f"window {schedule.lookahead_window}"
    )


def _simulate_best(
    candidates: Sequence[Candidate], simulated: _Simulations, *, limit: int
) -> tuple[SimulatedCandidate, ...]:
    """Simulate the `limit` configurations with the highest estimates.

    Those below `REACH` of the highest estimate are left out.
    """
    ranked = sorted(candidates, key=lambda candidate: -candidate.rate)[:limit]
    near = [candidate for candidate in ranked if candidate.rate >= REACH * ranked[0].rate]
    return tuple(simulated(candidate) for candidate in near)


def _smallest(rated: Sequence[SimulatedCandidate]) -> SimulatedCandidate:
    """Return the configuration to prefer among those with nearly the highest throughput (`NEAR`).

    It is the one with the lowest staleness, then the smallest batch, then the smallest look-ahead
    window.
    """
    best = max(each.rate for each in rated)
    near = [each for each in rated if each.rate >= NEAR * best]

    def sizes(each: SimulatedCandidate) -> tuple[int, int, int]:
        schedule = each.candidate.schedule
        return schedule.staleness_bound, schedule.groups_per_step, schedule.lookahead_window

    return min(near, key=sizes)
