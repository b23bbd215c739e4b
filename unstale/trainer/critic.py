"""The critic of `advantage.estimator = gae`: it forecasts the rewards of the rest of an episode.

    credit(batch)   forecast, and compute the advantages and the targets of the forecasts
    loss(...)       the critic's loss of some sequences, in the pass of the policy's loss
    step()          change the critic's weights

A forecast is a linear function of the last hidden state before an action, divided by its norm.
Least squares find this function (the head) from all batches so far, so it needs no learning rate.
All forecasts of a batch come from the weights before its first optimizer step, whatever version
sampled a token. They do not depend on the rewards of the batch. So with lambda 1 they are a
baseline that does not bias the gradient. Corrections and objective treat these advantages like any
others.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unstale.algorithms.advantages import whiten
from unstale.algorithms.gae import action_starts, gae_advantage, value_loss
from unstale.config import ConfigError, RunConfig
from unstale.model.forward import last_states
from unstale.model.policy import Policy
from unstale.records import Batch
from unstale.trainer.passes import pass_tokens
from unstale.trainer.weight_update import WeightUpdate


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The critic's forecasts for a batch, and the targets to which it is trained.

    Tensors are `[T]` on the CPU.
    """

    starts: Tensor
    """True for the first token of each action. The critic makes a forecast before it."""
    value: Tensor
    """The forecast at the first token of each action, made before the batch's optimizer steps. 0
    for other tokens.
    """
    target: Tensor

    def select(self, index: Tensor) -> "Forecasts":
        return Forecasts(self.starts[index], self.value[index], self.target[index])


_RIDGE = 3e-3
"""Penalty on the squares of the head's weights, added to the mean squared error of a batch. In the
environment `retail`, penalties from a tenth to ten times this one gave equally good forecasts.
"""


