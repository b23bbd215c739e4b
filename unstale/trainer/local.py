"""The trainer: one batch becomes optimizer steps.

    prepare(batch) -> Work    old log-probabilities, corrections, denominators: once, before anything moves
    backward(part)            the gradient of one optimizer step, in micro-batches
    step()                    clip, schedule, optimizer

All of it is synchronous and meant for a worker thread. The model runs on its device; what is made of its
log-probabilities, `[T]` numbers, is formed on the CPU.
"""

import copy
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unstale.algorithms.corrections import Control, bounded_exp, check_finite, keep_all
from unstale.algorithms.objectives import reference_kl
from unstale.config import TrainerConfig
from unstale.model.forward import ForwardOptions, Scored
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.records import Batch
from unstale.trainer.metrics import StepMetrics
from unstale.trainer.optimizer import lr_factor, make_optimizer
from unstale.trainer.records import FailedBatch, Minibatch, PreparedBatch, Rules


class LocalTrainer:
    """Owns the optimizer and its float32 weights.

    Under float32 these are the policy's own. Under bfloat16 the policy holds the forward weights, a bfloat16 copy made
    after every step: what the forward pass uses is then exactly what is published. Gradients are summed in float32.
    """

    def __init__(
        self, policy: Policy, config: TrainerConfig, rules: Rules, old: OldLogps, *, num_steps: int
    ) -> None:
        """`num_steps`: optimizer steps of the whole run, over which the learning rate falls."""
        self.policy, self.config, self.rules, self.old = policy, config, rules, old
        self.num_steps = num_steps
        policy.set_forward_options(ForwardOptions.of(config))
        self.steps = 0
        self._forward = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._master = {name: _master(parameter) for name, parameter in self._forward.items()}
        self.optimizer = make_optimizer(config, list(self._master.values()))
        self._reference = policy.twin() if rules.objective.kl_coef else None
        self._tally = StepMetrics()
        self.suspect: FailedBatch | None = None

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Everything that is fixed before the first optimizer step on this batch.

        Sequences whose advantage is 0 have no gradient: they count in the denominators and are not run, nor scored.
        """
        began = time.perf_counter()
        self._tally = tally = StepMetrics()
        rules, whole, steps = self.rules, batch, _split(batch, self.config.minibatches_per_batch)
        busy = self._busy(whole, torch.ones_like(whole.advantage)) or list(
            range(whole.num_sequences)
        )
        batch, where = whole.select(busy)
        lag = torch.where(batch.sampled, self.policy.lag(batch.version), -1)
        old_logp, control = torch.empty(0), keep_all(batch.sampled)
        if not self.old.needs.inline:
            old_logp, control = self._judge(batch, self._now(batch), lag)
        reference = self._score(self._reference, batch).logp if self._reference else torch.empty(0)
        tally.figures["trainer/action_tokens"] = float(whole.sampled.sum())
        keep = whole.sampled.index_put((where,), control.keep)
        place = {sequence: i for i, sequence in enumerate(busy)}
        parts = []
        for members in steps:
            counted, index = whole.select(members)
            share = rules.objective.norm(counted.sampled, keep[index], counted.sequence)
            norm = share.new_zeros(len(whole.tokens)).index_put((index,), share)
            own, index = batch.select([place[i] for i in members if i in place])
            parts.append(
                Minibatch(own, _rows(old_logp, index), control.factor[index], norm[where][index],
                     _rows(reference, index), lag[index])
            )  # fmt: skip
        tally.prepare_s = time.perf_counter() - began
        tally.figures |= rules.audit(batch, old_logp)
        return PreparedBatch(tuple(parts))

    def backward(self, part: Minibatch) -> None:
        """Add the gradient of this part's loss, whatever the micro-batches it is cut into."""
        began = time.perf_counter()
        self.suspect = FailedBatch("step", part)
        self._tally.num_parts += 1
        busy = self._busy(part.batch, part.factor * part.norm)
        spans = part.batch.spans()
        chosen, asked = [spans[i] for i in busy], part.batch.sampled
        for members in self.policy.pack(
            part.batch, chosen, self.config.max_tokens_per_microbatch, where=asked
        ):
            micro, index = part.batch.select([busy[i] for i in members])
            loss = self._loss(part, micro, index)
            if not math.isfinite(loss.item()):
                raise FloatingPointError(
                    f"the loss of optimizer step {self.steps + 1} is {loss.item()}; no step was taken"
                )
            loss.backward()
            self._gather_gradients()
            self._tally.micro_batches += 1
            self._tally.tokens += len(micro.tokens)
        self._tally.seconds += time.perf_counter() - began

    def step(self) -> None:
        """One optimizer step on the gradients gathered since the last. Raises before it if they are not finite."""
        began = time.perf_counter()
        for master in self._master.values():
            if (
                master.grad is None
            ):  # every sequence was idle: the gradient is 0, which is not the same as none
                master.grad = torch.zeros_like(master)
        norm = float(nn.utils.clip_grad_norm_(self._master.values(), self.config.grad_clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.steps + 1} is {norm}; no step was taken. "
                "A lower trainer.lr, or a narrower correction band, keeps it finite"
            )
        rate = self.config.lr * lr_factor(self.steps, self.config, num_steps=self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._cast()
        self.policy.at_version = False
        self.steps += 1
        self.old.trained(self._tally.kept_share)
        self._tally.grad_norms.append(norm)
        self._tally.lr = rate
        self._tally.seconds += time.perf_counter() - began

    def metrics(self) -> Mapping[str, float]:
        """Of the batch last prepared, once all its parts are done."""
        costs = dict(self.old.costs())
        costs["forward_tokens"] = costs.get("forward_tokens", 0.0) + self._tally.now_tokens
        named = {f"old_logps/{name}": value for name, value in costs.items()}
        return self._tally.metrics() | named

    def points(self) -> list[dict[str, float]]:
        """`log_d`, `log_s` and `lag` of some action tokens of that batch, for plots."""
        return self._tally.points()

    def state(self) -> Mapping[str, Any]:
        """Weights, optimizer, position in the schedule, version. The tensors are the live ones."""
        return {
            "weights": {name: tensor.detach() for name, tensor in self._master.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "version": self.policy.version,
            "at_version": self.policy.at_version,
            "jumps": self.policy.version_gaps,
            "base": self.policy.base,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. The policy gets its weights and its version. ConfigError if its base is another."""
        self.policy.require_base(state.get("base", 0))
        for name, tensor in self._master.items():
            tensor.copy_(state["weights"][name])
        self._cast()
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps = state["steps"]
        self.policy.version = state["version"]
        self.policy.at_version = state["at_version"]
        self.policy.version_gaps = tuple((first, skipped) for first, skipped in state["jumps"])

    def _loss(self, part: Minibatch, micro: Batch, index: Tensor) -> Tensor:
        objective, run = self.rules.objective, self.policy.prefix_tree(micro)
        asked: dict[str, Any] = {"temperature": self.rules.temperature, "where": micro.sampled}
        entropy = torch.empty(0)
        if objective.entropy_coef:
            logp, entropy = self.policy.logps_and_entropy(run, **asked)
        else:
            logp = self.policy.logps(run, **asked)
        self._tally.run_tokens += run.num_tokens
        logp, entropy = logp.cpu(), entropy.cpu()
        check_finite(
            {"logp": logp.detach()}, micro.sampled, sequence=_episode(micro), version=micro.version
        )
        old_logp, factor, norm = _rows(part.old_logp, index), part.factor[index], part.norm[index]
        if self.old.needs.inline:
            old_logp, control = self._judge(micro, logp.detach(), part.lag[index])
            factor = control.factor
        surrogate = objective.surrogate(logp, old_logp, micro)
        loss = (factor * norm * surrogate.loss).sum()
        if objective.kl_coef:
            # Tokens are drawn from mu, the divergence is of pi: D * S carries over, whatever the controls say.
            ratio = bounded_exp(logp.detach() - micro.behavior_logp)
            divergence = reference_kl(logp, part.reference_logp[index], sampled=micro.sampled)
            loss = loss + objective.kl_coef * (norm * ratio * divergence).sum()
            self._tally.add("objective/reference_kl", float((norm * divergence.detach()).sum()))
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * (norm * entropy).sum()
            self._tally.add("objective/entropy", float((norm * entropy.detach()).sum()))
        log_s = logp.detach() - old_logp
        self._tally.learn(
            micro, old_logp, log_s=log_s, lag=part.lag[index], clipped=surrogate.clipped
        )
        self._tally.add("objective/loss", loss.item())
        return loss

    def _now(self, batch: Batch) -> Tensor:
        """The current log-probabilities, if the route reads them."""
        if not self.old.needs.now:
            return torch.empty(0)
        scored = self._score(self.policy, batch)
        self._tally.now_tokens += scored.forward_tokens
        return scored.logp

    def _judge(self, batch: Batch, now: Tensor, lag: Tensor) -> tuple[Tensor, Control]:
        """Old log-probabilities from the route, and what the discrepancy control says of them."""
        old_logp, exact = self.old.logps(batch, now)
        if not self.old.needs.inline:
            ones = torch.ones_like(old_logp)
            self.suspect = FailedBatch(
                "old_logps", Minibatch(batch, old_logp, ones, ones, torch.empty(0), lag)
            )
        logps = {"behavior_logp": batch.behavior_logp, "old_logp": old_logp}
        check_finite(logps, batch.sampled, sequence=_episode(batch), version=batch.version)
        control = self.rules.correction(old_logp, batch)
        self._tally.judge(batch, old_logp, control, exact=exact, lag=lag)
        return old_logp, control

    def _busy(self, batch: Batch, factor: Tensor) -> list[int]:
        """Sequences that can have a gradient, given what their tokens' losses are multiplied by."""
        alive = batch.sampled
        if self.rules.objective.idle_at_zero:
            alive = alive & (factor != 0) & (batch.advantage != 0)
        return [i for i, (start, end) in enumerate(batch.spans()) if alive[start:end].any()]

    def _score(self, policy: Policy, batch: Batch) -> Scored:
        return policy.score(
            batch,
            batch.sampled,
            temperature=self.rules.temperature,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
        )

    def _gather_gradients(self) -> None:
        """From forward weights that are a copy, into float32. One tensor at a time, after every micro-batch."""
        for name, parameter in self._forward.items():
            master = self._master[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def _cast(self) -> None:
        for name, parameter in self._forward.items():
            if parameter is not self._master[name]:
                parameter.copy_(self._master[name])


def _master(parameter: nn.Parameter) -> Tensor:
    """The optimizer's tensor for this forward weight: the weight itself, unless it is narrower than float32."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float())


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`, or nothing of nothing."""
    return values[index] if len(values) else values


def _episode(batch: Batch) -> Tensor:
    """`[T]`, for error messages: the episode that a token belongs to."""
    return torch.tensor(batch.episodes)[batch.sequence]


def _split(batch: Batch, num_parts: int) -> list[list[int]]:
    """Sequences with an action token, dealt out in turn, so that siblings are spread over the optimizer steps."""
    holding = [i for i, (start, end) in enumerate(batch.spans()) if batch.sampled[start:end].any()]
    if not holding:
        raise ValueError(
            f"none of the {batch.num_sequences} sequences of this batch has an action token"
        )
    return [holding[k::num_parts] for k in range(num_parts) if holding[k::num_parts]]
