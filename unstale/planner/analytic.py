"""What a setting costs, computed: seconds and bytes of every part, from sizes, data sheets and assumed shares.

Parallel work is taken to divide evenly: a sharded trainer, engines with tensor parallelism, a delta formed by the
ranks that hold its shards. What the trainer and the network do at the same time is taken to overlap in full.
"""

from dataclasses import dataclass

from unstale.planner import deltas
from unstale.planner.hardware import Device, Shares
from unstale.planner.models import WORD, Model
from unstale.planner.route_costs import RouteCost
from unstale.planner.workload import EpisodeStats

TRAINED_BYTES = 18
"""A parameter in training: 2 of its bfloat16 weight, 4 of its float32 master, 4 of the gradient, 8 of Adam's."""
_STEPPED_BYTES = 30
"""That AdamW moves per parameter and step: master, gradient and two moments read, all but the gradient written, and
the bfloat16 weight."""
REDUCE_S = 8e-6
"""Of an all-reduce of few bytes within a node. Assumed: 5 to 10 us are seen of NCCL over NVLink."""
HANDED_S = 0.034 / 40_387_200
"""Of one core, a byte of the weights that another process is handed through main memory: `old_logit_model`'s 3.4% of a
step of 1.00 s (benchmarks/results/2026-11-21-routes.md)."""
MICRO_TOKENS = 4096
"""Tokens of a training pass, unless an episode is longer: the default of `trainer.max_tokens_per_microbatch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What is given: model, device, and what a step's work is like."""

    model: Model
    device: Device
    shares: Shares
    lr: float
    episodes: EpisodeStats
    gradient_checkpointing: bool = False
    """Activations are computed again in the backward pass."""

    @property
    def flops(self) -> float:
        """Operations a second that a device reaches in training, scoring and prefill."""
        return self.device.flops * self.shares.matmul

    @property
    def bandwidth(self) -> float:
        """Bytes a second that it reaches of its memory."""
        return self.device.bandwidth * self.shares.bandwidth

    def trainer_bytes(self, devices: int, route: RouteCost) -> float:
        """Of each of the trainer's devices: a share of weights, optimizer and route, and one pass's activations."""
        sharded = TRAINED_BYTES * self.model.parameters + route.device_bytes(self.model)
        return sharded / devices + self.pass_bytes

    def fits(self, devices: int, route: RouteCost) -> bool:
        return self.trainer_bytes(devices, route) <= self.device.memory * self.shares.memory

    @property
    def pass_bytes(self) -> float:
        """Of the activations of one training pass. Of a token: what backward reads of each layer (its input and the
        norms', queries, keys, values and their product, four of the MLP's width), or with `gradient_checkpointing` the layers'
        inputs and one layer's."""
        model = self.model
        width = model.active * model.expert_ffn if model.experts else model.ffn
        layer = WORD * (
            4 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim + 4 * width
        )
        token = (
            model.layers * WORD * model.hidden + layer
            if self.gradient_checkpointing
            else model.layers * layer
        )
        return token * max(MICRO_TOKENS, self.episodes.longest)

    def room(self, tp: int) -> float:
        """Tokens of context that an engine of `tp` devices has memory for; negative where the weights alone do not fit.

        Key-value heads are repeated where there are fewer of them than devices.
        """
        free = tp * self.device.memory * self.shares.memory - self.model.copy_bytes
        return free / (self.model.kv_bytes * max(1.0, tp / self.model.kv_heads))


@dataclass(frozen=True, slots=True)
class Placement:
    """Who has which devices."""

    trainers: int
    engines: int
    tp: int
    """Devices of each engine."""
    scorers: int = 0
    """Devices of a route that scores apart from the trainer."""
    colocated: bool = False
    """The engines' devices are the trainer's: they take turns, each out of the other's memory at no cost in time."""

    @property
    def devices(self) -> int:
        return self.trainers + self.engines * self.tp * (not self.colocated) + self.scorers

    @property
    def told(self) -> str:
        """
        >>> Placement(4, 2, 2).told
        '4 GPUs to train, 2 x 2 to sample'
        """
        also = f", {self.scorers} to score" * (self.scorers > 0) + ", in turns" * self.colocated
        return f"{self.trainers} GPUs to train, {self.engines} x {self.tp} to sample{also}"


