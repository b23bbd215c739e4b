"""Enumerate configurations for a number of devices, and estimate the throughput of each.

A candidate is a division of the devices among trainer and engines (`Placement`), a schedule and a
route (a method to get old log-probabilities). A formula estimates its throughput from mean
durations.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from unstale.analysis.planner.analytic import (
    ENGINE_SIZES,
    MIN_EPISODES,
    PASS_TOKENS,
    AnalyticCosts,
    Placement,
    TrainingSetup,
    colocated_placements,
    placements,
    scoring_devices,
)
from unstale.analysis.planner.route_costs import RouteCost, route_cost
from unstale.analysis.planner.workload import EpisodeStats, Workload
from unstale.config import ConfigError, ScheduleConfig, staleness_bound

MAX_TRAINERS = 1024
"""Largest number of training devices that an error message suggests to use."""
ADVISED_RANK = 16
"""Rank of the LoRA adapters that an error message suggests if training all weights does not fit."""
MAX_RUNNING = 256
"""Largest number of replies that one engine samples at once: vLLM's default `max_num_seqs`."""
SYNCHRONOUS_ROUTE = "current_recompute"
"""The method to get old log-probabilities in synchronous training. It is exact there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A user's request to the planner. Of several lags, groups or windows, the planner chooses the
    best.
    """

    setup: TrainingSetup
    workload: Workload
    devices: int
    lags: tuple[int, ...] = (1, 2, 4)
    """Limits to try on the staleness of a token, in versions."""
    groups: tuple[int, ...] = (16,)
    group_size: int = 8
    windows: tuple[int, ...] = ()
    """Look-ahead windows to try, in groups. If empty, strict order (window 1) is tried and, if the
    trainer then waits, also a window of half a batch.
    """
    route: str | None = None
    """Name of the route (method to get `old_logp`). None chooses the exact one with the highest
    throughput.
    """
    rounds: int = 10
    """Number of rounds to simulate, each of maximum staleness + 1 steps, after a first round in
    which the queue fills up.
    """
    on_progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Candidate:
    """A configuration, with formulas that estimate its throughput."""

    request: PlanRequest
    costs: AnalyticCosts
    name: str
    """Name of the route, the method to get old log-probabilities."""
    schedule: ScheduleConfig

    @property
    def placement(self) -> Placement:
        return self.costs.placement

    @property
    def place(self) -> str:
        """The division of the devices in words."""
        return self.placement.describe(self.costs.setup.device.unit)

    @property
    def episodes(self) -> EpisodeStats:
        return self.costs.setup.episodes

    def with_route(self, name: str) -> "Candidate":
        costs = replace(self.costs, route=route_cost(name), absorbed_s=0.0)
        return replace(self, name=name, costs=costs).with_idle_scoring()

    def with_idle_scoring(self) -> "Candidate":
        """Return the candidate with its `costs.absorbed_s` set, if its route scores in idle time.

        These are the seconds by which generation takes longer than the trainer's other work. Routes
        (methods to get `old_logp`) without `needs.idle` return the candidate unchanged.
        """
        if not self.costs.route.needs.idle or self.placement.colocated:
            return self
        unscored = replace(self, costs=replace(self.costs, absorbed_s=math.inf))
        waits_s = unscored.estimate.step_s - unscored.trainer_s
        return replace(self, costs=replace(self.costs, absorbed_s=max(0.0, waits_s)))

    @property
    def trainer_s(self) -> float:
        """Seconds of a step in which the trainer trains, publishes and computes old
        log-probabilities.
        """
        costs = self.costs
        batch = round(costs.batch)
        scoring_s = costs.old_logps_s(batch, self.estimate.versions)
        return costs.train_s(batch) + costs.publish_s() + scoring_s

    @property
    def route_s(self) -> float:
        """Seconds that computing old log-probabilities adds to the trainer's step.

        The encoding of deltas (differences between versions) counts only if engines receive none,
        because otherwise it is needed in any case.
        """
        costs = self.costs
        scoring = costs.old_logps_s(round(costs.batch), self.estimate.versions)
        return scoring + (0 if costs.sends_deltas else costs.encode_s)

    @property
    def sequences(self) -> int:
        """Number of sequences in a batch."""
        return self.schedule.groups_per_step * self.schedule.group_size

    @cached_property
    def max_running(self) -> int:
        """Largest number of replies that one engine samples at once.

        The engine's memory, the staleness bound and `MAX_RUNNING` limit it.
        """
        live = math.ceil(self._live_per_engine)
        in_memory = self.costs.context_tokens // self.episodes.tokens
        return max(1, min(live, MAX_RUNNING, int(in_memory)))

    @property
    def _live_per_engine(self) -> float:
        return (self.schedule.max_staleness + 1) * self.sequences / self.placement.engines

    @property
    def rate(self) -> float:
        """Estimated number of trained tokens per second."""
        return self.costs.batch / self.estimate.step_s

    @cached_property
    def estimate(self) -> "ThroughputEstimate":
        """The durations of a step and an episode, estimated from mean durations.

        A step takes as long as the slower of generation and training, which overlap. In synchronous
        training, and when both use the same devices, it takes the sum of the two. The optimizer
        step waits until engines have loaded the previous version; unless past versions are kept,
        scoring and training wait too. The time of a step depends on the number of versions that
        sample an episode, and that number depends on the time of a step. Four iterations converge.
        """
        costs = self.costs
        batch = round(costs.batch)
        estimate = ThroughputEstimate(math.inf, 0.0, 1.0)
        for _ in range(4):
            scoring_s = costs.old_logps_s(batch, estimate.versions)
            train_s, optimizer_s = costs.train_s(batch), costs.optimizer_s
            engines_s = costs.stage_s() + costs.load_s()
            needs = costs.route.needs
            ahead_s = scoring_s + train_s - optimizer_s  # before the optimizer step, which waits
            waits_s = engines_s
            if needs.snapshots and not needs.trained_weights:
                waits_s = max(0.0, engines_s - ahead_s)
            trainer_s = costs.publish_s() + ahead_s + waits_s + optimizer_s
            live = self._live_per_engine * estimate.alive(self.episodes.tail)
            running, engine_s = self._share_engine(live, estimate.versions - 1)
            generation_s = self.sequences * engine_s / (running * self.placement.engines)
            held_s = costs.probe_s() / 2 * (estimate.versions - 1)
            episode_s = engine_s + self.episodes.tool_s + held_s
            if self.schedule.max_staleness == 0 or self.placement.colocated:
                slowest_s = episode_s * self.episodes.slowest
                sampled_s = generation_s
                if self.schedule.max_staleness == 0:
                    sampled_s = max(generation_s, slowest_s)
                serial_s = costs.publish_s() + scoring_s + train_s + engines_s
                step_s = sampled_s + serial_s
            else:
                paused_s = (scoring_s + optimizer_s) * needs.closing
                generation_s += costs.load_s()
                step_s = max(generation_s, trainer_s - paused_s) + paused_s
            versions = 1 + min(self.schedule.staleness_bound, episode_s / step_s)
            estimate = ThroughputEstimate(step_s, episode_s, versions)
        return estimate

    def _share_engine(self, live: float, crossed: float) -> tuple[float, float]:
        """Return how many replies an engine runs on average, and its seconds for an episode.

        `live` is the number of episodes in flight per engine. `crossed` is the number of new
        versions that are loaded during an episode. By Little's law, the share of live episodes that
        run is the share of their time that they spend at the engine and not in tool calls. That
        share depends on the number of running replies, so it is found by bisection. A running reply
        waits while the engine computes the contexts of others. A context is computed again after
        each new version, and after an eviction, which happens if there are more episodes than
        `max_running`.
        """
        costs = self.costs
        means = self.episodes
        context = (means.prompt + means.tokens) / 2
        evicted = max(0.0, 1 - self.max_running / live) * (means.turns - 1)
        answers = means.tokens - means.prompt - means.sampled
        prompt = means.prompt / self.schedule.group_size
        prefill = prompt + answers + context * (crossed + evicted)
        prefill_s = prefill * costs.prefill_s(1000) / 1000

        def engine_s(running: float) -> float:
            replies = max(1, round(running))
            step_s = costs.step_s(replies, round(replies * context))
            return means.sampled * step_s + running * prefill_s

        low = 0.0
        high = min(live, self.max_running)
        for _ in range(30):
            middle = (low + high) / 2
            if middle * (1 + means.tool_s / engine_s(middle)) < live:
                low = middle
            else:
                high = middle
        return high, engine_s(high)


