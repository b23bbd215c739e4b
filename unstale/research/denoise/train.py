"""Training of a denoising policy while its engine draws objects with older weights.

    pi / mu  =  D * S,   D = pi_old / mu of each step,   S = pi / pi_old of each step

The weights of all versions that are still needed are kept, so `old_logp` is exact (the route
`snapshot_old`). The weight of a step is D, at most 2, and S is clipped. Engine and trainer take
turns in one thread: between two updates, all objects advance by the same number of steps. So runs
with equal options are equal bit for bit, and an object may have steps of several versions.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from unstale.algorithms.corrections import keep_all, log_discrepancy, log_staleness, truncate
from unstale.algorithms.objectives import ppo_clip
from unstale.config import ConfigError
from unstale.model.quantisation import FORMATS
from unstale.records import Batch, Group, collate
from unstale.research.denoise import policies
from unstale.research.denoise.policies import Placed
from unstale.research.denoise.steps import (
    Denoiser,
    Plan,
    Row,
    Sampler,
    Steps,
    has_noise,
    microbatches,
)
from unstale.research.techniques.tree_advantage import (
    TreeAdvantage,
    TreeAdvantageConfig,
    effective_leaves,
    trees,
)
from unstale.rollout.seeds import derive_seed
from unstale.rollout.staleness_queue import StalenessQueue, measure_staleness
from unstale.techniques.hooks import CreditContext

Precision = Literal["float32", "bfloat16", "fp8", "nvfp4", "mxfp4"]
LARGEST_D = 2.0
"""Largest weight of a step. D is far above 1 only where the engine rounds coarsely."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseOptions:
    """The options of `unstale denoise` for training. Each field has the name of its option."""

    steps: int = 100
    groups: int = 4
    group_size: int = 16
    fork_at: Sequence[int] = ()
    noisy: Sequence[int] = ()
    rule: Literal["loo", "pooled", "depth"] = "depth"
    fusion: Literal["leaves", "path", "path_mean"] = "leaves"
    kept_depths: float = 1.0
    kept_leaves: Literal["all", "extremes"] = "all"
    explore: int = 0
    explorer: Precision = "nvfp4"
    engine: Precision = "bfloat16"
    max_staleness: int = 2
    pace: int = 4
    microbatch: int = 0
    held_out: int = policies.EVALUATED
    lr: float = 0.0
    load: Path | None = None
    save: Path | None = None
    likeliest: bool = False

    def check(self, places: int) -> None:
        """Raise `ConfigError` if the options cannot be used for objects of `places` steps."""
        if self.fusion != "leaves" and not (self.fork_at and self.rule == "depth"):
            raise ConfigError(
                f"--fusion {self.fusion} is only for --rule depth with --fork-at, whose forks have "
                "branches to weigh"
            )
        noisy = sorted(set(self.noisy)) or range(places)
        if noisy[-1] >= places:
            raise ConfigError(f"--noisy must be steps from 0 to {places - 1}, got {noisy[-1]}")
        before = [sum(each < place for each in noisy) for place in self.fork_at]
        before.append(len(noisy))
        if 0 in before or len(set(before)) < len(before) or max(self.fork_at, default=0) >= places:
            raise ConfigError(
                f"--fork-at must be steps below {places} with a step with noise before each, "
                f"between any two and after the last, got {' '.join(map(str, self.fork_at))}"
            )
        if self.explore and (self.fork_at or self.explore <= self.group_size):
            raise ConfigError(
                f"--explore must be above --group-size {self.group_size} and without --fork-at, "
                f"got {self.explore}"
            )
        if self.explorer != "nvfp4" and not self.explore:
            raise ConfigError("--explorer has no effect without --explore: leave it out")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one training run."""

    before: Mapping[str, float]
    """Means of held-out rewards and figures before training."""
    after: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]
    """Metrics of each update."""
    computed: Mapping[str, int]
    """Number of steps that engine and explorer computed, and that had a gradient (`trained`)."""


def copied(network: nn.Module, precision: Precision) -> nn.Module:
    """Return a copy of a network that computes in another precision, without gradients.

    With float32, weights keep their precision. In FP8 and FP4, the weights and inputs of linear
    layers are rounded to the format, and products are those of bfloat16. Frozen parameters that
    are not rounded are shared with the network.
    """
    own: dict[int, Any] = {}
    with torch.no_grad():
        rounded = _rounding(network, precision)
        for each in network.parameters():
            value = rounded(each)
            is_shared = value is each and not each.requires_grad
            own[id(each)] = each if is_shared else nn.Parameter(value.clone(), requires_grad=False)
        own |= {id(each): rounded(each).clone() for each in network.buffers()}
    copy = deepcopy(network, own)
    if form := FORMATS.get(precision):
        inputs_rounded = form.weight if form.activation_block is None else form.activations
        for module in copy.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (inputs_rounded(inputs[0]),))
    return copy


def update_copy(copy: nn.Module, network: nn.Module, precision: Precision) -> None:
    """Give a result of `copied` the trained parameters that the network has now."""
    rounded = _rounding(network, precision)
    with torch.no_grad():
        for ours, theirs in zip(copy.parameters(), network.parameters(), strict=True):
            if theirs.requires_grad:
                ours.copy_(rounded(theirs))


def _rounding(network: nn.Module, precision: Precision) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds a parameter or buffer, and returns it if nothing changes."""
    linear = {id(each.weight) for each in network.modules() if isinstance(each, nn.Linear)}

    def rounded(value: Tensor) -> Tensor:
        if precision == "float32" or not value.is_floating_point():
            return value
        half = value.to(torch.bfloat16)
        is_quantised = precision != "bfloat16" and id(value) in linear
        return FORMATS[precision].weight(half) if is_quantised else half

    return rounded


