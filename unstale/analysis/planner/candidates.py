"""Enumerate configurations for a number of devices, and estimate the throughput of each.

A configuration, called a candidate, has a division of the devices among trainer and engines
(`Placement`), a schedule and a route (a way to get old log-probabilities). A formula estimates its
throughput from mean durations.
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
"""The way to get old log-probabilities in synchronous training, where it is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The request of a user to the planner. From several `lags`, `groups` or `windows`, it chooses
    values with nearly the highest throughput.
    """

    setup: TrainingSetup
    workload: Workload
    devices: int
    lags: tuple[int, ...] = (1, 2, 4)
    """Limits to try on the staleness of a token, in versions."""
    groups: tuple[int, ...] = (16,)
    group_size: int = 8
    windows: tuple[int, ...] = ()
    """Look-ahead windows to try, in groups. If empty, groups are trained on in order (window 1). If
    the trainer then waits, a window of half a batch is also tried.
    """
    route: str | None = None
    """Name of the way to get `old_logp` (route). None chooses the exact one with the highest
    throughput.
    """
    rounds: int = 10
    """Number of rounds to simulate, of maximum staleness + 1 steps each. A further round before
    them, in which the queue of finished groups fills up, does not count.
    """
    on_progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Candidate:
    """A configuration for the requested devices, with an estimate of its throughput."""

    request: PlanRequest
    costs: AnalyticCosts
    name: str
    """Name of the way to get old log-probabilities (route)."""
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
        """Return the candidate with `costs.absorbed_s`, the seconds in which its trainer waits for
        episodes.

        Nothing is changed if its route (way to get `old_logp`) does not score in this time, or if
        engines and trainer use the same devices.
        """
        if not self.costs.route.needs.idle or self.placement.colocated:
            return self
        unscored = replace(self, costs=replace(self.costs, absorbed_s=math.inf))
        waits_s = unscored.estimate.step_s - unscored.trainer_s
        return replace(self, costs=replace(self.costs, absorbed_s=max(0.0, waits_s)))

    @property
    def trainer_s(self) -> float:
        """Seconds of a step in which the trainer is busy: training, old log-probabilities,
        publishing.
        """
        costs = self.costs
        batch = round(costs.batch)
        scoring_s = costs.old_logps_s(batch, self.estimate.versions)
        return costs.train_s(batch) + costs.publish_s() + scoring_s

    @property
    def route_s(self) -> float:
        """Seconds of a step that computing old log-probabilities adds.

        The encoding of deltas (differences between versions of the weights) is included, unless
        engines need them too.
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

        The number is limited by the engine's memory, by the episodes that the staleness bound
        allows, and by `MAX_RUNNING`.
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
        """Estimated durations of a step and an episode, from mean durations of their parts.

        A step takes as long as the slower of generation and training, which overlap. It takes the
        sum of both in synchronous training, and when both use the same devices. The optimizer step
        waits until engines have loaded the previous version. Unless past versions are kept, scoring
        and training wait too. The number of versions that sample an episode depends on the time of
        a step, and the other way round, so both are computed in four iterations, which converge.
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
        """Return the mean number of replies that run on an engine, and its seconds for one episode.

        `live` is the number of episodes in flight per engine. `crossed` is the number of new
        versions that are loaded during an episode. By Little's law, the share of live episodes that
        run is the share of their time that they spend at the engine and not in tool calls. This
        time depends on the number of running replies, so the number is found by bisection. A
        running reply waits while the engine computes the contexts of others. A context is computed
        again after each new version, and after an eviction, which happens if there are more
        episodes than `max_running`.
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
    """Estimated means of a configuration: seconds of a step and of an episode, and versions per
    episode.
    """

    step_s: float
    episode_s: float
    versions: float
    """Mean number of versions of the weights that sample one episode."""

    def alive(self, tail: float) -> float:
        """Return the share of time, from an episode's start to the training on it, in which it
        runs.

        An episode that has ended waits for the longest one of its group, which takes `tail` times
        the mean. Then it waits half a step for the other groups of its batch.
        """
        if not self.episode_s:
            return 1.0
        return self.episode_s / (self.episode_s * tail + self.step_s / 2)


def make_schedule(request: PlanRequest, lag: int, groups: int, window: int) -> ScheduleConfig:
    """Return the schedule in which no token is older than `lag` versions.

    `groups` is the number of groups per step. `window` is the look-ahead window, which can make
    tokens older, so `max_staleness` is lower than `lag` by that. Raises `ConfigError` if `lag` is
    too small for the window.
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
    """Yield the configurations with one schedule and one route that fit into memory.

    The route `name` is the way to get `old_logp`. Each division of the devices is tried with and
    without gradient checkpointing. If it does not fit otherwise, memory is saved in two ways:
    several devices divide a microbatch, and the optimizer's state lies in main memory.
    """
    batch = schedule.groups_per_step * schedule.group_size * request.setup.episodes.tokens
    live = schedule.staleness_bound + 1
    route = route_cost(name)
    least: dict[Placement, tuple[bool, int]] = {}
    """Division of the devices -> the first values of `offload` and `context` with which it fits."""
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
    """Yield `setup` with each way to divide the model among the trainer's devices that fits.

    There is one copy of the model, or one on each node. Experts are gathered, or lie whole on a
    device.
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
    """Return `setup` with the largest passes that fit into memory.

    On a single device passes keep their size, because an engine uses the rest of its memory.
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
    """Return the end of a message that suggests to train LoRA adapters. Empty if they do not fit
    either.
    """
    if request.setup.lora_rank or request.setup.model.experts:
        return ""
    setup = replace(request.setup, lora_rank=ADVISED_RANK)
    if not best_or_none(replace(request, setup=setup), name, schedule):
        return ""
    return f", or train adapters: --lora-rank {ADVISED_RANK} fits"


def _fewest_trainers(setup: TrainingSetup, route: RouteCost) -> tuple[int, TrainingSetup]:
    """Return the smallest number of training devices with enough memory, and the setup for it.

    The number is 0 if even `MAX_TRAINERS` devices do not have enough.
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
    """Return the fastest configuration for each division of the devices.

    The schedule and the way to get `old_logp` are those of `candidate`.
    """
    ranked = sorted(
        candidates(candidate.request, candidate.name, candidate.schedule),
        key=lambda each: each.rate,
    )
    return list({each.placement: each for each in ranked}.values())


def with_route(candidate: Candidate, name: str) -> Candidate | None:
    """Return `candidate` with the route `name`, which is the way to get old log-probabilities.

    The division of the devices stays the same if the route fits there. Otherwise it is that of the
    fastest configuration. None if the route fits no division.
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
    """Return the fastest configuration for synchronous training, or None if none fits the devices.

    All devices sample and train in turn. `old_logp` is computed with the current weights, which is
    exact here because they sampled all tokens.
    """
    in_turns = replace(schedule, max_staleness=0, lookahead_window=1)
    options = candidates(request, SYNCHRONOUS_ROUTE, in_turns, colocated=True)
    return max(options, key=lambda candidate: candidate.rate, default=None)


def why_not_synchronous(request: PlanRequest) -> str:
    """Return the reason why `synchronous` returns None for `request`."""
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