class ThroughputEstimate(NamedTuple):
    """Mean durations of a step and an episode, in seconds, as the formula estimates them."""

    step_s: float
    episode_s: float
    versions: float
    """Mean number of versions of the weights that sample one episode."""

    def alive(self, tail: float) -> float:
        """Return the share of the time from an episode's start to its training in which it is
        unfinished.

        A finished episode waits for the longest episode of its group, which takes `tail` times the
        mean. Then it waits half a step for the other groups of its batch.
        """
        if not self.episode_s:
            return 1.0
        return self.episode_s / (self.episode_s * tail + self.step_s / 2)


def make_schedule(request: PlanRequest, lag: int, groups: int, window: int) -> ScheduleConfig:
    """Return the schedule in which no token is older than `lag` versions.

    `groups` are the groups per step. `window` is the look-ahead window, which can make tokens
    older. So `max_staleness` is lower than `lag` by the versions that the window can add. Raises
    `ConfigError` if `lag` is too small for the window.
    """
    smallest = staleness_bound(1, groups, window)
    if 0 < lag < smallest:
        raise ConfigError(
            f"--window {window} with {groups} groups a step needs --lag {smallest} or more; "
            f"got {lag}"
        )
    max_staleness = lag - (smallest - 1) if lag else 0
    return ScheduleConfig(
        max_staleness=max_staleness,
        groups_per_step=groups,
        group_size=request.group_size,
        lookahead_window=window,
    )


