"""The trainer that runs in this process, or as one rank of several.

    prepare(batch)       compute old log-probabilities, corrections and divisors of the loss
    backward(minibatch)  compute the gradient of one optimizer step, in microbatches
    add(part)            do both for some groups of a batch that is not complete yet
    step()               clip the gradient, set the learning rate, change the weights

The methods run in the trainer's thread. The model computes log-probabilities `[T]` on its device,
and the loss is computed from them on the CPU. With several ranks, every rank computes what is
`[T]` for the whole batch: old log-probabilities, corrections and divisors. Only the forward and
backward passes are divided among the ranks.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unstale.config import RunConfig
from unstale.model.forward import ForwardOptions
from unstale.model.policy import Policy
from unstale.model.sharding import is_sharded
from unstale.old_logps import OldLogps
from unstale.records import Batch
from unstale.techniques.hooks import (
    NO_TECHNIQUES,
    HiddenStates,
    StatesQuery,
    StepPlan,
    StepSeen,
    Techniques,
)
from unstale.token_values import TokenValues
from unstale.trainer import bitwise
from unstale.trainer.critic import Critic
from unstale.trainer.halves import GradientNoiseScale
from unstale.trainer.loss import Loss
from unstale.trainer.loss_scale import LossScale
from unstale.trainer.metrics import StepMetrics
from unstale.trainer.optimizer import lr_factor
from unstale.trainer.passes import pass_tokens
from unstale.trainer.records import NOT_FINITE, FailedBatch, Minibatch
from unstale.trainer.rules import LossSpec
from unstale.trainer.scoring import Audit, Scoring, select
from unstale.trainer.stream import AddedParts
from unstale.trainer.token_log import TokenLog
from unstale.trainer.weight_update import WeightUpdate


class LocalTrainer:
    """A trainer in this process. It has the whole model and optimizer, or one rank's part of both.

    A float32 policy is optimized directly. For a bfloat16 or float16 policy, the optimizer changes
    float32 weights, which are rounded into the policy after every step (`trainer.rounding`).
    Gradients are summed in float32.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        old: OldLogps,
        audit: Audit = lambda batch, old_logp: {},
        *,
        techniques: Techniques = NO_TECHNIQUES,
    ) -> None:
        """Create the trainer and its optimizer.

        `old` computes old log-probabilities. `audit` is called before the first optimizer step on a
        batch. It measures the error of the batch's `old_logp`, and returns metrics.
        """
        self.policy = policy
        self.config = config.trainer
        self.rules = LossSpec(config.correction, config.objective, techniques)
        self.scoring = Scoring(policy, config, old, self.rules)
        self.critic = Critic.of(policy, config)
        self._loss = Loss(policy, config, self.rules, self.scoring, self.critic)
        self.old = old
        self.audit = audit
        self.techniques = techniques
        self.num_steps = config.max_steps * config.trainer.steps_per_batch
        self.skips_zero_advantage = not (
            self.rules.trains_zero_advantage or techniques.controllers or self.critic
        )
        """True if sequences whose advantages are all 0 get no forward and backward pass. It is
        False with a technique's controller or a critic, because these use all sequences.
        """
        self._critic_steps = config.critic.warmup_steps if self.critic else 0
        self._bitwise = config.engine.bitwise
        self._route = config.old_logps.route
        self._token_share = config.journal.token_share
        policy.set_forward_options(ForwardOptions.of(config))
        self.steps = 0
        self._peers = policy.peers
        self._weights = WeightUpdate(policy, config)
        self.optimizer = self._weights.optimizer
        self._masters = self._weights.masters
        self._master = self._masters.tensors
        self._loss_scale = LossScale(policy.dtype)
        self._max_tokens = pass_tokens(policy, config, trains=True)
        for reader in techniques.states_readers:
            policy.require_layer(reader.query.depth)
        self._halves = GradientNoiseScale() if "halves" in techniques.needs else None
        self._metrics = StepMetrics()
        self._added = AddedParts()
        self.divisor = 0
        """With `trainer.stream`: the divisor of the loss, for the sequences counted so far.
        Otherwise 0.
        """
        self._whole_minibatch: Minibatch | None = None
        """All sequences of a batch of which some parts were trained on before it was complete.
        Otherwise None.
        """
        self._groups_per_batch = config.schedule.groups_per_step
        self._cpu_s = time.process_time()

    @property
    def failed_batch(self) -> FailedBatch | None:
        """The data of the current step, which is saved if a number is not finite.

        None before a step.
        """
        return self.scoring.failed_batch

    @property
    def version(self) -> int:
        return self.policy.version

    def start_version(self) -> None:
        self.policy.version += 1

    def lag(self, version: Tensor) -> Tensor:
        return self.policy.lag(version)

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def hidden_states(self, batch: Batch, query: StatesQuery) -> HiddenStates:
        """Return the hidden states of a batch, under the current weights, that `query` asks for."""
        return self.scoring.hidden_states(batch, query)

    def prepare(self, batch: Batch) -> Sequence[Minibatch]:
        """Compute a batch's old log-probabilities and corrections. Divide it into minibatches.

        Return one minibatch for each optimizer step. With `trainer.epochs_per_batch`, the same
        minibatches come several times. Sequences that cannot have a gradient count in the loss's
        divisor, but need no forward pass. Sequences whose gradient was added by `add` are left out.
        Raises ValueError if the batch has no sampled token, or lacks a part that was added.
        """
        began = time.perf_counter()
        added, self._added = self._added, AddedParts()
        left = batch
        if added:
            left, _ = batch.select(added.rest(batch))
        else:
            self._start_batch()
        steps = _divide(left, self.config.minibatches_per_batch)
        if not steps and not added:
            raise ValueError(
                f"none of the {batch.num_sequences} sequences of this batch has an action token"
            )
        members = self._count(left)
        # A shaper may change an advantage that is 0. The mean of all weights needs all sequences.
        # If no fresh sequence has a gradient, the route's metrics need some tokens.
        needs_all = self.techniques.shapers or self.rules.correction.normalize
        if needs_all or not (added or self._any_fresh(left, members)):
            members = list(range(left.num_sequences))
        scored, old_logp, minibatches = self._prepare_steps(left, members, steps or [[]])
        if added:
            scored, old_logp = added.join(batch, scored, old_logp)
            self._metrics.tokens.arrange(batch.episodes)
            self._whole_minibatch = added.whole_minibatch(batch, minibatches[0])
        self._metrics.prepare_s += time.perf_counter() - began
        self._metrics.extra |= self._describe_experts(batch) | _describe_sets(batch)
        self._metrics.extra |= self._audit(scored, old_logp)
        return minibatches * self.config.epochs_per_batch

    def backward(self, minibatch: Minibatch) -> None:
        """Add the gradient of a minibatch's loss to the weights' gradients.

        How the minibatch is divided into microbatches does not change the gradient.
        """
        self._metrics.num_steps += 1
        self._run(minibatch)

    def add(self, part: Batch) -> None:
        """Add the gradient of some groups of the next batch, before the batch is complete.

        This needs `trainer.stream`. The weights do not change before `step`, which applies the
        divisor of the loss. A part without a gradient is left to `prepare`. Raises
        FloatingPointError if the loss is not finite.
        """
        began = time.perf_counter()
        if not self._added:
            self._start_batch()
        members = self._with_gradient(part, torch.ones_like(part.advantage))
        if not members:
            return
        self._count(part)
        if self.techniques.shapers:
            members = list(range(part.num_sequences))
        scored, old_logp, (minibatch,) = self._prepare_steps(part, members, _divide(part, 1))
        num_groups = self._added.num_groups + max(1, len(set(part.group)))
        self._metrics.expect(self._groups_per_batch / num_groups)
        self._metrics.prepare_s += time.perf_counter() - began
        self._run(minibatch)
        self._added.append(part, scored, old_logp, minibatch)

    def _start_batch(self) -> None:
        self._metrics = StepMetrics(
            replays=bool(self.techniques.sources),
            tokens=TokenLog(share=self._token_share),
        )
        self._metrics.places = self.rules.objective.placed != "mask"
        self._metrics.epochs = self.config.epochs_per_batch
        self.divisor = 0
        self._whole_minibatch = None
        self.scoring.num_compared = 0

    def _count(self, batch: Batch) -> list[int]:
        """Count a batch's tokens for the metrics.

        Return the indices of sequences that can have a gradient.
        """
        self._metrics.tokens.begin(batch, route=self._route)
        self._metrics.count(batch)
        return self._with_gradient(batch, torch.ones_like(batch.advantage))

    def _prepare_steps(
        self, batch: Batch, members: Sequence[int], steps: list[list[int]]
    ) -> tuple[Batch, Tensor, list[Minibatch]]:
        """Compute old log-probabilities, corrections and divisors for optimizer steps.

        `steps` has the indices of each step's sequences. Only the sequences with the indices
        `members` get forward passes. Return these sequences, their `old_logp` `[T]`, and the
        minibatch of each step.
        """
        scoring, metrics = self.scoring, self._metrics
        if self.rules.uses_sequences:
            members = batch.with_owners(members)
        scored, index = batch.select(members)
        lag = torch.where(scored.sampled, self.policy.lag(scored.version), -1)
        old = scoring.old_logps(scored, lag, metrics)
        scoring.offer(batch, index, old)
        forecasts = None
        if self.critic:
            scored, forecasts, tokens = self.critic.credit(scored)
            metrics.score_tokens += tokens
            metrics.extra |= self.critic.metrics
            metrics.tokens.add_shaped(scored, dropped=torch.zeros_like(scored.sampled))
        old = scoring.with_placed(scored, old, metrics)
        reference_logp = scoring.reference(scored)
        teacher_logp = scoring.teachers.logps(scored) if scoring.teachers else torch.empty(0)
        progress = self.steps / self.num_steps
        scored, factor = scoring.shape(scored, old, reference_logp, metrics, progress=progress)
        trained = self._with_gradient(scored, torch.ones_like(scored.advantage))
        metrics.count_gradient(scored.select(trained)[0])

        keep = batch.trained.index_put((index,), old.correction.keep)
        norm = self._norm(batch, steps, keep)[index]
        place = {sequence: position for position, sequence in enumerate(members)}
        minibatches = []
        for sequences in steps:
            part, where = scored.select([place[i] for i in sequences if i in place])
            minibatches.append(
                Minibatch(
                    batch=part,
                    old_logp=select(old.old_logp, where),
                    factor=factor[where],
                    norm=norm[where],
                    reference_logp=select(reference_logp, where),
                    lag=lag[where],
                    teacher_logp=select(teacher_logp, where),
                    forecasts=forecasts and forecasts.select(where),
                )
            )
        return scored, old.old_logp, minibatches

    def _run(self, minibatch: Minibatch) -> None:
        """Run the forward and backward passes of a minibatch, or of a part that `add` adds."""
        began = time.perf_counter()
        metrics = self._metrics
        self.scoring.failed_batch = FailedBatch("step", minibatch)
        batch = minibatch.batch
        members = self._with_gradient(batch, minibatch.factor * minibatch.norm)
        passes = metrics.of_passes()
        if self._halves:
            first, members = self._halves.split(batch, members)
            self._add_gradient(minibatch, first, passes)
            self._halves.keep_first(self._master)
        self._add_gradient(minibatch, members, passes)
        reports = self._peers.gather_to_first(passes if self._peers.reports else None)
        if self._peers.rank == 0:
            metrics.add_passes([passes for passes in reports if passes is not None])
        metrics.tokens_run = self._peers.largest(passes.tokens_run)
        metrics.update_s += time.perf_counter() - began

    def _add_gradient(
        self, minibatch: Minibatch, members: Sequence[int], passes: StepMetrics
    ) -> None:
        """Add the gradient of the loss on some sequences of a minibatch, in microbatches.

        `members` are the indices of the sequences. The metrics are added to `passes`.
        """
        batch = minibatch.batch
        all_spans = batch.spans()
        spans = [all_spans[i] for i in members]
        needed = self.rules.scored(batch)
        microbatches = self.policy.pack(batch, spans, self._max_tokens, where=needed)
        costs = [sum(spans[i][1] - spans[i][0] for i in positions) for positions in microbatches]
        for number, counts in self._peers.deal(costs):
            counted = passes if counts else self._metrics.of_passes()
            microbatch, index = batch.select([members[i] for i in microbatches[number]])
            with self._peers.fail_together(NOT_FINITE):
                loss = self._loss.of(minibatch, microbatch, index, counted)
                if not math.isfinite(loss.item()):
                    raise FloatingPointError(
                        f"the loss of optimizer step {self.steps + 1} is {loss.item()}; "
                        "no step was taken"
                    )
            # A pass that another rank counts has no gradient, but all ranks must run as many.
            scale = self._loss_scale.value
            (scale * loss if counts else 0 * loss).backward()
            self._masters.collect_gradients(scale)
            if self.critic:
                self.critic.collect(scale, counts=counts)
            counted.microbatches += 1
            counted.sequence_tokens += len(microbatch.tokens)

    def step(self) -> None:
        """Take one optimizer step.

        If the gradient is not finite, take no step and raise FloatingPointError.
        """
        began = time.perf_counter()
        for master in self._master.values():
            if master.grad is None:
                # No sequence had a gradient. A zero gradient, unlike None, lets the momentum act.
                master.grad = torch.zeros_like(master)
            elif not is_sharded(master):
                self._peers.sum(master.grad)
        if self.config.stream:
            self._keep_whole()
            self._apply_divisor()
        noise = self._halves.noise(self._master) if self._halves else math.nan
        norm = self._weights.clip(self.config.grad_clip)
        overflows = self._loss_scale.absorbs(math.isfinite(norm))
        if not overflows and not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.steps + 1} is {norm}; "
                "no step was taken. Lower trainer.lr or narrow the correction band"
            )
        lr = self.config.lr * lr_factor(self.steps, self.config, num_steps=self.num_steps)
        plan = StepPlan(skip=True) if overflows else self._plan(norm, noise)
        if self.critic:
            self.critic.step(is_skipped=overflows)
        lr *= plan.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._update(is_skipped=plan.skip or self.steps < self._critic_steps)
        self.policy.weights_match_version = False
        self.steps += 1
        if self.scoring.teachers:
            self.scoring.teachers.after_step(self.steps)
        self.old.trained(self._metrics.kept_share)
        self._metrics.grad_norms.append(math.nan if overflows else norm)
        self._metrics.lr = lr
        self._metrics.update_s += time.perf_counter() - began

    def _update(self, *, is_skipped: bool) -> None:
        """Take an optimizer step, and round the new weights into the policy. Do nothing if the step
        is skipped.
        """
        if is_skipped:
            self._metrics.skipped_steps += 1
            self._weights.drop_gradients()
            return
        self.policy.reclaim_weights()
        moved = self._weights.apply(self.steps + 1)
        if self._masters.is_narrow:
            self._metrics.add_moved(self._peers.sum(moved))

    def _keep_whole(self) -> None:
        """Keep all added parts for `failed_batch`, if the gradient is not finite."""
        assert self.failed_batch
        minibatch = self._whole_minibatch or self.failed_batch.minibatch
        self.scoring.failed_batch = FailedBatch("step", minibatch, max(1, self.divisor))

    def _apply_divisor(self) -> None:
        """Divide the added parts' gradient and losses by the whole batch's divisor."""
        scale = 1 / max(1, self.divisor)
        for master in self._master.values():
            assert master.grad is not None
            master.grad.mul_(scale)
        self._metrics.losses = [scale * loss for loss in self._metrics.losses]

    def _plan(self, grad_norm: float, noise: float) -> StepPlan:
        """Return the combined decision of the techniques' controllers about the next optimizer
        step.

        `grad_norm` is the norm of the gradient, and `noise` its estimated variance.
        """
        if not self.techniques.controllers:
            return StepPlan()
        log_weight = torch.tensor(self._metrics.take_log_weights(), dtype=torch.float64)
        kl, kl_of_batch = self._metrics.take_kl()
        seen = StepSeen(log_weight, grad_norm, noise, kl, kl_of_batch)
        plan = self.techniques.plan(self._peers.from_first(seen))
        self._metrics.extra |= plan.metrics
        return plan

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last batch, and the CPU seconds used since the last call."""
        costs = self._total_costs()
        costs["forward_tokens"] = costs.get("forward_tokens", 0.0) + self._metrics.score_tokens
        costs["forward_per_token"] = costs["forward_tokens"] / max(1, self._metrics.fresh_tokens)
        cpu_s = time.process_time()
        metrics = {
            **self._metrics.metrics(),
            **{f"old_logps/{name}": value for name, value in costs.items()},
            **self._loss_scale.metrics(),
            "trainer/cpu_s": cpu_s - self._cpu_s,
        }
        self._cpu_s = cpu_s
        if self._bitwise:
            metrics[bitwise.COMPARED] = float(self.scoring.num_compared)
        if not self.config.max_tokens_per_microbatch:
            metrics["trainer/max_tokens_per_microbatch"] = float(self._max_tokens)
        if self._peers.count > 1:
            metrics["trainer/imbalance"] = self._metrics.imbalance
        return metrics

    def _total_costs(self) -> dict[str, float]:
        """Return this step's costs of obtaining `old_logp`. Bytes are summed over all ranks."""
        costs = dict(self.old.costs())
        ranks = self._peers.gather({name: costs[name] for name in costs if "bytes" in name})
        return costs | {name: sum(rank[name] for rank in ranks) for name in ranks[0]}

    def scatter_sample(self) -> list[dict[str, float]]:
        return self._metrics.scatter_sample()

    def tokens(self) -> list[TokenValues]:
        return self._metrics.tokens.values()

    def state(self) -> Mapping[str, Any]:
        return {
            **self._weights.state(),
            "steps": self.steps,
            "version": self.policy.version,
            "at_version": self.policy.weights_match_version,
            "jumps": self.policy.version_gaps,
            "base": self.policy.base,
            "loss_scale": self._loss_scale.state(),
            "teacher": self.scoring.teachers.state() if self.scoring.teachers else {},
            **({"critic": self.critic.state()} if self.critic else {}),
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. The optimizer may keep its tensors without a copy.

        Raises ConfigError if the checkpoint's adapters were trained on another base model, and
        ValueError if the checkpoint was written with another optimizer.
        """
        self.policy.require_base(state.get("base", 0))
        self.policy.reclaim_weights()
        self._weights.restore(state)
        if "loss_scale" in state:
            self._loss_scale.restore(state["loss_scale"])
        if self.scoring.teachers:
            self.scoring.teachers.restore(state.get("teacher", {}))
        if self.critic:
            self.critic.restore(state["critic"])
        self.steps = state["steps"]
        self.policy.version = state["version"]
        self.policy.weights_match_version = state["at_version"]
        self.policy.version_gaps = tuple((first, skipped) for first, skipped in state["jumps"])

    def _describe_experts(self, batch: Batch) -> dict[str, float]:
        metrics = {}
        if self.policy.has_experts:
            metrics["trainer/packing_noise"] = self.policy.packing_noise
        if batch.routed_experts:
            complete = batch.routed_experts.complete[batch.sampled].double().mean()
            metrics["routed_experts/missing_share"] = 1 - complete.item()
        return metrics

    def _any_fresh(self, batch: Batch, sequences: Sequence[int]) -> bool:
        """Return True if a sequence has a token that was not trained on in an earlier batch."""
        if batch.stored is None:
            return bool(sequences)
        return bool(batch.select(sequences)[0].fresh.any())

    def _audit(self, batch: Batch, old_logp: Tensor) -> Mapping[str, float]:
        """Return the audit's metrics for a batch.

        Replayed tokens are left out, because the weights that sampled them are not kept.
        """
        if batch.stored is not None:
            batch, index = batch.select_fresh()
            old_logp = select(old_logp, index)
        return self.audit(batch, old_logp)

    def _norm(self, batch: Batch, steps: list[list[int]], keep: Tensor) -> Tensor:
        """Return the factor of each token's loss, `[T]`: 1 / the divisor of the loss.

        `steps` has the indices of each optimizer step's sequences. Each step has its own divisor,
        such as its number of trained tokens. With `trainer.stream` the factor has no divisor. The
        divisors are summed in `divisor` instead, and `step` applies the sum.
        """
        indices = []
        norms = []
        for sequences in steps:
            part, index = batch.select(sequences)
            of_part = self.rules.norm(part, keep[index])
            if self.config.stream:
                divisor = self.rules.divisor(part, keep[index])
                of_part = of_part * divisor
                self.divisor += divisor
            norms.append(of_part)
            indices.append(index)
        norm = torch.cat(norms)
        return norm.new_zeros(len(batch.tokens)).index_put((torch.cat(indices),), norm)

    def _with_gradient(self, batch: Batch, factor: Tensor) -> list[int]:
        """Return the indices of the sequences that can have a gradient.

        `factor` `[T]` is the factor on each token's loss. A token with factor 0 has no gradient.
        """
        tokens = batch.trained
        if self.skips_zero_advantage:
            tokens = tokens & (factor != 0) & (batch.advantage != 0)
        return batch.sequences_with(tokens)


def _describe_sets(batch: Batch) -> dict[str, float]:
    """Return metrics of the sets of tokens to which sampling was truncated.

    {} if it was not truncated.
    """
    if batch.kept_sets is None:
        return {}
    sizes = torch.from_numpy(batch.kept_sets.sizes)[batch.sampled].double()
    return {
        "kept_sets/size_mean": sizes.mean().item(),
        "kept_sets/single_share": (sizes == 1).double().mean().item(),
    }


def _divide(batch: Batch, num_steps: int) -> list[list[int]]:
    """Divide a batch into optimizer steps. Return the indices of each step's sequences.

    Only sequences with a token that has a loss are returned. Sequences of one group are divided
    among the steps.
    """
    sequences = batch.sequences_with(batch.trained)
    return [sequences[k::num_steps] for k in range(num_steps) if sequences[k::num_steps]]