def drawn(
    model: Denoiser,
    network: nn.Module,
    contexts: Tensor,
    random: Generator,
    noisy: Sequence[int] | None = (),
) -> Tensor:
    """Draw an object for each context, and return all states on the CPU, `[places + 1, N, ...]`.

    `noisy` has the places whose steps have noise, as `has_noise` reads it.
    """
    count = len(contexts)
    state = torch.stack([model.begin(random) for _ in range(count)])
    path = [state.cpu()]
    for place in range(model.places):
        noise = None
        if has_noise(place, noisy):
            noise = torch.stack([model.noise(random) for _ in range(count)])
        with torch.no_grad():
            places = torch.full((count,), place, device=state.device)
            action, _ = model.draw(network, Steps(state, state, places, contexts), noise)
        state = model.after(action)
        path.append(state.cpu())
    return torch.stack(path)


def evaluate(
    model: Denoiser,
    network: nn.Module,
    seed: int,
    noisy: Sequence[int] | None = (),
    count: int = policies.EVALUATED,
) -> dict[str, float]:
    """Draw objects for `count` held-out tasks, and return the means of their rewards and figures.

    `noisy` is that of `drawn`.
    """
    context = model.contexts(range(count), held_out=True)
    path = drawn(model, network, context, Generator().manual_seed(seed), noisy)
    return {name: values.mean().item() for name, values in model.rewards(path, context).items()}