def candidates(
    request: PlanRequest, name: str, schedule: ScheduleConfig, *, colocated: bool = False
) -> Iterator[Candidate]:
    """Yield a candidate for every division of the devices that fits into memory.

    All get `old_logp` by the route `name`.

    Each is tried with and without gradient checkpointing. Two means to save memory are used only if
    a division does not fit otherwise: several devices divide a microbatch, and the optimizer's
    state lies in main memory.
    """
    batch = schedule.groups_per_step * schedule.group_size * request.setup.episodes.tokens
    live = schedule.staleness_bound + 1
    route = route_cost(name)
    least: dict[Placement, tuple[bool, int]] = {}
    """For each division: the first pair of `offload` and `context` with which it fits."""
    choices = product((False, True), request.setup.context_sizes, (False, True))
    for offload, context, checkpointing in choices:
        if offload and request.setup.device.is_core:  # a core's memory is main memory
            continue
        setup = replace(
            request.setup, gradient_checkpointing=checkpointing, context=context, offload=offload
        )
        if colocated or request.devices == 1:
            places = colocated_placements(setup, route, devices=request.devices)
        else:
            places = placements(
                setup, route, devices=request.devices, max_staleness=schedule.max_staleness
            )
        for placement in places:
            if least.setdefault(placement, (offload, context)) < (offload, context):
                continue
            for divided in _divided(setup, placement, route):
                costs = AnalyticCosts(
                    setup=_with_passes(divided, placement, route),
                    placement=placement,
                    route=route,
                    batch=batch,
                    live=live,
                )
                yield Candidate(request, costs, name, schedule).with_idle_scoring()


def _divided(
    setup: TrainingSetup, placement: Placement, route: RouteCost
) -> Iterator[TrainingSetup]:
    """Yield the setup with each way to divide the model among the trainer's devices that fits.

    These are one copy or one on each node, and experts that are gathered or whole on a device.
    """
    yield setup
    trainers, node = placement.trainers, setup.device.node
    if not setup.is_sharded(trainers) or setup.lora_rank or placement.colocated:
        return
    nodes = trainers // node if trainers % node == 0 else 1
    for replicas, is_whole in product({1, nodes}, (False, True)):
        divided = replace(setup, replicas=replicas, expert_parallel=is_whole)
        experts = setup.model.experts
        has_experts = experts > 0 and experts % divided.shards(trainers) == 0
        if divided != setup and has_experts >= is_whole and divided.fits(trainers, route):
            yield divided


def _with_passes(setup: TrainingSetup, placement: Placement, route: RouteCost) -> TrainingSetup:
    """Return the setup with the largest passes that fit into memory. On a single device passes keep
    their size, because an engine uses the rest of its memory.
    """
    if placement.devices == 1:
        return setup
    return setup.with_largest_passes(placement.trainers, route)


def best_candidate(request: PlanRequest, name: str, schedule: ScheduleConfig) -> Candidate:
    if best := best_or_none(request, name, schedule):
        return best
    raise ConfigError(_too_few(request, name, schedule))


def best_or_none(request: PlanRequest, name: str, schedule: ScheduleConfig) -> Candidate | None:
    return max(
        candidates(request, name, schedule), key=lambda candidate: candidate.rate, default=None
    )