class Critic:
    """A critic: a linear head on the hidden states of the policy, or of a copy of the model."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        """Create a critic whose forecasts are 0.

        Raises ConfigError if the model's output head is not a single linear map.
        """
        if not policy.has_plain_head:
            raise ConfigError(
                f"advantage.estimator = gae is not built for {type(policy.model).__name__}, whose "
                "output head is more than one linear map: the hidden states before it are not "
                "read. Use an estimator that compares groups, such as grpo"
            )
        self._options = config.critic
        self._advantage = config.advantage
        self._clip_norm = config.trainer.grad_clip
        self._peers = policy.peers
        self._own = _trained_copy(policy) if config.critic.model == "own" else None
        self._weights = WeightUpdate(self._own, config) if self._own else None
        self._model = self._own or policy
        self._max_tokens = pass_tokens(policy, config, trains=False)
        width = policy.model.config.get_text_config().hidden_size
        kind: Any = {"dtype": torch.float64, "device": policy.device}
        self._head = torch.zeros(width + 1, **kind)
        """The linear head: a weight for each hidden feature, and a constant."""
        self._squares = torch.zeros(width + 1, width + 1, **kind)
        """For each pair of features: their mean product in a batch, summed over steps with weights
        that decrease with age.
        """
        self._products = torch.zeros_like(self._head)
        """For each feature: the mean product with the target, summed over steps as in
        `_squares`.
        """
        self._new = [torch.zeros_like(each) for each in (self._squares, self._products)]
        """The sums that this rank will add to `_squares` and `_products` at the next optimizer
        step.
        """
        self._pass: list[tuple[Tensor, Tensor]] = []
        """The sums that the last forward pass adds to `_new`, unless another rank adds the same
        ones.
        """
        self._steps = 0
        self.metrics: dict[str, float] = {}
        """The critic's metrics for the last batch."""

    @classmethod
    def of(cls, policy: Policy, config: RunConfig) -> "Critic | None":
        return cls(policy, config) if config.advantage.estimator == "gae" else None

    def credit(self, batch: Batch) -> tuple[Batch, Forecasts, int]:
        """Compute the critic's forecasts and the advantages of a batch.

        Return the batch with these advantages, its forecasts, and the number of tokens in the
        forward passes that this took.
        """
        options = self._advantage
        sequence = batch.sequence
        starts = action_starts(batch.sampled, batch.turn, sequence=sequence, over=options.over)
        scored = self._model.read_states(
            batch, starts, self._forecast, max_tokens_per_microbatch=self._max_tokens
        )
        value = scored.logp
        action = starts.cumsum(0) - 1
        paid = batch.sampled.nonzero().squeeze(1)
        rewards = torch.zeros(int(starts.sum()), dtype=torch.float64)
        rewards.index_add_(0, action[paid], token_rewards(batch)[paid])
        estimate = partial(
            gae_advantage,
            rewards,
            value[starts],
            sequence=sequence[starts],
            discount=options.discount,
        )
        advantage = estimate(lam=options.lam)
        target = estimate(lam=self._options.lam) + value[starts].double()
        targets = torch.zeros_like(value)
        targets[starts] = target.to(value.dtype)
        self._describe(value[starts].double(), targets[starts].double())
        of_tokens = advantage[action[paid]]
        if options.whiten:
            of_tokens = whiten(of_tokens)
        spread = torch.zeros_like(batch.advantage)
        spread[paid] = of_tokens.to(spread.dtype)
        forecasts = Forecasts(starts, value, targets)
        return replace(batch, advantage=spread), forecasts, scored.forward_tokens

    @contextmanager
    def reading(self) -> Iterator[list[Tensor]]:
        """Return a context with a list, to which passes append hidden states for `loss`.

        The list stays empty if the critic has a model of its own.
        """
        if self._own:
            yield []
            return
        with last_states() as states:
            yield states

    def loss(
        self, part: Batch, states: list[Tensor], minibatch: Forecasts, index: Tensor
    ) -> Tensor:
        """Return the critic's loss on some sequences of a minibatch, a scalar with a gradient.

        The loss is a mean over the minibatch's actions. `part` has the sequences, and `index` the
        position of each of their tokens in the minibatch, of which `minibatch` has the forecasts.
        `states` has the policy's hidden states before the sequences' sampled tokens.
        """
        here = minibatch.select(index)
        where = part.sampled.clone()
        where[list(part.offsets[:-1])] = False  # nothing comes before the first token
        if self._own:
            where = where & here.starts
            hidden = self._own.states_before(self._own.prefix_tree(part), where)
        else:
            hidden = _scale_gradient(states[0], self._options.coef)
        places = where.nonzero().squeeze(1)
        chosen = here.starts[places].nonzero().squeeze(1)
        places = places[chosen]
        hidden = hidden[chosen.to(hidden.device)]
        count = int(minibatch.starts.sum())
        features = _features(hidden.detach())
        target = here.target[places].to(features)
        self._pass = [(features.T @ features / count, features.T @ target / count)]
        value = self._forecast(hidden).cpu()
        loss = value_loss(value, here.value[places], here.target[places], clip=self._options.clip)
        return loss.sum() / count

    def collect(self, scale: float, *, counts: bool) -> None:
        """Keep the results of the last forward pass for the next `step`.

        These are the sums of products of features, and, if the critic has a model of its own, the
        model's gradients divided by `scale`. With `counts` False, the sums are dropped, because
        another rank adds the same ones.
        """
        for new in self._pass if counts else ():
            for total, each in zip(self._new, new, strict=True):
                total += each
        self._pass = []
        if self._weights:
            self._weights.masters.collect_gradients(scale)

    def step(self, *, is_skipped: bool) -> None:
        """Change the critic's weights. All ranks must call this.

        With `is_skipped`, no weight changes. Raises FloatingPointError if hidden states, targets or
        gradients are not finite.
        """
        squares, products = map(self._peers.sum, self._new)
        norm = self._weights.clip(self._clip_norm) if self._weights else 0.0
        norm += float(squares.norm() + products.norm())
        if not is_skipped and not math.isfinite(norm):
            raise FloatingPointError("the critic's step is not finite; no step was taken")
        if not is_skipped:
            self._steps += 1
            self._squares.mul_(self._options.memory).add_(squares)
            self._products.mul_(self._options.memory).add_(products)
            penalty = torch.full_like(self._head, _RIDGE)
            penalty[-1] = 1e-9  # the constant is free
            system = self._squares + penalty.diag()
            self._head = torch.linalg.solve(system, self._products)
            if self._weights:
                for group in self._weights.optimizer.param_groups:
                    group["lr"] = self._options.own_lr
                self._weights.apply(self._steps)
        for each in self._new:
            each.zero_()
        if self._weights:
            self._weights.drop_gradients()

    def state(self) -> Mapping[str, Any]:
        return {
            "head": self._head,
            "squares": self._squares,
            "products": self._products,
            "steps": self._steps,
            "own": self._weights.state() if self._weights else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for mine, name in (
            (self._head, "head"),
            (self._squares, "squares"),
            (self._products, "products"),
        ):
            mine.copy_(state[name])
        self._steps = state["steps"]
        if self._weights:
            self._weights.restore(state["own"])

    def _forecast(self, states: Tensor) -> Tensor:
        """Return the forecasts `[R]` from hidden states `[R, H]`."""
        return _features(states) @ self._head

    def _describe(self, value: Tensor, target: Tensor) -> None:
        """Compute the critic's metrics from a batch's n forecasts and their targets, `[n]` each."""
        error = (target - value).square().mean()
        spread = target.var(correction=0)
        unexplained = (target - value).var(correction=0) / spread
        self.metrics = {
            "critic/value_mean": value.mean().item(),
            "critic/target_mean": target.mean().item(),
            "critic/loss": error.item() / 2,
            "critic/explained_variance": (1 - unexplained).item() if spread else math.nan,
        }


def token_rewards(batch: Batch) -> Tensor:
    """Return the reward that follows each token, `[T]` in float64.

    The reward of a turn follows the turn's last token. The reward of the episode follows the last
    sampled token of each of its sequences. Raises ValueError if a sequence has turn rewards, but
    not one for each turn.
    """
    rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for i, (start, end) in enumerate(batch.spans()):
        places = start + batch.sampled[start:end].nonzero().squeeze(1)
        if not len(places):
            continue
        of_turns = batch.turn_rewards[i] if batch.turn_rewards else ()
        _, counts = batch.turn[places].unique_consecutive(return_counts=True)
        if of_turns:
            if len(of_turns) != len(counts):
                raise ValueError(
                    f"episode {batch.episodes[i]}: {len(of_turns)} turn_rewards, "
                    f"{len(counts)} turns"
                )
            rewards[places[counts.cumsum(0) - 1]] += torch.tensor(of_turns, dtype=torch.float64)
        rewards[places[-1]] += batch.reward[i]
    return rewards


def _features(states: Tensor) -> Tensor:
    """Return the critic's features `[R, H + 1]`: states divided by their norms, and ones."""
    return F.pad(F.normalize(states.double(), dim=-1), (0, 1), value=1.0)


def _scale_gradient(states: Tensor, factor: float) -> Tensor:
    held = states.detach()
    return held + factor * (states - held) if factor else held


def _trained_copy(policy: Policy) -> Policy:
    """Return a copy of the policy, with its own weights and the same trainable parameters."""
    copied = policy.twin()
    trained = {name for name, each in policy.model.named_parameters() if each.requires_grad}
    for name, parameter in copied.model.named_parameters():
        parameter.requires_grad_(name in trained)
    return copied
