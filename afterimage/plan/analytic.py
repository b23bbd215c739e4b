"""What a setting costs, computed: seconds and bytes of every part, from sizes, data sheets and assumed shares.

Parallel work is taken to divide evenly: a sharded trainer, engines with tensor parallelism, a delta formed by the
ranks that hold its shards. What the trainer and the network do at the same time is taken to overlap in full.
"""

from dataclasses import dataclass
from functools import cached_property

from afterimage.plan import deltas
from afterimage.plan.hardware import Device, Shares
from afterimage.plan.models import WORD, Model
from afterimage.plan.route_costs import RouteCost

TRAINED_BYTES = 18
"""A parameter in training: 2 of its bfloat16 weight, 4 of its float32 master, 4 of the gradient, 8 of Adam's."""
_STEPPED_BYTES = 30
"""That AdamW moves per parameter and step: master, gradient and two moments read, all but the gradient written, and
the bfloat16 weight."""
MICRO_TOKENS = 4096
"""Tokens of a training pass, unless an episode is longer: the default of `trainer.micro_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is given: model, device, and what a step's work is like."""

    model: Model
    device: Device
    shares: Shares
    lr: float
    episode: float
    """Tokens of an episode, in the mean."""
    longest: float
    """Tokens of the longest one to be held."""
    given: float
    """Share of it that comes before the first reply."""
    recompute: bool = False
    """Activations are computed again in the backward pass."""

    def trainer_bytes(self, devices: int, route: RouteCost) -> float:
        """Of each of the trainer's devices: a share of weights, optimizer and route, and one pass's activations."""
        sharded = TRAINED_BYTES * self.model.parameters + route.device_bytes(self.model)
        return sharded / devices + self.pass_bytes

    def fits(self, devices: int, route: RouteCost) -> bool:
        return self.trainer_bytes(devices, route) <= self.device.memory * self.shares.memory

    @property
    def pass_bytes(self) -> float:
        """Of the activations of one training pass."""
        return self._activation_bytes * max(MICRO_TOKENS, self.longest)

    def room(self, tp: int) -> float:
        """Tokens of context that an engine of `tp` devices has memory for; negative where the weights alone do not fit.

        Key-value heads are repeated where there are fewer of them than devices.
        """
        free = tp * self.device.memory * self.shares.memory - self.model.copy_bytes
        return free / (self.model.kv_bytes * max(1.0, tp / self.model.kv_heads))

    @property
    def _activation_bytes(self) -> float:
        """Of one token: what backward reads of each layer (its input and the norms', queries, keys, values and their
        product, four of the MLP's width), or with `recompute` the layers' inputs and one layer's."""
        model = self.model
        width = model.active * model.expert_ffn if model.experts else model.ffn
        layer = WORD * (4 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim + 4 * width)
        return model.layers * WORD * model.hidden + layer if self.recompute else model.layers * layer


@dataclass(frozen=True, slots=True)
class Placement:
    """Who has which devices."""

    trainers: int
    engines: int
    tp: int
    """Devices of each engine."""
    scorers: int = 0
    """Devices of a route that scores apart from the trainer."""

    @property
    def devices(self) -> int:
        return self.trainers + self.engines * self.tp + self.scorers

    @property
    def told(self) -> str:
        """
        >>> Placement(4, 2, 2).told
        '4 devices that train and 2 engines of 2'
        """
        engines = f"{self.engines} engine{'s' * (self.engines > 1)}" + (f" of {self.tp}" if self.tp > 1 else "")
        scorers = f", {self.scorers} that score" if self.scorers else ""
        train = f"{self.trainers} devices that train" if self.trainers > 1 else "1 device that trains"
        return f"{train}{scorers} and {engines}"