def _too_few(request: PlanRequest, name: str, schedule: ScheduleConfig) -> str:
    gb = 1e9
    route = route_cost(name)
    trainers, setup = _fewest_trainers(request.setup, route)
    unsharded = setup.activation_bytes + setup.computed_bytes(2)
    sharded = setup.sharded_bytes(route, 2)
    each = setup.state_bytes(2) / setup.trained
    divided = f" (with cluster.context {setup.context})" if setup.context > 1 else ""
    scorers = scoring_devices(setup, route, trainers, max_staleness=schedule.max_staleness)
    if not trainers or (scorers and setup.scorer_bytes(scorers) > setup.memory):
        advice = "Use shorter episodes (--longest) or larger devices"
    elif sizes := setup.engine_sizes:
        advice = f"Use --gpus {trainers + scorers + sizes[0]}{_adapters(request, name, schedule)}"
    else:
        advice = f"Use larger devices: an engine has at most {max(ENGINE_SIZES)}"
    return (
        f"{setup.model.name} with episodes of {setup.episodes.longest:,.0f} tokens does not fit "
        f"{setup.device.number(request.devices)} with {setup.memory / gb:.0f} GB each. Training "
        f"takes {sharded / gb:.0f} GB ({each:.0f} bytes a parameter, and the route's) and on "
        f"each {setup.device.unit} {unsharded / gb:.0f} GB for activations and gathered "
        f"layers{divided}, an engine "
        f"{setup.model.copy_bytes / gb:.0f} GB for weights, and memory for {MIN_EPISODES} "
        f"episodes. {advice}"
    )


def _adapters(request: PlanRequest, name: str, schedule: ScheduleConfig) -> str:
    """Return the advice to train adapters if they fit the devices, otherwise an empty text."""
    if request.setup.lora_rank or request.setup.model.experts:
        return ""
    setup = replace(request.setup, lora_rank=ADVISED_RANK)
    if not best_or_none(replace(request, setup=setup), name, schedule):
        return ""
    return f", or train adapters: --lora-rank {ADVISED_RANK} fits"


def _fewest_trainers(setup: TrainingSetup, route: RouteCost) -> tuple[int, TrainingSetup]:
    """Return the smallest number of training devices that have enough memory, and the setup for it.

    The number is 0 if none up to `MAX_TRAINERS` has.
    """
    setups = [
        replace(setup, gradient_checkpointing=True, context=context, offload=offload)
        for offload in (False, True)[: 1 if setup.device.is_core else None]
        for context in setup.context_sizes
    ]
    for trainers in range(1, MAX_TRAINERS + 1):
        for each in setups:
            if trainers % each.context == 0 and each.fits(trainers, route):
                return trainers, each
    return 0, setups[-1]


def divisions(candidate: Candidate) -> list[Candidate]:
    """Return a candidate for each division of the devices, with the schedule of `candidate`.

    The way to get `old_logp` is also the same. Gradient checkpointing is used where it is faster.
    """
    ranked = sorted(
        candidates(candidate.request, candidate.name, candidate.schedule),
        key=lambda each: each.rate,
    )
    return list({each.placement: each for each in ranked}.values())


def with_route(candidate: Candidate, name: str) -> Candidate | None:
    """Return the candidate with another route, the method to get old log-probabilities.

    The division of the devices stays the same if the route fits there. Otherwise the best division
    is chosen. None if the route fits nowhere.
    """
    route = route_cost(name)
    placement = candidate.placement
    setup = replace(candidate.costs.setup, microbatch=PASS_TOKENS, scoring_pass=PASS_TOKENS)
    for same in (setup, replace(setup, gradient_checkpointing=True)):
        has_devices = route.needs.own_process == bool(placement.scorers)
        if placement.devices == 1:
            has_devices = has_devices and same.share_one(route)
        if has_devices and same.fits(placement.trainers, route):
            costs = replace(candidate.costs, setup=_with_passes(same, placement, route))
            return replace(candidate, costs=costs).with_route(name)
    return best_or_none(candidate.request, name, candidate.schedule)


def synchronous(request: PlanRequest, schedule: ScheduleConfig) -> Candidate | None:
    """Return the best candidate that trains synchronously, or None if none fits the devices.

    All devices sample and train in turns. The route (way to get `old_logp`) is `current_recompute`,
    which is exact here because the current weights sampled all tokens.
    """
    in_turns = replace(schedule, max_staleness=0, lookahead_window=1)
    options = candidates(request, SYNCHRONOUS_ROUTE, in_turns, colocated=True)
    return max(options, key=lambda candidate: candidate.rate, default=None)


def why_not_synchronous(request: PlanRequest) -> str:
    """Return the reason why `synchronous` returns None for this request."""
    setup = replace(
        request.setup, gradient_checkpointing=True, offload=not request.setup.device.is_core
    )
    route = route_cost(SYNCHRONOUS_ROUTE)
    sizes = [
        str(size)
        for size in setup.context_sizes
        if size <= request.devices and replace(setup, context=size).fits(request.devices, route)
    ]
    if not sizes:
        return f"training does not fit {setup.device.number(request.devices)}"
    return (
        f"a pass over {setup.pass_tokens:,.0f} tokens must be divided among {' or '.join(sizes)} "
        f"devices to fit, and {request.devices} is no multiple of that"
    )
