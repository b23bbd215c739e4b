"""Which configuration to run on so many devices: every split is bounded by a formula, the best are simulated."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from afterimage.config import ConfigError, Route, ScheduleConfig
from afterimage.plan.analytic import MICRO_TOKENS, Analytic, Placement, Setting
from afterimage.plan.hardware import DEVICES
from afterimage.plan.outcome import WAITS_LITTLE
from afterimage.plan.route_costs import ROUTES
from afterimage.plan.simulate import Fleet, Outcome, Workload, simulate

NEAR = 0.95
"""Of the best throughput: what reaches it is as good, and the smaller staleness, batch and window are taken."""
REACH = 0.75
"""Of the best estimate: what is estimated at less is not simulated."""
MOST_CHOICES = 6
"""Lags and batches that are simulated."""
LEAST_RUNNING = 8
"""Mean episodes that an engine must have memory for; with fewer, tensor parallelism is raised."""
MOST_RUNNING = 256
"""Replies of an engine at the same time: vLLM's `max_num_seqs` where it is not told."""
_TP = (1, 2, 4, 8)
_SPLITS = 16


class Episodes(NamedTuple):
    """Means over episodes of a workload."""

    prompt: float
    sampled: float
    tokens: float
    turns: float
    tool_s: float
    """Of all answers of an episode together."""
    longest: float
    """Tokens of the longest one drawn."""
    tail: float
    """How much more the longest of a group's replies is than the mean."""

    @classmethod
    def of(cls, workload: Workload, *, group_size: int) -> "Episodes":
        """From 64 groups."""
        random = np.random.default_rng(0)
        groups = [workload.group(random, group_size) for _ in range(64)]
        drawn = [shape for group in groups for shape in group]
        waits = sum(turn.waits for shape in drawn for turn in shape.turns) / len(drawn)
        tool_s = float(np.minimum(workload.tool_s.draw(random, 10_000), workload.timeout_s).mean())
        columns = [(shape.prompt, shape.sampled, shape.tokens, len(shape.turns)) for shape in drawn]
        prompt, sampled, tokens, turns = (sum(column) / len(drawn) for column in zip(*columns, strict=True))
        slowest = sum(max(shape.sampled for shape in group) for group in groups) / len(groups)
        longest = max(shape.tokens for shape in drawn)
        return cls(prompt, sampled, tokens, turns, waits * tool_s, longest, slowest / sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked. Several lags, batches or windows are choices."""

    setting: Setting
    workload: Workload
    episodes: Episodes
    devices: int
    lags: tuple[int, ...] = (1, 2, 4)
    groups: tuple[int, ...] = (16, 32, 64)
    group_size: int = 8
    windows: tuple[int, ...] = ()
    """None given: strict order, half a batch and a batch are tried."""
    route: Route | None = None
    """None given: the exact route that gives most."""
    rounds: int = 3
    """Of a simulation, after the one that fills the line; steps are uneven, and repeat with the tickets of a round."""
    tell: Callable[[str], None] = lambda text: None
    """Progress."""


@dataclass(frozen=True)
class Candidate:
    """One configuration, and what the formula says of it."""

    request: Request
    costs: Analytic
    name: Route
    schedule: ScheduleConfig

    @property
    def place(self) -> Placement:
        return self.costs.place

    def with_window(self, window: int) -> "Candidate":
        schedule = replace(self.schedule, window=window)
        return _candidate(self.request, self.name, schedule, setting=self.costs.setting, place=self.place)

    @property
    def sequences(self) -> int:
        """Of a batch."""
        return self.schedule.groups_per_step * self.schedule.group_size

    @cached_property
    def max_running(self) -> int:
        """Replies of an engine: what there is memory for, and no more than are live."""
        live = math.ceil((self.schedule.max_staleness + 1) * self.sequences / self.place.engines)
        return max(1, min(live, MOST_RUNNING, int(self.costs.setting.room(self.place.tp) // self._episodes.tokens)))

    @property
    def rate(self) -> float:
        """Trained tokens a second, estimated."""
        return self.costs.batch / self.estimate.step_s

    @cached_property
    def estimate(self) -> "Estimate":
        """Engines and trainer as two servers that never wait but for each other, from means alone.

        How long a step takes and how many versions an episode sees depend on each other: a few rounds settle it.
        """
        live = (self.schedule.max_staleness + 1) * self.sequences / self.place.engines
        found = Estimate(step_s=math.inf, episode_s=0.0, versions=1.0)
        for _ in range(4):
            costs, crossed = self.costs, found.versions - 1
            batch = round(costs.batch)
            trainer = costs.train_s(batch) + costs.publish_s() + costs.old_logps_s(batch, found.versions)
            running, busy_s = self._share_engine(live * found.alive(self._episodes.tail), crossed)
            generation = self.sequences * busy_s / (running * self.place.engines)
            episode_s = busy_s + self._episodes.tool_s
            load_s = replace(costs, versions=found.versions).load_s()
            if self.schedule.max_staleness == 0:
                step_s = max(generation, episode_s * self._episodes.longest / self._episodes.tokens) + trainer + load_s
            else:
                step_s = max(generation, trainer) + load_s
            versions = 1 + min(self.schedule.staleness_bound, episode_s / step_s)
            found = Estimate(step_s=step_s, episode_s=episode_s, versions=versions)
        return found

    def _share_engine(self, live: float, crossed: float) -> tuple[float, float]:
        """Replies that an engine runs, and the seconds that it works on an episode, when so many are live on it.

        Every reply running takes a step's time a token, and waits for the contexts of all that run beside it. Who
        waits for tools leaves its place: what is live is what runs and what waits (Little's law). A context is
        computed again when a version is crossed, and where there are more live episodes than places for contexts.
        """
        costs, means = self.costs, self._episodes
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

    @property
    def _episodes(self) -> Episodes:
        return self.request.episodes


class Estimate(NamedTuple):
    """What a formula says of a candidate."""

    step_s: float
    episode_s: float
    versions: float
    """That an episode sees."""

    def alive(self, tail: float) -> float:
        """Share of a ticket's time that an episode lives: it waits for its siblings, and half a step for its batch."""
        return self.episode_s / (self.episode_s * tail + self.step_s / 2) if self.episode_s else 1.0


@dataclass(frozen=True)
class Rated:
    """A candidate, and what came of it when it was simulated."""

    candidate: Candidate
    outcome: Outcome

    @property
    def rate(self) -> float:
        return self.outcome.trained_tokens_per_s

    @property
    def versions(self) -> float:
        """That an episode sees."""
        return 1 + min(self.outcome.staleness_bound, self.outcome.episode_s / self.outcome.mean_step_s)

    @property
    def extra_s(self) -> float:
        """Trainer's seconds of a step that are the route's."""
        costs = self.candidate.costs
        return costs.route_s(round(costs.batch), self.versions) + costs.encode_s

    @property
    def strict(self) -> bool:
        return self.candidate.schedule.window == 1 and self.candidate.schedule.max_staleness > 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Half a batch and a batch."""
        groups = self.candidate.schedule.groups_per_step
        return tuple(sorted({max(2, groups // 2), max(2, groups)}))


@dataclass(frozen=True)
class Plan:
    """The suggestion, and all that it was compared with."""

    best: Rated
    synchronous: Rated
    choices: tuple[Rated, ...]
    """Other lags, batches and windows, with the route of the suggestion."""
    routes: tuple[Rated, ...]
    """Every route at the schedule of the suggestion, each with the split that suits it."""
    splits: tuple[Rated, ...]
    """The suggestion with a device more or less in training."""


def suggest(request: Request) -> Plan:
    """Raises `ConfigError` when the devices are too few, and says how many would do."""
    simulated = _Simulated(request.tell)
    name: Route = request.route or "snapshot_old"
    asked = [_schedule(request, lag, groups) for groups in request.groups for lag in request.lags]
    choices = _within_reach([_best(request, name, schedule) for schedule in asked], simulated)
    central = _smallest(choices)
    splits = _climb(central, simulated)
    central = max(splits, key=lambda rated: rated.rate)
    if not request.windows and central.outcome.trainer_wait_share > WAITS_LITTLE and central.strict:
        wider = [simulated(central.candidate.with_window(window)) for window in central.windows]
        choices, central = (*choices, *wider), _smallest([central, *wider])
    routes = []
    for other in ROUTES:
        candidate = _same_split(central.candidate, other) or _try(request, other, central.candidate.schedule)
        routes += [_eager(simulated(candidate), simulated)] if candidate else []
    exact = [r for r in routes if r.candidate.costs.route.exact and request.route in (None, r.candidate.name)]
    best = _smallest([central, *exact])
    at_once = replace(best.candidate.schedule, max_staleness=0, window=1)
    synchronous = _best(request, best.candidate.name, at_once)
    return Plan(best, simulated(synchronous), choices, tuple(routes), splits)


class _Simulated:
    """Simulates what has not been: several routes cost the same."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: dict[tuple[Analytic, ScheduleConfig], Outcome] = {}

    def __call__(self, candidate: Candidate) -> "Rated":
        costs, schedule, place = candidate.costs, candidate.schedule, candidate.place
        what = replace(costs, route=replace(costs.route, error=0.0, exact=False)), schedule
        if what not in self._known:
            self._tell(
                f"simulating {candidate.name} on {place.told}, staleness {schedule.max_staleness}, "
                f"{schedule.groups_per_step} groups a step, window {schedule.window}"
            )
            fleet = Fleet(engines=place.engines, max_running=candidate.max_running)
            steps = (schedule.max_staleness + 1) * (candidate.request.rounds + 1)
            workload = candidate.request.workload
            self._known[what] = simulate(workload, fleet, schedule, costs, steps=steps)
        return Rated(candidate, self._known[what])


def _schedule(request: Request, lag: int, groups: int) -> ScheduleConfig:
    window = request.windows[0] if request.windows else 1
    return ScheduleConfig(max_staleness=lag, groups_per_step=groups, group_size=request.group_size, window=window)


def candidates(request: Request, name: Route, schedule: ScheduleConfig) -> Iterator[Candidate]:
    """Every split of the devices that fits, with and without computing activations again."""
    for recompute in (False, True):
        setting = replace(request.setting, recompute=recompute)
        for place in placements(setting, name, schedule, devices=request.devices):
            yield _candidate(request, name, schedule, setting=setting, place=place)


def _candidate(
    request: Request, name: Route, schedule: ScheduleConfig, *, setting: Setting, place: Placement
) -> Candidate:
    batch = schedule.groups_per_step * schedule.group_size * request.episodes.tokens
    live = schedule.staleness_bound + 1
    first = Analytic(setting=setting, place=place, route=ROUTES[name], batch=batch, live=live)
    versions = Candidate(request, first, name, schedule).estimate.versions
    return Candidate(request, replace(first, versions=versions), name, schedule)


def placements(setting: Setting, name: Route, schedule: ScheduleConfig, *, devices: int) -> Iterator[Placement]:
    """Splits in steps of a sixteenth of the devices at most. What makes up no engine trains."""
    for tp in engine_sizes(setting):
        for trainers in range(1, devices, max(1, devices // _SPLITS)):
            scorers = _scorers(setting, name, schedule, trainers)
            engines, left = divmod(devices - trainers - scorers, tp)
            if engines > 0 and left < max(1, devices // _SPLITS):
                place = Placement(trainers + left, engines, tp, scorers)
                if setting.fits(place.trainers, ROUTES[name]):
                    yield place


def engine_sizes(setting: Setting) -> tuple[int, ...]:
    """Devices that an engine can have: the fewest that hold the model and some episodes, and more for more of these."""
    least = max(LEAST_RUNNING * setting.episode, setting.longest)
    return tuple(tp for tp in _TP if setting.model.heads % tp == 0 and setting.room(tp) >= least)


def _scorers(setting: Setting, name: Route, schedule: ScheduleConfig, trainers: int) -> int:
    """Devices that score as fast as `trainers` train, with two versions a trajectory; and that hold the model."""
    route = ROUTES[name]
    if not route.apart:
        return 0
    held = math.ceil(setting.model.copy_bytes / (setting.device.memory * setting.shares.memory))
    versions = min(2, schedule.max_staleness + 1)
    return max(held, math.ceil(trainers * route.forwarded(versions, given=setting.given) / 3))


def _try(request: Request, name: Route, schedule: ScheduleConfig) -> Candidate | None:
    return max(candidates(request, name, schedule), key=lambda candidate: candidate.rate, default=None)


def _best(request: Request, name: Route, schedule: ScheduleConfig) -> Candidate:
    found = _try(request, name, schedule)
    if found is None:
        raise ConfigError(_too_few(request, name, schedule))
    return found


def _too_few(request: Request, name: Route, schedule: ScheduleConfig) -> str:
    setting, route = replace(request.setting, recompute=True), ROUTES[name]
    model, device, gb = setting.model, setting.device, 1e9
    longest = f"episodes of {setting.longest:,.0f} tokens"
    told = f"{model.name} with {longest} does not fit {request.devices} {device.name}: "
    limit = device.memory * setting.shares.memory
    passes = setting.trainer_bytes(1, route) - _sharded(setting, name)
    sizes = engine_sizes(setting)
    if passes >= limit:
        micro = max(MICRO_TOKENS, setting.longest)
        return told + (
            f"one training pass of {micro:,.0f} tokens holds {passes / gb:.0f} of a device's {limit / gb:.0f} GB, "
            "however many devices there are. Shorter episodes would, or a larger device"
        )
    if not sizes:
        return told + (
            f"eight hold {8 * limit / gb:.0f} GB, and an engine needs {model.copy_bytes / gb:.0f} GB for weights and "
            f"room for {LEAST_RUNNING} episodes. Larger devices are needed"
        )
    trainers = math.ceil(_sharded(setting, name) / (limit - passes))
    needed = trainers + _scorers(setting, name, schedule, trainers) + sizes[0]
    others = [each.name for each in DEVICES.values() if each.memory > device.memory]
    larger = f", or a device with more memory ({', '.join(others)})" if others else ""
    return told + (
        f"training takes {_sharded(setting, name) / gb:.0f} GB (18 bytes a parameter, and the route's), so {trainers} "
        f"devices of {limit / gb:.0f} GB with {passes / gb:.0f} GB for a pass on each, and an engine takes {sizes[0]}. "
        f"--gpus {needed} would{larger}"
    )


def _sharded(setting: Setting, name: Route) -> float:
    """What the trainer's devices divide among themselves."""
    return setting.trainer_bytes(1, ROUTES[name]) - setting.pass_bytes


def _within_reach(these: Sequence[Candidate], simulated: _Simulated) -> tuple[Rated, ...]:
    """The best by their estimates, simulated."""
    ranked = sorted(these, key=lambda candidate: -candidate.rate)[:MOST_CHOICES]
    return tuple(simulated(candidate) for candidate in ranked if candidate.rate >= REACH * ranked[0].rate)


def _climb(rated: Rated, simulated: _Simulated) -> tuple[Rated, ...]:
    """Other splits beside it, as long as one is better."""
    found = {rated.candidate.place: rated}
    while True:
        best = max(found.values(), key=lambda each: each.rate)
        beside = [other for other in _neighbours(best.candidate) if other.place not in found]
        if not beside:
            return tuple(sorted(found.values(), key=lambda each: each.candidate.place.trainers))
        found |= {other.place: simulated(other) for other in beside}


def _same_split(candidate: Candidate, name: Route) -> Candidate | None:
    """Another route on the same devices, if it fits there."""
    setting, place, route = candidate.costs.setting, candidate.place, ROUTES[name]
    if route.apart != bool(place.scorers) or not setting.fits(place.trainers, route):
        return None
    return _candidate(candidate.request, name, candidate.schedule, setting=setting, place=place)


def _smallest(rated: Sequence[Rated]) -> Rated:
    """With the smallest staleness, then batch, then window, of those near the best."""
    near = [each for each in rated if each.rate >= NEAR * max(other.rate for other in rated)]
    return min(near, key=lambda each: _size(each.candidate.schedule))


def _size(schedule: ScheduleConfig) -> tuple[int, int, int]:
    return schedule.max_staleness, schedule.groups_per_step, schedule.window


def _eager(rated: Rated, simulated: _Simulated) -> Rated:
    """`eager` again, once it is known how much the trainer waits: tokens that come in that time are scored in it."""
    candidate = rated.candidate
    if not candidate.costs.route.idle:
        return rated
    covered = min(1.0, rated.outcome.trainer_wait_share)
    return simulated(replace(candidate, costs=replace(candidate.costs, covered=covered)))


def _neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """With the next smaller and the next larger number of trainers that fits."""
    others = [
        other
        for other in candidates(candidate.request, candidate.name, candidate.schedule)
        if (other.costs.setting, other.place.tp) == (candidate.costs.setting, candidate.place.tp)
    ]
    here = candidate.place.trainers
    smaller = [other for other in others if other.place.trainers < here]
    larger = [other for other in others if other.place.trainers > here]
    yield from (*smaller[-1:], *larger[:1])
