"""Time and memory of a configuration, computed from a model's sizes and a device's data sheet.

Two assumptions are made. Work on several devices divides evenly among them: to train, to sample
with tensor parallelism, and to encode deltas (differences between two versions of the weights). A
sharded trainer computes a layer while it gathers the weights of the next one, so a pass takes the
longer of the two times.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from unstale.analysis.planner import publication
from unstale.analysis.planner.hardware import Device, Shares
from unstale.analysis.planner.models import Model
from unstale.analysis.planner.route_costs import RouteCost
from unstale.analysis.planner.workload import EpisodeStats
from unstale.config.checks import ConfigError
from unstale.model.pass_size import token_bytes
from unstale.weights import delta_sizes
from unstale.weights.delta_sizes import WORD

MOMENT_BYTES = {"AdamW": 8, "AdamW8bit": 2}
"""Value of `trainer.optimizer` -> bytes of the two moments of a trained parameter."""
_GATHERED_LAYERS = 2
"""Number of layers whose whole weights each device of a sharded trainer holds: the layer that it
computes and the next one.
"""
_REDUCED_BYTES = 4
"""Bytes per trained parameter of the gradients that a sharded trainer sums over its devices after a
backward pass: they are float32.
"""
_STEPPED_BYTES = 14
"""Bytes of memory traffic of an optimizer step per parameter, without its moments: the float32
weight and the gradient are read (8), the float32 and the bfloat16 weight written (6).
"""
REDUCE_S = 8e-6
"""Seconds of a small all-reduce within a node. Assumed: NCCL over NVLink takes 5 to 10 us."""
TRANSFER_S = 0.034 / 40_387_200
"""Processor seconds per byte of weights copied to another process through main memory. Measured:
with `old_logps.route` `old_logit_model`, a copy of 40 MB took 3.4% of a step of 1.00 s
(benchmarks/results/routes-planner.md).
"""
PASS_TOKENS = 4096
"""Default of `trainer.max_tokens_per_microbatch`, the largest number of tokens in a microbatch. A
longer episode is a microbatch of its own.
"""
MOST_PASS_TOKENS = 32_768
"""Largest number of tokens in a microbatch that the planner suggests. Longer ones are not
faster.
"""
SCORING_FACTOR = 4
"""Largest number of tokens in a pass without gradient on GPUs, as a multiple of that in a
microbatch. It is the factor in the default of `trainer.max_tokens_per_scoring_pass`. Such a pass
can be longer, because it keeps the activations of only one layer at a time.
"""

MIN_EPISODES = 8
"""Number of episodes of mean length whose keys and values must fit into an engine's memory. Engines
of too few devices for this are not planned.
"""
ENGINE_SIZES = (1, 2, 4, 8)
"""Numbers of devices per engine (tensor parallelism) that the planner tries."""
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
"""Values of `cluster.context`: numbers of trainer ranks that may divide the tokens of one
microbatch.
"""
_SPLITS = 16
"""Numbers of training devices are tried in steps of (number of all devices) // this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """A model, the device on which it is trained, and the mean sizes of its episodes."""

    model: Model
    device: Device
    shares: Shares
    lr: float
    episodes: EpisodeStats
    rounding: str = "stochastic"
    """The value of `trainer.rounding`. The size of deltas (differences between versions of the
    weights) depends on it. The default is that of the recipe `llm`.
    """
    gradient_checkpointing: bool = False
    offload: bool = False
    """The value of `trainer.offload_optimizer`."""
    context: int = 1
    """Number of training devices that divide the tokens of a microbatch: `cluster.context`."""
    microbatch: int = PASS_TOKENS
    """Largest number of tokens in a microbatch: `trainer.max_tokens_per_microbatch`."""
    scoring_pass: int = PASS_TOKENS
    """Largest number of tokens in a pass without gradient:
    `trainer.max_tokens_per_scoring_pass`.
    """
    lora_rank: int = 0
    """Rank of the LoRA adapters that are trained, as `trainer.lora_rank`. 0 trains all weights."""
    optimizer: str = "AdamW"
    """The value of `trainer.optimizer`: a key of `MOMENT_BYTES`."""
    replicas: int = 1
    """Number of copies of the model, each divided among equally many training devices:
    `cluster.replicas`.
    """
    expert_parallel: bool = False
    """True if each expert lies whole on one device: `cluster.expert_parallel`."""
    critic: str = ""
    """The value of `critic.model` if `advantage.estimator` is `gae`. Empty without a critic."""

    def __post_init__(self) -> None:
        if self.lora_rank and self.model.experts:
            raise ConfigError("--lora-rank: adapters of a model with experts are not supported")

    def shards(self, devices: int) -> int:
        """Return the number of training devices that divide one copy of the model.

        `devices` is the number of all training devices.
        """
        return devices // self.replicas

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's two moments of a trained parameter."""
        return MOMENT_BYTES[self.optimizer]

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of main memory per trained parameter with `offload`: its float32 weight and its
        moments.

        A sharded trainer also keeps a float32 copy of the weights on its devices, from which the
        bfloat16 weights of a pass are rounded.
        """
        return 4 + self.moment_bytes

    @property
    def trained(self) -> float:
        """Number of trained parameters: those of the LoRA adapters if `lora_rank` is not 0, else
        all.
        """
        return self.model.lora_parameters(self.lora_rank) or self.model.parameters

    @property
    def version_bytes(self) -> float:
        """Bytes of one version of the trained weights in bfloat16."""
        return WORD * self.trained

    @property
    def delta_rate(self) -> float:
        """The learning rate from which the size of deltas (differences between versions) is
        computed.

        The rate is `lr`, or a larger one with stochastic rounding, which changes more weights.
        """
        return delta_sizes.delta_rate(self.lr, self.rounding)

    @property
    def flops(self) -> float:
        """Floating-point operations per second that a device reaches, except in decoding."""
        return self.device.flops * self.shares.matmul

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a device reaches to or from its memory."""
        return self.device.bandwidth * self.shares.bandwidth

    @property
    def memory(self) -> float:
        """Bytes of a device's memory that may be used."""
        return self.device.memory * self.shares.memory

    def trainer_bytes(self, devices: int, route: RouteCost) -> float:
        """Return the bytes of memory that the trainer needs on each of its `devices` devices.

        The optimizer's state, the float32 weights and the models that `route` adds are divided
        among the devices of a copy of the model. LoRA adapters and their optimizer's state are
        whole on each device. The activations of a microbatch are divided by `context`.
        """
        sharded = self.sharded_bytes(route, devices) / self.shards(devices)
        whole = self.state_bytes(1) * (self.lora_rank > 0 and self.is_sharded(devices))
        activations = max(self.activation_bytes, self.scoring_bytes) + self.critic_bytes
        return sharded + whole + self.computed_bytes(devices) + activations

    @property
    def critic_bytes(self) -> float:
        """Bytes of a critic with a model of its own: weights, optimizer's state and activations.
        Otherwise 0.
        """
        if self.critic != "own":
            return 0.0
        return self.model.copy_bytes + self.state_bytes(1) + self.activation_bytes

    def sharded_bytes(self, route: RouteCost, devices: int = 1) -> float:
        """Return the bytes that the devices of one copy of the model divide among them.

        `devices` is the number of all training devices.
        """
        if self.lora_rank and self.is_sharded(devices):
            return self.model.copy_bytes
        share = self.trained / self.model.parameters
        of_route = share * self._padding(devices) * route.device_bytes(self.model)
        return self.state_bytes(devices) + of_route

    def state_bytes(self, devices: int) -> float:
        """Return the bytes of trained float32 weights, gradients and moments of one copy of the
        model.

        A parameter has a float32 weight (4 bytes), a gradient (4) and two moments. A sharded
        trainer has another float32 weight (4), unless `rounding` is `nearest`. With `offload` only
        the gradient, and the weight from which a sharded trainer's passes are rounded, stay on the
        devices.
        """
        sharded = self.is_sharded(devices)
        each = 8 + self.moment_bytes + 4 * (sharded and self.rounding != "nearest")
        if self.offload:
            each = 4 + 4 * sharded
        return self._padding(devices) * each * self.trained

    def _padding(self, devices: int) -> float:
        """Return the factor by which padding of the experts enlarges the trained weights.

        A sharded trainer pads the experts, so that each device has the same number of them.
        """
        return self.model.padding(self.shards(devices)) if self.is_sharded(devices) else 1.0

    def computed_bytes(self, devices: int) -> float:
        """Return the bytes of bfloat16 weights that the trainer needs on each of its devices.

        A single device has the whole model. Each of several devices has the embedding, the head and
        two layers at a time (FSDP2, resharded after each layer). With `expert_parallel` the experts
        are not counted, because they are not gathered.
        """
        if not self.is_sharded(devices):
            return self.model.copy_bytes
        return self.model.gathered_bytes(_GATHERED_LAYERS, experts=not self.expert_parallel)

    def scorer_bytes(self, devices: int) -> float:
        """Return the bytes of memory that each of `devices` devices needs that only compute
        `old_logp`.

        These devices divide the bfloat16 weights, and gather layers as training devices do. They do
        not divide the tokens of a pass, and keep the activations of one layer at a time.
        """
        gathered = self.model.gathered_bytes(_GATHERED_LAYERS) if self.is_sharded(devices) else 0
        activations = self.scoring_bytes * self.context
        return self.model.copy_bytes / devices + gathered + activations

    def checkpoint_bytes(self, devices: int) -> float:
        """Return the bytes of main memory, per training device, of the copy from which a checkpoint
        is written.

        A parameter has its float32 weight (4 bytes), its bfloat16 weight (2) and its moments. The
        result is 0 for a trainer on one device, which makes no copy.
        """
        copied = (6 + self.moment_bytes) * self.trained / self.shards(devices)
        return copied if self.is_sharded(devices) else 0.0

    def is_sharded(self, devices: int) -> bool:
        """Return True if a trainer on `devices` devices divides the weights among them.

        Processor cores share one memory, so the result for them is False.
        """
        return devices > 1 and not self.device.is_core

    def ring_bandwidth(self, devices: int) -> float:
        """Return the bytes per second that each of `devices` devices receives in a ring collective.

        Within a node this is the bandwidth of a link. A ring through several nodes uses the network
        ports of all devices of a node together, because each node receives the bytes once.
        """
        link = self.device.link
        if devices > self.device.node:
            link = min(link, self.device.node * self.device.network)
        return link * self.shares.link

    def passes(self, tokens: float, devices: int, pass_tokens: float) -> int:
        """Return how many passes of `pass_tokens` tokens each of `devices` training devices runs.

        Together they process `tokens` tokens.
        """
        return math.ceil(tokens / (max(1, devices // self.context) * pass_tokens))

    @property
    def pass_tokens(self) -> int:
        """Number of tokens in the largest microbatch, which decides how much memory is needed.

        `context` devices divide these tokens.
        """
        return max(self.microbatch, math.ceil(self.episodes.longest))

    @property
    def mean_pass_tokens(self) -> float:
        """Mean number of tokens in a microbatch, which decides how many microbatches a batch
        has.
        """
        return self._mean_tokens(self.microbatch)

    @property
    def mean_scoring_tokens(self) -> float:
        """Mean number of tokens in a pass without gradient."""
        return self._mean_tokens(self.scoring_pass)

    def _mean_tokens(self, largest: int) -> float:
        return max(0 if self.model.apart else largest, self.episodes.tokens)

    def fits(self, devices: int, route: RouteCost) -> bool:
        """Return True if the model can be trained on `devices` devices: they have the memory for
        it.

        A critic with a model of its own cannot be trained by a sharded trainer.
        """
        if self.critic == "own" and self.is_sharded(devices):
            return False
        return self.trainer_bytes(devices, route) <= self.memory

    def with_largest_passes(self, devices: int, route: RouteCost) -> Self:
        """Return the setup with the largest microbatch and scoring pass that fit into GPU memory.

        On processor cores, and for a model whose sequences cannot be packed, both have
        `PASS_TOKENS`.
        """
        best = replace(self, microbatch=PASS_TOKENS, scoring_pass=PASS_TOKENS)
        if self.device.is_core or self.model.apart:
            return best
        while best.microbatch < MOST_PASS_TOKENS:
            longer = replace(best, microbatch=2 * best.microbatch)
            if not longer.fits(devices, route):
                break
            best = longer
        while best.scoring_pass < SCORING_FACTOR * best.microbatch:
            longer = replace(best, scoring_pass=2 * best.scoring_pass)
            if not longer.fits(devices, route):
                break
            best = longer
        return best

    @property
    def activation_bytes(self) -> float:
        """Bytes of the activations of one microbatch on each of the `context` devices that divide
        it.
        """
        token = token_bytes(self.model, checkpointing=self.gradient_checkpointing)
        return token * self.pass_tokens / self.context

    @property
    def scoring_bytes(self) -> float:
        """Bytes of one layer's activations in a pass without gradient, on each of the `context`
        devices that divide it.
        """
        tokens = max(self.scoring_pass, math.ceil(self.episodes.longest))
        return self.model.layer_bytes * tokens / self.context

    @property
    def context_sizes(self) -> list[int]:
        """Numbers of GPUs that can divide the attention heads of one microbatch: values of
        `cluster.context`.

        The only number is 1 on processor cores, because they share one memory. It is also 1 with a
        critic, and for a model whose sequences cannot be packed.
        """
        heads, key_heads = self.model.heads, self.model.kv_heads
        is_whole = self.device.is_core or self.critic or self.model.apart
        return [
            size
            for size in CONTEXT_SIZES[: 1 if is_whole else None]
            if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
        ]

    def context_tokens(self, tp: int, *, taken: float = 0.0) -> float:
        """Return how many tokens of context fit into the memory of an engine with `tp` devices.

        `taken` is the number of bytes that a trainer on the same device uses. The result is
        negative if not even the engine's weights fit. If `tp` exceeds the number of key-value
        heads, these are replicated, because each device holds at least one.
        """
        free = tp * self.device.memory * self.shares.memory - self.model.copy_bytes - taken
        return free / (self.model.kv_bytes * max(1.0, tp / self.model.kv_heads))

    @property
    def engine_sizes(self) -> list[int]:
        """Numbers of devices per engine (tensor parallelism) that have enough memory.

        The memory must hold the model and `least_context` tokens of context.
        """
        return [
            tp
            for tp in ENGINE_SIZES
            if self.model.heads % tp == 0 and self.context_tokens(tp) >= self.least_context
        ]

    @property
    def least_context(self) -> float:
        """The number of context tokens that must fit into an engine's memory.

        The number is that of `MIN_EPISODES` episodes of mean length, or of the longest episode if
        that is larger.
        """
        return max(MIN_EPISODES * self.episodes.tokens, self.episodes.longest)

    def share_one(self, route: RouteCost) -> bool:
        """Return True if a trainer and an engine fit into the memory of one device together."""
        trainer = self.trainer_bytes(1, route)
        return self.context_tokens(1, taken=trainer) >= self.least_context


@dataclass(frozen=True, slots=True)
class Placement:
    """A division of the devices among trainer, engines and computation of old log-probabilities."""

    trainers: int
    engines: int
    tp: int
    """Number of devices of each engine (tensor parallelism)."""
    scorers: int = 0
    """Number of devices that only compute old log-probabilities, in another process than the
    trainer. 0 if they are computed on the training devices.
    """
    colocated: bool = False
    """True if engines and trainer use the same devices in turn. Switching is assumed to take no
    time.
    """

    @property
    def devices(self) -> int:
        return self.trainers + self.engines * self.tp * (not self.colocated) + self.scorers

    def describe(self, unit: str) -> str:
        """Return the division in words. `unit` is the word for one device, `GPU` or `core`.

        >>> Placement(4, 2, 2).describe("GPU")
        '4 GPUs to train, 2 x 2 to sample'
        """
        scorers = f", {self.scorers} to score" if self.scorers else ""
        turns = ", in turns" if self.colocated else ""
        units = unit if self.trainers == 1 else f"{unit}s"
        return (
            f"{self.trainers} {units} to train, {self.engines} x {self.tp} to sample"
            f"{scorers}{turns}"
        )


def placements(
    setup: TrainingSetup, route: RouteCost, *, devices: int, max_staleness: int
) -> Iterator[Placement]:
    """Yield the divisions of `devices` devices among trainer and engines that fit into memory.

    Devices that are too few for one more engine go to the trainer. A single device trains and
    samples in turn, and needs memory for both. If some numbers of training devices divide the
    number of experts, only those are used, because others would pad the experts.
    """
    if devices == 1:
        yield from colocated_placements(setup, route, devices=1)
        return
    found = [
        place
        for tp in setup.engine_sizes
        for place in _divisions(setup, route, devices, tp, max_staleness)
    ]
    experts = setup.model.experts
    even = [place for place in found if experts and experts % place.trainers == 0]
    yield from even or found


def _divisions(
    setup: TrainingSetup, route: RouteCost, devices: int, tp: int, max_staleness: int
) -> Iterator[Placement]:
    """Yield the divisions that fit into memory, with engines of `tp` devices each."""
    stride = max(1, devices // _SPLITS)
    divisors = {count for count in range(1, devices) if setup.model.experts % count == 0}
    tried = {*range(1, devices, stride), *(divisors if setup.model.experts else ())}
    for trainers in sorted(tried):
        scorers = scoring_devices(setup, route, trainers, max_staleness=max_staleness)
        engines, left = divmod(devices - trainers - scorers, tp)
        fits = (trainers + left) % setup.context == 0 and setup.fits(trainers + left, route)
        fits = fits and (not scorers or setup.scorer_bytes(scorers) <= setup.memory)
        if engines > 0 and left < stride and fits:
            yield Placement(trainers + left, engines, tp, scorers)


def colocated_placements(
    setup: TrainingSetup, route: RouteCost, *, devices: int
) -> Iterator[Placement]:
    """Yield the divisions in which all devices alternate between training and sampling.

    They differ in the number of devices per engine. Only those that fit into memory are yielded.
    """
    if devices == 1 and (route.needs.own_process or not setup.share_one(route)):
        return
    if devices % setup.context == 0 and setup.fits(devices, route):
        for tp in setup.engine_sizes:
            if tp <= devices:
                yield Placement(devices, devices // tp, tp, colocated=True)


def scoring_devices(
    setup: TrainingSetup, route: RouteCost, trainers: int, *, max_staleness: int
) -> int:
    """Return how many devices are needed that only compute old log-probabilities.

    The result is 0 if `route` (the way to get them) scores on the `trainers` training devices, and
    1 on processor cores. Otherwise the devices must have memory for the model, gathered layers and
    a pass. If no number of devices has, only memory for the model is required. The devices must
    also score a batch in the time to train on it, which is that of three forward passes on
    `trainers` devices. At most two versions are assumed to sample a trajectory.
    """
    if not route.needs.own_process:
        return 0
    if setup.device.is_core:
        return 1
    holders = math.ceil(setup.model.copy_bytes / setup.memory)
    if setup.scorer_bytes(holders) > setup.memory:
        beside = setup.scorer_bytes(2) - setup.model.copy_bytes / 2
        room = setup.memory - beside
        holders = max(2, math.ceil(setup.model.copy_bytes / room)) if room > 0 else holders
    versions = min(2, max_staleness + 1)
    forwards = route.forward_passes(versions, prompt_fraction=setup.episodes.prompt_fraction)
    return max(holders, math.ceil(trainers * forwards / 3))


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """Durations of a run's work, computed for one setup, division of devices and way to get
    `old_logp`.
    """

    setup: TrainingSetup
    placement: Placement
    route: RouteCost
    batch: float
    """Mean number of tokens in a batch."""
    live: int
    """Number of versions of the weights whose sampled tokens may wait for training at one time."""
    absorbed_s: float = 0.0
    """Seconds of a step in which the trainer waits for episodes. A route (way to get `old_logp`)
    with `needs.idle` computes `old_logp` in this time, at no cost.
    """

    @property
    def context_tokens(self) -> float:
        """Number of context tokens that fit into the memory of one engine."""
        taken = 0.0
        if self.placement.devices == 1:
            taken = self.setup.trainer_bytes(1, self.route)
        return self.setup.context_tokens(self.placement.tp, taken=taken)

    def step_s(self, replies: int, context: int) -> float:
        """Return the seconds of a decoding step: one more token for each of `replies` replies of an
        engine.

        `context` is the sum of their context tokens. The result is the longer of two times, plus
        overheads: the time to read weights, keys and values from memory, and the time to compute.
        """
        setup = self.setup
        model = setup.model
        read = model.read_bytes(replies) + model.kv_bytes * context
        computed = replies * model.forward_flops(context / max(1, replies))
        read_s = read / setup.bandwidth
        computed_s = computed / (setup.device.flops * setup.shares.decode)
        parallel_s = max(read_s, computed_s) / self.placement.tp
        return parallel_s + self._all_reduce_s(replies) + setup.shares.step_s

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds in which an engine computes the keys and values of `tokens` context
        tokens.

        The time to read the weights is not included, because `step_s` includes it.
        """
        computed = tokens * self.setup.model.forward_flops(self.setup.episodes.attended)
        return computed / (self.placement.tp * self.setup.flops) + self._all_reduce_s(tokens)

    def train_s(self, tokens: int) -> float:
        """Return the seconds of forward passes, backward passes and the optimizer step for a batch.

        The batch has `tokens` tokens. A backward pass takes as long as two forward passes, or three
        with gradient checkpointing. With LoRA adapters it takes one forward pass less, because
        frozen weights have no gradient. A critic adds a forward pass for its forecasts. If it has a
        model of its own, the training of that model is added too.
        """
        one = max(self.train_compute_s(tokens), self.train_transfer_s(tokens)) + self.optimizer_s
        forecast = self._scoring_pass_s(tokens) * bool(self.setup.critic)
        return one * (1 + (self.setup.critic == "own")) + forecast

    def train_compute_s(self, tokens: int) -> float:
        """Return the seconds in which devices compute forward and backward passes over `tokens`
        tokens.

        The exchange of tokens between the devices that divide a microbatch is included.
        """
        setup = self.setup
        passes = 3 + setup.gradient_checkpointing - (setup.lora_rank > 0)
        return passes * self.forward_s(tokens) + (passes - 1) * self._exchange_s(tokens)

    def train_transfer_s(self, tokens: int) -> float:
        """Return the seconds in which training devices transfer weights and gradients for `tokens`
        tokens.

        The weights are gathered for the forward and for the backward pass. The gradients are summed
        in float32 after each backward pass, over the devices of a copy of the model and then over
        the copies.
        """
        setup, trainers = self.setup, self.placement.trainers
        copies = 2 + _REDUCED_BYTES / WORD * setup.trained / setup.model.parameters
        gathered_s = copies * self._gather_s(tokens, trainers, setup.mean_pass_tokens)
        sent = 2 * (1 - 1 / setup.replicas) * _REDUCED_BYTES * setup.trained / self.shards
        passes = setup.passes(tokens, trainers, setup.mean_pass_tokens)
        return gathered_s + passes * sent / (setup.device.network * setup.shares.link)

    @property
    def shards(self) -> int:
        """Number of training devices that divide one copy of the model."""
        return self.setup.shards(self.placement.trainers)

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """Return the seconds that computing old log-probabilities adds to the trainer's step.

        The batch has `tokens` tokens, and `versions` versions sampled a sequence on average. The
        result depends on the route, the way to get them. A route with separate devices works in
        parallel with training; it adds the transfer of the weights, and the seconds by which it is
        slower than training. A route that restores versions applies a delta for each version in the
        batch, and at most all that it keeps. A route that scores while the trainer waits adds the
        seconds beyond `absorbed_s`.
        """
        if self.route.needs.idle:
            return max(0.0, self._late_s(tokens, versions) - self.absorbed_s)
        return self._scored_s(tokens, versions)

    def _late_s(self, tokens: int, versions: float) -> float:
        """Return the seconds to score the tokens of each version before the next version replaces
        it.

        The seconds are those of forward passes with the trainer's current weights. No older version
        is restored.
        """
        route = self.route
        prompt = self.setup.episodes.prompt_fraction
        forwards = route.forward_passes(versions, prompt_fraction=prompt)
        return forwards * self._scoring_pass_s(tokens)

    def _scoring_pass_s(self, tokens: int) -> float:
        """Return the seconds of a forward pass without gradient on the trainer's devices."""
        forward_s = self.forward_s(tokens) + self._exchange_s(tokens)
        each = self.setup.mean_scoring_tokens
        return max(forward_s, self._gather_s(tokens, self.placement.trainers, each))

    def _scored_s(self, tokens: int, versions: float) -> float:
        """Return the seconds to compute a batch's old log-probabilities at the time of its
        training.
        """
        route, setup = self.route, self.setup
        trainers = self.placement.trainers
        forwards = route.forward_passes(
            versions, prompt_fraction=self.setup.episodes.prompt_fraction
        )
        scoring = forwards * self._scoring_pass_s(tokens)
        if route.needs.own_process:
            scorers = self.placement.scorers
            alone_s = self.forward_s(tokens) * trainers / scorers
            each = self.setup.mean_scoring_tokens
            divided = replace(setup, replicas=1, expert_parallel=False)
            gather_s = replace(self, setup=divided)._gather_s(tokens, scorers, each)
            apart = forwards * max(alone_s, gather_s)
            cores = trainers * self.setup.shares.cores
            transfer = TRANSFER_S * self.setup.version_bytes / cores
            return max(0.0, apart - self.train_s(tokens)) + transfer
        restoring = min(self.live - 1, versions) * self.apply_s * route.needs.snapshots
        traffic = route.traffic_bytes(self.setup.model) / (self.setup.bandwidth * trainers)
        return scoring + restoring + traffic

    def publish_s(self) -> float:
        """Return the seconds in which the trainer prepares a new version.

        The trainer copies the version to main memory and encodes its deltas. `driver_s` is
        included.
        """
        setup = self.setup
        link = setup.device.host_link * setup.shares.link
        copied = setup.version_bytes / (self.shards * link)
        return copied + self.encode_s + self.driver_s

    @property
    def driver_s(self) -> float:
        """Seconds in which the run's main process applies the deltas of all trainer ranks, on one
        core.

        Deltas are differences between two versions of the weights. They are applied only if the
        trainer is sharded and engines load whole weights. Otherwise the result is 0.
        """
        setup = self.setup
        ranked = setup.is_sharded(self.placement.trainers) and not setup.lora_rank
        serial = ranked and not self.sends_deltas
        return serial * delta_sizes.apply_s(setup.trained, setup.delta_rate)

    @property
    def is_one_node(self) -> bool:
        return self.placement.devices <= self.setup.device.node

    @property
    def sends_deltas(self) -> bool:
        """True if engines receive deltas (differences between versions), False if they receive
        whole weights.

        Deltas are sent to a single engine on the trainer's node, and to hosts on other nodes. With
        LoRA adapters all engines receive whole weights, into which the adapters are merged.
        """
        has_deltas = self.route.needs.snapshots or self.setup.is_sharded(self.placement.trainers)
        has_base = self.placement.engines == 1 or not self.is_one_node
        return has_deltas and has_base and not self.setup.lora_rank

    def stage_s(self) -> float:
        """Return the seconds in which engine hosts receive and decode a version, while engines
        sample.

        Engines pass a version on to each other, so the time does not depend on their number.
        Between nodes, deltas are sent if that is faster than sending all weights. The result is 0
        on processor cores, whose engines decode nothing in advance.
        """
        setup = self.setup
        if setup.device.is_core:
            return 0.0
        cores = self.placement.tp * setup.shares.cores
        whole_s = publication.WRITE_S * setup.model.copy_bytes
        words, rate = setup.trained, setup.delta_rate
        delta_s = publication.decode_s(words, rate, cores=cores)
        if self.is_one_node:
            return delta_s if self.sends_deltas else whole_s
        link = self.placement.tp * setup.device.network * setup.shares.link
        whole_s += setup.version_bytes / link
        if not self.sends_deltas:
            return whole_s
        return min(whole_s, delta_s + delta_sizes.delta_bytes(words, rate) / link)

    def load_s(self) -> float:
        """Return the seconds for which engines stop sampling to load a version from main memory.

        Each device of an engine reads its share of the weights.
        """
        setup = self.setup
        each = setup.model.copy_bytes / self.placement.tp
        if setup.device.is_core:
            return each / (setup.device.host_link * setup.shares.link)
        return each / (setup.shares.loader_gb_s * 1e9)

    def probe_s(self) -> float:
        """Return the seconds after a load in which replies are held back until the new weights are
        checked.

        The check is a probe: the server samples a short reply, and a processor core computes its
        log-probabilities with the same weights. The result is 0 on processor cores, whose engines
        are not probed.
        """
        if self.setup.device.is_core:
            return 0.0
        sampled = publication.PROBE_REPLY * self.step_s(1, publication.PROBE_PROMPT)
        return sampled + publication.reference_s(self.setup.model)

    @property
    def encode_s(self) -> float:
        """Seconds in which the trainer's ranks encode the deltas of their shards of the weights.

        The result is 0 if neither engines nor the computation of `old_logp` use deltas.
        """
        cores = self.shards * self.setup.shares.cores
        encode = delta_sizes.encode_s(self.setup.trained, self.setup.delta_rate)
        has_deltas = self.route.needs.snapshots or self.sends_deltas
        return encode / cores * has_deltas

    @property
    def apply_s(self) -> float:
        """Seconds in which the trainer's ranks apply one delta, each to its shard of the
        weights.
        """
        alone = delta_sizes.apply_s(self.setup.trained, self.setup.delta_rate)
        return alone / (self.shards * self.setup.shares.cores)

    def forward_s(self, tokens: float) -> float:
        """Return the seconds in which all training devices together compute a forward pass over
        `tokens` tokens.
        """
        flops = tokens * self.setup.model.forward_flops(self.setup.episodes.attended)
        return flops / (self.placement.trainers * self.setup.flops)

    def _gather_s(self, tokens: float, devices: int, pass_tokens: float) -> float:
        """Return the seconds in which `devices` devices gather the weights for forward passes.

        `tokens` tokens are computed in passes of `pass_tokens` tokens. For each pass, every device
        gathers the bfloat16 weights of its copy of the model, with padded experts. Experts that lie
        whole on a device are not gathered. The result is 0 for one device.
        """
        setup = self.setup
        if not setup.is_sharded(devices):
            return 0.0
        shards = setup.shards(devices)
        gathered = setup.model.padding(shards) * setup.model.copy_bytes
        if setup.expert_parallel:
            gathered = setup.model.copy_bytes - WORD * setup.model.matrices["experts"]
        received = gathered * (shards - 1) / shards
        passes = setup.passes(tokens, devices, pass_tokens)
        return passes * received / setup.ring_bandwidth(shards)

    def _exchange_s(self, tokens: float) -> float:
        """Return the seconds in which devices that divide a microbatch exchange tokens in a forward
        pass.

        They exchange queries, keys, values and the attention output of each layer, so that each
        device has all tokens of some heads. With `expert_parallel` the states of tokens also travel
        to the devices of their experts, and back. A backward pass exchanges as much.
        """
        setup = self.setup
        model, size = setup.model, setup.context
        heads = 2 * model.heads + 2 * max(model.kv_heads, size)
        sent = WORD * model.layers * heads * model.head_dim * (size - 1) / size
        link = setup.device.link if size <= setup.device.node else setup.device.network
        each = tokens / self.placement.trainers / setup.shares.link
        if not setup.expert_parallel:
            return each * sent / link
        shards = self.shards
        routed = 2 * WORD * (model.layers - model.dense) * min(model.active, shards) * model.hidden
        near = setup.device.link if shards <= setup.device.node else setup.device.network
        return each * (sent / link + routed * (shards - 1) / shards / near)

    @property
    def optimizer_s(self) -> float:
        """Seconds of an optimizer step. With `offload`, copies from and to main memory are
        included.
        """
        setup = self.setup
        each = setup.trained / (1 if setup.lora_rank else self.shards)
        stepped_s = (_STEPPED_BYTES + 2 * setup.moment_bytes) * each / setup.bandwidth
        if not setup.offload:
            return stepped_s
        link = setup.device.host_link * setup.shares.link
        return stepped_s + 2 * setup.offloaded_bytes * each / link

    def _all_reduce_s(self, tokens: int) -> float:
        """Return the seconds of the two all-reduces per layer that tensor parallelism needs.

        Each is a ring that sends 2 (tp - 1) / tp times the activations of `tokens` tokens, with a
        latency of `REDUCE_S`. The result is 0 for engines of one device.
        """
        tp = self.placement.tp
        model = self.setup.model
        sent = 2 * model.layers * tokens * model.hidden * WORD * 2 * (tp - 1) / tp
        link = self.setup.device.link * self.setup.shares.link
        return sent / link + 2 * model.layers * REDUCE_S * (tp > 1)