class Learner:
    """The trainer: the trained network, and its earlier versions for `old_logp`.

    A version is kept as its trained parameters. Frozen ones are there once.
    """

    def __init__(self, model: Denoiser, options: DenoiseOptions, network: nn.Module) -> None:
        self.version = 0
        self.network = network
        self._model = model
        self._microbatch = options.microbatch
        self._trained = [*policies.trained_parameters(network).values()]
        self._kept = {0: [each.detach().clone() for each in self._trained]}
        self._old = copied(network, "float32")
        pairs = zip(self._old.parameters(), network.parameters(), strict=True)
        self._old_trained = [ours for ours, theirs in pairs if theirs.requires_grad]
        self._optimizer = torch.optim.Adam(self._trained, options.lr or model.lr)
        state = model.begin(Generator().manual_seed(0))
        self._values = state.numel() if options.fusion == "path_mean" else 1
        self._advantage = TreeAdvantage(
            TreeAdvantageConfig(
                rule=options.rule,
                fusion="leaves" if options.fusion == "leaves" else "path",
                kept_depths=options.kept_depths,
                kept_leaves=options.kept_leaves,
            ),
            self._values,
        )

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the steps of some groups with their advantages."""
        context = CreditContext(0.0, self.version, lambda task: task.key)
        return collate(self._advantage.estimate(groups, context), groups=groups)

    def effective_leaves(self, groups: Sequence[Group]) -> float:
        """Return how many ends of a tree count in the fused reward of its beginning: 1 if one has
        all weight, and their number if all weigh the same.
        """
        return fmean(effective_leaves(trees(group), self._values) for group in groups)

    def old_logp(self, rows: Sequence[Row], version: Tensor) -> Tensor:
        """Return log-probabilities under the weights that drew each step, `[N]` in nats."""
        found: dict[int, Tensor] = {}
        for number in version.unique().tolist():
            with torch.no_grad():
                for ours, kept in zip(self._old_trained, self._kept[number], strict=True):
                    ours.copy_(kept)
                chosen = (version == number).nonzero().flatten().tolist()
                for part in microbatches(len(chosen), self._microbatch):
                    steps = Steps.stack(rows[place] for place in chosen[part])
                    logp = self._model.logp(self._old, steps)
                    found |= zip(chosen[part], logp.unbind(), strict=True)
        return torch.stack([found[place] for place in range(len(rows))])

    def step(
        self, batch: Batch, rows: Sequence[Row], where: Tensor, bound: int
    ) -> dict[str, float]:
        """Change the weights by the gradient of some steps of a batch. Return metrics.

        `where` is the mask of these steps in the batch, which `rows` has in the same order.
        Versions older than `bound` are removed.
        """
        metrics = self._update(batch, rows, where) if rows else {}
        self.version += 1
        self._kept[self.version] = [each.detach().clone() for each in self._trained]
        for number in [each for each in self._kept if each < self.version - bound]:
            del self._kept[number]
        return {"trained": len(rows), **metrics}

    def _update(self, batch: Batch, rows: Sequence[Row], where: Tensor) -> dict[str, float]:
        version, advantage = batch.version[where], batch.advantage[where]
        every = torch.ones_like(version, dtype=torch.bool)
        old = self.old_logp(rows, version)
        log_d = log_discrepancy(old, batch.behavior_logp[where], sampled=every)
        factor = truncate(log_d, keep_all(every), high=LARGEST_D).factor
        beginnings = len(batch.group) - _count_forks(batch)
        moved, clipped = [], []
        self._optimizer.zero_grad()
        for part in microbatches(len(rows), self._microbatch):
            logp = self._model.logp(self.network, Steps.stack(rows[part]))
            log_s = log_staleness(logp, old[part], unit=None, sampled=every[part])
            surrogate = ppo_clip(log_s, advantage[part], clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
            loss = (factor[part] * surrogate.loss).sum() / (beginnings * self._model.places)
            loss.backward()
            moved.append(log_s.detach())
            clipped.append(surrogate.clipped)
        self._optimizer.step()
        return {
            "log_d_abs_mean": log_d.abs().mean().item(),
            "log_s_abs_mean": torch.cat(moved).abs().mean().item(),
            "clipped_share": torch.cat(clipped).float().mean().item(),
        }


def _count_forks(batch: Batch) -> int:
    """Return the number of objects of a batch that begin with the steps of another one."""
    return sum(not batch.sampled[start] for start, _ in batch.spans())


def train(
    model: Denoiser, options: DenoiseOptions, seed: int, judged: Denoiser | None = None
) -> Result:
    """Train a policy from its supervised start, and measure it before and after.

    `judged` is the policy that is measured, with the same network. Default: the trained one.
    """
    options.check(model.places)
    noisy = None if options.likeliest else options.noisy
    network = policies.start(model, options.load, seed)
    precisions = [options.engine, *([options.explorer] if options.explore else [])]
    copies = {each: copied(network, each) for each in dict.fromkeys(precisions)}
    for each in copies.values():
        policies.check_policy(model, network, each, options.noisy, options.held_out)
    if options.likeliest:
        engine = copies[options.engine]
        policies.check_policy(judged or model, network, engine, None, options.held_out)
    judged = Placed(judged or model, network, options.microbatch)
    model = Placed(model, network, options.microbatch)
    before = evaluate(judged, network, 0, noisy, options.held_out)
    learner = Learner(model, options, network)
    plan = Plan(
        size=options.group_size,
        forks=options.fork_at,
        noisy=options.noisy,
        explore=options.explore,
    )
    sampler = Sampler(model, plan, seed)
    rows = asyncio.run(_train(learner, sampler, copies, options, seed))
    computed = {**sampler.counts, "trained": sum(row["trained"] for row in rows)}
    after = evaluate(judged, network, 0, noisy, options.held_out)
    if options.save:
        policies.save_weights(network, policies.weights_file(options.save, seed))
    return Result(before, after, rows, computed)


async def _train(
    learner: Learner,
    sampler: Sampler,
    copies: Mapping[Precision, nn.Module],
    options: DenoiseOptions,
    seed: int,
) -> list[dict[str, Any]]:
    queue = StalenessQueue(max_staleness=options.max_staleness, groups_per_step=options.groups)
    tasks = Generator().manual_seed(derive_seed(seed, "tasks"))
    rows: list[dict[str, Any]] = []

    def publish() -> None:
        for precision, copy in copies.items():
            update_copy(copy, learner.network, precision)
        engine = copies[options.engine]
        sampler.load(learner.version, engine, copies.get(options.explorer, engine))

    async def produce(running: asyncio.TaskGroup) -> None:
        for number in range(options.steps * options.groups):
            index = int(torch.randint(policies.TASKS, (1,), generator=tasks))
            await queue.admit(partial(sampler.group, number, index), running)

    publish()
    async with asyncio.TaskGroup() as running:
        running.create_task(produce(running))
        for _ in range(options.steps):
            groups = await queue.take()
            batch = learner.batch(groups)
            lag = learner.version - batch.version
            row = measure_staleness(batch, groups, lag=lag, bound=queue.bound)
            recorded = sampler.tape.take(batch.tokens[batch.sampled].tolist())
            where = batch.sampled & (batch.advantage != 0)
            is_used = where[batch.sampled].tolist()
            steps = [each for each, used in zip(recorded, is_used, strict=True) if used]
            row |= learner.step(batch, steps, where, queue.bound)
            if options.fusion != "leaves":
                row["effective_leaves"] = learner.effective_leaves(groups)
            reward = fmean(each.reward for group in groups for each in group.trajectories)
            rows.append({"reward_mean": reward, **row})
            publish()
            queue.release()
            for _ in range(options.pace):
                await asyncio.sleep(0)
    return rows