@dataclass(frozen=True, kw_only=True)
class AnalyticCosts:
    """`Costs` (unstale.planner.simulate) of a setting, computed."""

    setting: TrainingSetup
    place: Placement
    route: RouteCost
    batch: float
    """Tokens of a batch, in the mean."""
    live: int
    """Versions that are needed at once."""

    def step_s(self, replies: int, context: int) -> float:
        """One token for each of `replies`: the larger of reading (weights, keys, values) and of computing."""
        at, model, tp = self.setting, self.setting.model, self.place.tp
        read = model.read_bytes(replies) + model.kv_bytes * context
        computed = replies * model.forward_flops(context / max(1, replies))
        read_s, computed_s = read / at.bandwidth, computed / (at.device.flops * at.shares.decode)
        return max(read_s, computed_s) / tp + self._reduce_s(replies) + at.shares.step_s

    def prefill_s(self, tokens: int) -> float:
        """Contexts of `tokens` in all, each token seeing `EpisodeStats.seen`. They ride on steps that read weights."""
        computed = tokens * self.setting.model.forward_flops(self.setting.episodes.seen)
        return computed / (self.place.tp * self.setting.flops) + self._reduce_s(tokens)

    def train_s(self, tokens: int) -> float:
        """Forward, backward of twice that (three times with `gradient_checkpointing`), and the optimizer."""
        return (4 if self.setting.gradient_checkpointing else 3) * self.forward_s(
            tokens
        ) + self.optimizer_s

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """The trainer's time for the route. One that scores apart costs what it falls behind, and packing.

        A tour of a batch's versions begins at the end that is nearer: it walks as many deltas as there are versions,
        the way to the next batch's included, and no more than are kept.
        """
        route, trainers = self.route, self.place.trainers
        scoring = self.forward_s(tokens) * route.forwarded(
            versions, given=self.setting.episodes.given
        )
        if route.apart:
            apart = scoring * trainers / self.place.scorers
            handed = (
                HANDED_S * self.setting.model.copy_bytes / (trainers * self.setting.shares.cores)
            )
            return max(0.0, apart - self.train_s(tokens)) + handed
        restoring = min(self.live - 1, versions) * self.walk_s * route.chain
        traffic = route.traffic_bytes(self.setting.model) / (self.setting.bandwidth * trainers)
        return scoring + restoring + traffic

    def publish_s(self) -> float:
        """Bringing the weights to main memory, and with a version store forming their delta."""
        link = self.setting.device.host_link * self.setting.shares.link
        return self.setting.model.copy_bytes / (self.place.trainers * link) + self.encode_s

    def load_s(self) -> float:
        """What travels, and loading the weights from main memory: whole, or as a delta where that is quicker.

        Engines pass on what they get, so that their number does not count.
        """
        tp, device, shares = self.place.tp, self.setting.device, self.setting.shares
        model, load = (
            self.setting.model,
            self.setting.model.copy_bytes / (tp * device.host_link * shares.link),
        )
        if self.place.colocated or self.place.devices <= device.node:
            return load
        link = tp * device.network * shares.link
        whole, applied = model.copy_bytes / link, self.walk_s * self.place.trainers / tp
        delta = deltas.delta_bytes(model.parameters, self.setting.lr) / link + applied
        return load + (min(whole, delta) if self.route.chain else whole)

    @property
    def encode_s(self) -> float:
        """Of the trainer's ranks, each forming the delta of its shard."""
        cores = self.place.trainers * self.setting.shares.cores
        return (
            deltas.encode_s(self.setting.model.parameters, self.setting.lr)
            / cores
            * self.route.chain
        )

    @property
    def walk_s(self) -> float:
        """The same of applying one."""
        alone = deltas.walk_s(self.setting.model.parameters, self.setting.lr)
        return alone / (self.place.trainers * self.setting.shares.cores)

    def forward_s(self, tokens: float) -> float:
        """The trainer's, over a batch once."""
        flops = tokens * self.setting.model.forward_flops(self.setting.episodes.seen)
        return flops / (self.place.trainers * self.setting.flops)

    @property
    def optimizer_s(self) -> float:
        moved = _STEPPED_BYTES * self.setting.model.parameters
        return moved / (self.place.trainers * self.setting.bandwidth)

    def _reduce_s(self, tokens: int) -> float:
        """Two all-reduces a layer of tensor parallelism, as rings: 2 (tp - 1) / tp of the activations each,
        and what an all-reduce takes however little is sent."""
        tp, model = self.place.tp, self.setting.model
        sent = 2 * model.layers * tokens * model.hidden * WORD * 2 * (tp - 1) / tp
        return sent / (
            self.setting.device.link * self.setting.shares.link
        ) + 2 * model.layers * REDUCE_S * (tp > 1)
