"""Which configuration to run on so many devices: every split is estimated by a formula, the best are simulated."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, stdev
from typing import NamedTuple

from unstale.config import ConfigError, Route, ScheduleConfig, staleness_bound
from unstale.observe.report.words import KEEPS_PACE
from unstale.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.planner.parts import needs
from unstale.planner.route_costs import ROUTES
from unstale.planner.simulate import Fleet, SimulationResult, Workload, simulate
from unstale.planner.workload import EpisodeStats

NEAR = 0.95
"""Of the best throughput: what reaches it is as good, and the smaller staleness, batch and window are taken."""
REACH = 0.75
"""Of the best estimate: what is estimated at less is not simulated."""
MOST_CHOICES = 6
"""Lags and batches that are simulated."""
MOST_SPLITS = 3
"""Splits of the devices that are simulated."""
AVERAGE: Route = "ppo_ewma_async"
"""The approximation that an exact route is held against: of those that keep weights the nearest (docs/old-logps.md)."""
LEAST_RUNNING = 8
"""Mean episodes that an engine must have memory for; with fewer, tensor parallelism is raised."""
MOST_RUNNING = 256
"""Replies of an engine at the same time: vLLM's `max_num_seqs` where it is not told."""
_TP = (1, 2, 4, 8)
_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked. Several lags, batches or windows are choices."""

    setting: TrainingSetup
    workload: Workload
    devices: int
    lags: tuple[int, ...] = (1, 2, 4)
    groups: tuple[int, ...] = (16,)
    group_size: int = 8
    windows: tuple[int, ...] = ()
    """None given: strict order, and half a batch where the trainer waits."""
    route: Route | None = None
    """None given: the exact route that gives most."""
    rounds: int = 10
    """Of `lag` + 1 steps in a simulation, after the one that fills the line: in each all that is live is replaced."""
    tell: Callable[[str], None] = lambda text: None
    """Progress."""


@dataclass(frozen=True)
class Candidate:
    """One configuration, and what the formula says of it."""

    request: PlanRequest
    costs: AnalyticCosts
    name: Route
    schedule: ScheduleConfig

    @property
    def place(self) -> Placement:
        return self.costs.place

    @property
    def means(self) -> EpisodeStats:
        return self.costs.setting.episodes

    def with_route(self, name: Route) -> "Candidate":
        return replace(self, name=name, costs=replace(self.costs, route=ROUTES[name]))

    @property
    def extra_s(self) -> float:
        """Trainer's seconds of a step that are the route's."""
        return (
            self.costs.old_logps_s(round(self.costs.batch), self.estimate.versions)
            + self.costs.encode_s
        )

    @property
    def sequences(self) -> int:
        """Of a batch."""
        return self.schedule.groups_per_step * self.schedule.group_size

    @cached_property
    def max_running(self) -> int:
        """Replies of an engine: what there is memory for, and no more than are live."""
        live = math.ceil((self.schedule.max_staleness + 1) * self.sequences / self.place.engines)
        return max(
            1,
            min(
                live, MOST_RUNNING, int(self.costs.setting.room(self.place.tp) // self.means.tokens)
            ),
        )

    @property
    def rate(self) -> float:
        """Trained tokens a second, estimated."""
        return self.costs.batch / self.estimate.step_s

    @cached_property
    def estimate(self) -> "ThroughputEstimate":
        """Engines and trainer as two servers that never wait but for each other, from means alone.

        How long a step takes and how many versions an episode sees depend on each other: a few rounds settle it.
        """
        live = (self.schedule.max_staleness + 1) * self.sequences / self.place.engines
        found, costs, means, batch = (
            ThroughputEstimate(math.inf, 0.0, 1.0),
            self.costs,
            self.means,
            round(self.costs.batch),
        )
        for _ in range(4):
            scored = costs.old_logps_s(batch, found.versions)
            trainer = costs.train_s(batch) + costs.publish_s() + scored
            running, busy_s = self._share_engine(live * found.alive(means.tail), found.versions - 1)
            generation = self.sequences * busy_s / (running * self.place.engines)
            episode_s = busy_s + means.tool_s
            stands = (scored + costs.optimizer_s) * costs.route.closing
            if self.schedule.max_staleness == 0:
                step_s = max(generation, episode_s * means.longest / means.tokens) + trainer
            else:
                step_s = max(generation, trainer - stands) + stands
            step_s += costs.load_s()
            found = ThroughputEstimate(
                step_s, episode_s, 1 + min(self.schedule.staleness_bound, episode_s / step_s)
            )
        return found

    def _share_engine(self, live: float, crossed: float) -> tuple[float, float]:
        """Replies that an engine runs, and the seconds that it works on an episode, when so many are live on it.

        Every reply running takes a step's time a token, and waits for the contexts of all that run beside it. Who
        waits for tools leaves its place: what is live is what runs and what waits (Little's law). A context is
        computed again when a version is crossed, and where there are more live episodes than places for contexts.
        """
        costs, means = self.costs, self.means
        context = (means.prompt + means.tokens) / 2
        lost = max(0.0, 1 - self.max_running / live) * (means.turns - 1)
        said = means.tokens - means.prompt - means.sampled
        prefill = means.prompt / self.schedule.group_size + said + context * (crossed + lost)
        prefill_s = prefill * costs.prefill_s(1000) / 1000

        def busy_s(running: float) -> float:
            one = max(1, round(running))
            return means.sampled * costs.step_s(one, round(one * context)) + running * prefill_s

        low, high = 0.0, min(live, self.max_running)
        for _ in range(30):
            middle = (low + high) / 2
            enough = middle * (1 + means.tool_s / busy_s(middle)) < live
            low, high = (middle, high) if enough else (low, middle)
        return high, busy_s(high)


class ThroughputEstimate(NamedTuple):
    """What a formula says of a candidate."""

    step_s: float
    episode_s: float
    versions: float
    """That an episode sees."""

    def alive(self, tail: float) -> float:
        """Share of a ticket's time that an episode lives: it waits for its siblings, and half a step for its batch."""
        return self.episode_s / (self.episode_s * tail + self.step_s / 2) if self.episode_s else 1.0


@dataclass(frozen=True)
class SimulatedCandidate:
    """A candidate, and what came of it when it was simulated."""

    candidate: Candidate
    outcome: SimulationResult

    @property
    def rate(self) -> float:
        """Trained tokens a second: groups a second, each of as many tokens as groups have in the mean. What a batch of
        few steps holds depends on which groups come first."""
        return (
            self.outcome.groups_per_s
            * self.candidate.schedule.group_size
            * self.candidate.means.tokens
        )

    @property
    def spread(self) -> float:
        """Standard error of `rate`, as a share of it, from one round of `max_staleness` + 1 steps to the next."""
        steps, each = self.outcome.steady_s, self.candidate.schedule.max_staleness + 1
        rounds = [
            sum(steps[first : first + each]) for first in range(0, len(steps) - each + 1, each)
        ]
        return stdev(rounds) / mean(rounds) / math.sqrt(len(rounds))


@dataclass(frozen=True)
class Suggestion:
    """The suggestion, and all that it was compared with."""

    best: SimulatedCandidate
    synchronous: SimulatedCandidate
    """All devices train and sample in turns, as published synchronous training does; the policy that trains scores."""
    choices: tuple[SimulatedCandidate, ...]
    """Other lags, batches and windows."""
    splits: tuple[SimulatedCandidate, ...]
    """Other splits of the devices, at the schedule that came out."""
    routes: tuple[Candidate, ...]
    """Every route at the schedule of the suggestion, each with the split that suits it."""
    rated: Mapping[Route, SimulatedCandidate]
    """The routes that were simulated: exact ones that may be the best, and `AVERAGE`."""

    def rate(self, candidate: Candidate) -> float:
        """Of one of `routes`: simulated, or the suggestion's times what the formula says lies between them."""
        if (known := self.rated.get(candidate.name)) is not None:
            return known.rate
        return self.best.rate * candidate.rate / self.best.candidate.rate


def suggest(request: PlanRequest) -> Suggestion:
    """Raises `ConfigError` when the devices are too few, and says how many would do."""
    simulated = _Simulated()
    name: Route = request.route or "snapshot_old"
    window = request.windows[0] if request.windows else 1
    asked = [
        _schedule(request, lag, groups, window) for groups in request.groups for lag in request.lags
    ]
    choices = _within_reach(
        [_best(request, name, schedule) for schedule in asked], simulated, most=MOST_CHOICES
    )
    central = _smallest(choices)
    splits = _within_reach(_splits(central.candidate), simulated, most=MOST_SPLITS)
    central = max((central, *splits), key=lambda rated: rated.rate)
    schedule = central.candidate.schedule
    if (
        not request.windows
        and central.outcome.trainer_wait_share > KEEPS_PACE
        and schedule.max_staleness > 1
    ):
        half = _schedule(
            request,
            schedule.max_staleness,
            schedule.groups_per_step,
            schedule.groups_per_step // 2 + 1,
        )
        choices = (*choices, simulated(_best(request, name, half)))
        central = _smallest([central, choices[-1]])
    routes = [found for other in ROUTES if (found := _suited(central.candidate, other))]
    exact = [
        each for each in routes if each.costs.route.exact and request.route in (None, each.name)
    ]
    least = NEAR * central.candidate.rate
    tried = [each for each in exact if each.rate >= least] + [
        each for each in routes if each.name == AVERAGE
    ]
    rated = {each.name: simulated(each) for each in tried} | {name: central}
    best = _smallest([central, *(rated[each.name] for each in exact if each.name in rated)])
    in_turns = replace(schedule, max_staleness=0, lookahead_window=1)
    synchronous = max(
        candidates(request, "current_recompute", in_turns, colocated=True),
        key=lambda each: each.rate,
    )
    return Suggestion(best, simulated(synchronous), choices, splits, tuple(routes), rated)


class _Simulated(dict[tuple[AnalyticCosts, ScheduleConfig], SimulationResult]):
    """Simulates what has not been: several routes cost the same."""

    def __call__(self, candidate: Candidate) -> SimulatedCandidate:
        costs, schedule, place, request = (
            candidate.costs,
            candidate.schedule,
            candidate.place,
            candidate.request,
        )
        what = replace(costs, route=replace(costs.route, exact=False, idle=False)), schedule
        if what not in self:
            request.tell(f"simulating {candidate.name}: {place.told}; {sizes_of(schedule)}")
            fleet = Fleet(
                engines=place.engines, max_running=candidate.max_running, colocated=place.colocated,
                cache_tokens=int(costs.setting.room(place.tp)),
            )  # fmt: skip
            steps, waits = (schedule.max_staleness + 1) * (request.rounds + 1), needs(costs.route)
            self[what] = simulate(
                request.workload, fleet, schedule, costs, steps=steps, needs=waits
            )
        return SimulatedCandidate(candidate, self[what])


def sizes_of(schedule: ScheduleConfig) -> str:
    return f"max_staleness {schedule.max_staleness}, {schedule.groups_per_step} groups, window {schedule.lookahead_window}"


def _schedule(request: PlanRequest, lag: int, groups: int, window: int) -> ScheduleConfig:
    """In which no token is older than `lag`: what a window may pass over is taken off `max_staleness`."""
    least = staleness_bound(1, groups, window)
    if 0 < lag < least:
        raise ConfigError(
            f"--window {window} with {groups} groups a step needs --lag {least} or more, got {lag}"
        )
    lag -= (least - 1) * (lag > 0)
    return ScheduleConfig(
        max_staleness=lag,
        groups_per_step=groups,
        group_size=request.group_size,
        lookahead_window=window,
    )


def candidates(
    request: PlanRequest, name: Route, schedule: ScheduleConfig, *, colocated: bool = False
) -> Iterator[Candidate]:
    """Every split of the devices that fits, with and without computing activations again."""
    batch = schedule.groups_per_step * schedule.group_size * request.setting.episodes.tokens
    for setting in (
        replace(request.setting, gradient_checkpointing=gradient_checkpointing)
        for gradient_checkpointing in (False, True)
    ):
        places = _taking_turns if colocated else placements
        for place in places(setting, name, schedule, devices=request.devices):
            live = schedule.staleness_bound + 1
            costs = AnalyticCosts(
                setting=setting, place=place, route=ROUTES[name], batch=batch, live=live
            )
            yield Candidate(request, costs, name, schedule)


def _taking_turns(
    setting: TrainingSetup, name: Route, _: ScheduleConfig, *, devices: int
) -> Iterator[Placement]:
    """All devices do both."""
    if setting.fits(devices, ROUTES[name]):
        yield from (
            Placement(devices, devices // tp, tp, colocated=True)
            for tp in engine_sizes(setting)
            if tp <= devices
        )


def placements(
    setting: TrainingSetup, name: Route, schedule: ScheduleConfig, *, devices: int
) -> Iterator[Placement]:
    """Splits in steps of a sixteenth of the devices at most. What makes up no engine trains."""
    for tp in engine_sizes(setting):
        for trainers in range(1, devices, max(1, devices // _SPLITS)):
            scorers = _scorers(setting, name, schedule, trainers)
            engines, left = divmod(devices - trainers - scorers, tp)
            if engines > 0 and left < max(1, devices // _SPLITS):
                place = Placement(trainers + left, engines, tp, scorers)
                if setting.fits(place.trainers, ROUTES[name]):
                    yield place


def engine_sizes(setting: TrainingSetup) -> tuple[int, ...]:
    """Devices that an engine can have: the fewest that hold the model and some episodes, and more for more of these."""
    least = max(LEAST_RUNNING * setting.episodes.tokens, setting.episodes.longest)
    return tuple(tp for tp in _TP if setting.model.heads % tp == 0 and setting.room(tp) >= least)


def _scorers(setting: TrainingSetup, name: Route, schedule: ScheduleConfig, trainers: int) -> int:
    """Devices that score as fast as `trainers` train, with two versions a trajectory; and that hold the model."""
    route = ROUTES[name]
    if not route.apart:
        return 0
    held = math.ceil(setting.model.copy_bytes / (setting.device.memory * setting.shares.memory))
    versions = min(2, schedule.max_staleness + 1)
    return max(
        held, math.ceil(trainers * route.forwarded(versions, given=setting.episodes.given) / 3)
    )


def _try(request: PlanRequest, name: Route, schedule: ScheduleConfig) -> Candidate | None:
    return max(
        candidates(request, name, schedule), key=lambda candidate: candidate.rate, default=None
    )


def _best(request: PlanRequest, name: Route, schedule: ScheduleConfig) -> Candidate:
    if found := _try(request, name, schedule):
        return found
    raise ConfigError(_too_few(request, name, schedule))


def _too_few(request: PlanRequest, name: Route, schedule: ScheduleConfig) -> str:
    setting, gb = replace(request.setting, gradient_checkpointing=True), 1e9
    model, limit, passes = (
        setting.model,
        setting.device.memory * setting.shares.memory,
        setting.pass_bytes,
    )
    sharded = setting.trainer_bytes(1, ROUTES[name]) - passes
    trainers = math.ceil(sharded / max(1.0, limit - passes))
    if passes >= limit:
        helps = "Shorter episodes (--longest) would, or a larger device"
    elif sizes := engine_sizes(setting):
        helps = f"--gpus {trainers + _scorers(setting, name, schedule, trainers) + sizes[0]} would"
    else:
        helps = f"Larger devices are needed: an engine has at most {max(_TP)}"
    return (
        f"{model.name} with episodes of {setting.episodes.longest:,.0f} tokens does not fit {request.devices} "
        f"{setting.device.name}, each with {limit / gb:.0f} GB: training takes {sharded / gb:.0f} GB (18 bytes a "
        f"parameter, and the route's) and {passes / gb:.0f} GB for a pass on each, an engine "
        f"{model.copy_bytes / gb:.0f} GB for weights, and room for {LEAST_RUNNING} episodes. {helps}"
    )


def _within_reach(
    these: Sequence[Candidate], simulated: _Simulated, *, most: int
) -> tuple[SimulatedCandidate, ...]:
    """The best by their estimates, simulated."""
    ranked = sorted(these, key=lambda candidate: -candidate.rate)[:most]
    return tuple(
        simulated(candidate) for candidate in ranked if candidate.rate >= REACH * ranked[0].rate
    )


def _splits(candidate: Candidate) -> list[Candidate]:
    """By trainers and engines, each with the better way to keep activations."""
    every = sorted(
        candidates(candidate.request, candidate.name, candidate.schedule),
        key=lambda each: each.rate,
    )
    return list({each.place: each for each in every}.values())


def _suited(candidate: Candidate, name: Route) -> Candidate | None:
    """Another route on the same devices, with activations computed again if it must be, or else where it fits best."""
    place, route = candidate.place, ROUTES[name]
    for setting in (
        candidate.costs.setting,
        replace(candidate.costs.setting, gradient_checkpointing=True),
    ):
        if route.apart == bool(place.scorers) and setting.fits(place.trainers, route):
            return replace(candidate, costs=replace(candidate.costs, setting=setting)).with_route(
                name
            )
    return _try(candidate.request, name, candidate.schedule)


def _smallest(rated: Sequence[SimulatedCandidate]) -> SimulatedCandidate:
    """With the smallest staleness, then batch, then window, of those near the best."""
    near = [each for each in rated if each.rate >= NEAR * max(other.rate for other in rated)]
    schedules = [each.candidate.schedule for each in near]
    sizes = [
        (each.staleness_bound, each.groups_per_step, each.lookahead_window) for each in schedules
    ]
    return near[sizes.index(min(sizes))]