@dataclass(frozen=True, kw_only=True)
class Analytic:
    """`Costs` (afterimage.plan.simulate) of a setting, computed."""

    setting: Setting
    place: Placement
    route: RouteCost
    batch: float
    """Tokens of a batch, in the mean."""
    live: int
    """Versions that are needed at once."""
    versions: float = 1.0
    """That sequences hold in the mean; read where a batch is not at hand: when generation stands still to be scored."""
    covered: float = 0.0
    """Share that a route scores in time that the trainer waits."""

    def step_s(self, replies: int, context: int) -> float:
        """One token for each of `replies`: the larger of reading (weights, keys, values) and of computing."""
        model, device, shares, tp = self._model, self._device, self._shares, self.place.tp
        read = model.read_bytes(replies) + model.kv_bytes * context
        computed = replies * model.forward_flops(context / max(1, replies))
        moved = max(read / (device.bandwidth * shares.bandwidth), computed / (device.flops * shares.decode)) / tp
        return moved + self._reduce_s(replies) + shares.step_s

    def prefill_s(self, tokens: int) -> float:
        """Contexts of `tokens` in all, each seeing half of a mean episode. They ride on steps that read the weights."""
        computed = tokens * self._model.forward_flops(self.setting.episode / 2)
        return computed / (self.place.tp * self._device.flops * self._shares.matmul) + self._reduce_s(tokens)

    def train_s(self, tokens: int) -> float:
        """Forward, backward of twice that (three times with `recompute`), and the optimizer.

        Where generation stands still meanwhile, the optimizer is in `load_s`.
        """
        return (4 if self.setting.recompute else 3) * self.forward_s(tokens) + self.optimizer_s * (
            not self.route.closing
        )

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """`route_s`, but for a route that scores before a version is left: its time is in `load_s`."""
        return 0.0 if self.route.closing else self.route_s(tokens, versions)

    def route_s(self, tokens: int, versions: float) -> float:
        """The trainer's time for the route. One that scores apart costs what it falls behind, and packing."""
        route, trainers = self.route, self.place.trainers
        scoring = self.forward_s(tokens) * route.forwarded(versions, given=self.setting.given)
        if route.apart:
            apart = scoring * trainers / self.place.scorers
            return max(0.0, apart - self.train_s(tokens)) + self._to_host_s
        restoring = 2 * (self.live - 1) * self.walk_s
        traffic = route.traffic_bytes(self._model) / (self._device.bandwidth * self._shares.bandwidth * trainers)
        return scoring * (1 - self.covered) + restoring * (route.chain and self.covered < 1) + traffic

    def publish_s(self) -> float:
        """Bringing the weights to main memory, and with a version store forming their delta."""
        return self._to_host_s + self.encode_s

    def load_s(self) -> float:
        """What travels, applying it, and loading the weights from main memory; before that what `closing` takes.

        Engines pass on what they get, so that their number does not count.
        """
        tp, device, shares = self.place.tp, self._device, self._shares
        travel = self.publish_bytes / (tp * device.network * shares.link) if self.place.devices > device.node else 0.0
        apply = self.walk_s * self.place.trainers / tp if self.route.chain else 0.0
        load = self._model.copy_bytes / (tp * device.host_link * shares.link)
        closing = self.route_s(round(self.batch), self.versions) + self.optimizer_s if self.route.closing else 0.0
        return travel + apply + load + closing

    @property
    def encode_s(self) -> float:
        """Of the trainer's ranks, each forming the delta of its shard."""
        cores = self.place.trainers * self._shares.cores
        return deltas.encode_s(self._model.parameters, self.setting.lr) / cores * self.route.chain

    @property
    def walk_s(self) -> float:
        """The same of applying one."""
        return deltas.walk_s(self._model.parameters, self.setting.lr) / (self.place.trainers * self._shares.cores)

    @property
    def publish_bytes(self) -> float:
        """Of a version as it travels."""
        if self.route.chain:
            return deltas.delta_bytes(self._model.parameters, self.setting.lr)
        return float(self._model.copy_bytes)

    def forward_s(self, tokens: float) -> float:
        """The trainer's, over a batch once."""
        flops = tokens * self._model.forward_flops(self.setting.episode / 2)
        return flops / (self.place.trainers * self._device.flops * self._shares.matmul)

    @cached_property
    def optimizer_s(self) -> float:
        moved = _STEPPED_BYTES * self._model.parameters
        return moved / (self.place.trainers * self._device.bandwidth * self._shares.bandwidth)

    @property
    def _to_host_s(self) -> float:
        return self._model.copy_bytes / (self.place.trainers * self._device.host_link * self._shares.link)

    def _reduce_s(self, tokens: int) -> float:
        """Two all-reduces a layer of tensor parallelism, as rings: 2 (tp - 1) / tp of the activations each."""
        tp, model = self.place.tp, self._model
        sent = 2 * model.layers * tokens * model.hidden * WORD * 2 * (tp - 1) / tp
        return sent / (self._device.link * self._shares.link)

    @property
    def _model(self) -> Model:
        return self.setting.model

    @property
    def _device(self) -> Device:
        return self.setting.device

    @property
    def _shares(self) -> Shares:
        return self.setting.shares
