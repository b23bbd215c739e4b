"""Objectives: losses on the staleness ratio S = pi / pi_old, denominators, regularizers.

    loss = sum_t  norm[t] * weight[t] * keep[t] * surrogate.loss[t]

Functions take tensors of any one shape: packed `[T]` or padded `[B, T]`. An objective receives log
S as `corrections.log_staleness` returns it (log S of a unit, gradient 1 for the token's own
log-probability) and the advantage of each token. With `sampled`, the mask of action tokens, the
advantage of other tokens may be anything, also NaN; without it, it must be finite. Weights, masks
and `norm` carry no gradient. Compute `norm` once on the whole batch: the losses of its
micro-batches then sum to the loss of the batch.

A function with `@objective` is a value of the option `objective.kind`, and its keyword-only
parameters but `sampled` are options of that section.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import bounded_exp, renumber, widen
from unstale.config.algorithm import LossAggregation


class Surrogate(NamedTuple):
    """The loss of each token, without weights, and where the trust region limits it."""

    loss: Tensor
    clipped_low: Tensor
    """True where S is below the trust region and the loss no longer follows it."""
    clipped_high: Tensor
    """True where S is above the trust region and the loss no longer follows it."""

    @property
    def clipped(self) -> Tensor:
        return self.clipped_low | self.clipped_high


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """An objective and its requirements."""

    surrogate: Callable[..., Surrogate]
    per_sequence: bool = False
    """S must be the geometric mean over the sequence."""
    trains_zero_advantage: bool = False
    """A token with advantage 0 can have a gradient."""


OBJECTIVES: dict[str, ObjectiveSpec] = {}

Function = TypeVar("Function", bound=Callable[..., Surrogate])


def objective(
    *, per_sequence: bool = False, trains_zero_advantage: bool = False
) -> Callable[[Function], Function]:
    """Register a function as a value of `objective.kind`."""

    def register(function: Function) -> Function:
        OBJECTIVES[function.__name__] = ObjectiveSpec(function, per_sequence, trains_zero_advantage)
        return function

    return register


@objective()
def ppo_clip(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Surrogate:
    """PPO's clipped loss: -min(S A, clip(S, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7; unequal bounds are from arXiv 2503.14476. Clipped tokens have no
    gradient.
    """
    advantage = _of_actions(advantage, sampled)
    ratio = bounded_exp(log_staleness)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    held = ratio.detach()
    too_low = (advantage < 0) & (held < 1 - clip_low)
    too_high = (advantage > 0) & (held > 1 + clip_high)
    return Surrogate(loss, too_low, too_high)


@objective()
def dual_clip(  # noqa: PLR0913 - two clips
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> Surrogate:
    """`ppo_clip`, with a loss of at most `dual_clip * |A|` where A < 0 (arXiv 1912.09729).

    PPO does not bound the loss of a token with A < 0 that became likelier. `dual_clip` is a value
    of S above 1; raises ValueError otherwise.
    """
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1 (1 stops fresh tokens too), got {dual_clip}")
    advantage = _of_actions(advantage, sampled)
    loss, too_low, too_high = ppo_clip(
        log_staleness, advantage, clip_low=clip_low, clip_high=clip_high
    )
    bound = -dual_clip * advantage
    above = (advantage < 0) & (loss > bound)
    return Surrogate(torch.where(above, bound, loss), too_low, too_high | above)


@objective(per_sequence=True)
def gspo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """GSPO: `ppo_clip` on the sequence-mean ratio, with a narrow clip (arXiv 2507.18071, eq. 13).

    `log_staleness` must be aggregated over `sequence` by `mean`. The paper's denominator is
    `sequence_mean`.
    """
    return ppo_clip(
        log_staleness, advantage, sampled=sampled, clip_low=clip_low, clip_high=clip_high
    )


@objective()
def cispo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Surrogate:
    """CISPO: -sg(clip(S, 1 - clip_low, 1 + clip_high)) A log pi; clipped tokens keep a gradient.

    arXiv 2506.13585, eq. 4, with log S instead of log pi. They differ by the constant `old_logp`:
    the gradient is the same, and the loss is 0 on fresh tokens. The paper has `clip_low = 1`, which
    is no lower bound.
    """
    advantage = _of_actions(advantage, sampled)
    ratio = bounded_exp(log_staleness.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(-weight * advantage * log_staleness, ratio < weight, ratio > weight)


@objective()
def sapo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Surrogate:
    """SAPO: a soft gate in place of a clip, -4 / tau * sigmoid(tau (S - 1)) A.

    arXiv 2511.20347 (soft adaptive policy optimization); tau is `tau_pos` where A > 0, else
    `tau_neg`. At S = 1 the gradient is that of -S A; it fades on both sides of 1, faster for a
    greater tau. Raises ValueError for a tau that is not > 0. The paper's denominator is
    `sequence_mean`.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be > 0, got {tau_pos} and {tau_neg}")
    advantage = _of_actions(advantage, sampled)
    tau = torch.full_like(log_staleness, tau_neg).masked_fill(advantage > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (bounded_exp(log_staleness) - 1))
    return _unclipped(-gate * advantage)


@objective(trains_zero_advantage=True)
def dro(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    dro_beta: float = 0.05,
) -> Surrogate:
    """DRO: a regression of `dro_beta` log S on the advantage, -(A log S - dro_beta / 2 (log S)^2).

    arXiv 2405.19107 (direct reward optimization) and arXiv 2501.12599. Plus A^2 / (2
    dro_beta) it is (A - dro_beta log S)^2 / (2 dro_beta). It needs no importance weight: the
    gradient of a token is its score times `dro_beta log S - A`. The papers' S is that of a sequence
    (unit `sequence`, aggregated by `sum`).
    """
    advantage = _of_actions(advantage, sampled)
    return _unclipped(dro_beta / 2 * log_staleness.square() - log_staleness * advantage)


@objective(trains_zero_advantage=True)
def kl_penalty(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    kl_penalty: float = 1.0,
) -> Surrogate:
    """A soft trust region: -(S A - kl_penalty / 2 (log S)^2).

    arXiv 1707.06347, section 4, with the k2 estimator of the KL.
    """
    gain = bounded_exp(log_staleness) * _of_actions(advantage, sampled)
    return _unclipped(kl_penalty / 2 * log_staleness.square() - gain)


@objective()
def none(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
) -> Surrogate:
    """Importance-weighted REINFORCE without a trust region: -S A."""
    return _unclipped(-bounded_exp(log_staleness) * _of_actions(advantage, sampled))


def _of_actions(advantage: Tensor, sampled: Tensor | None) -> Tensor:
    """Return the advantage with 0 for tokens that are not action tokens."""
    return advantage if sampled is None else torch.where(sampled, advantage, 0.0)


def _unclipped(loss: Tensor) -> Surrogate:
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return Surrogate(loss, nowhere, nowhere)


def token_norm(
    sampled: Bool[Tensor, "*shape"],
    keep: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    how: LossAggregation = "action_tokens",
    constant: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """Return the factor of each token's loss, such that the sum over the batch is the loss.

    - `action_tokens`: 1 / action tokens before masking, so a dropped token leaves the other
      gradients as they are.
    - `kept`: 1 / tokens that the correction kept.
    - `sequence_mean`: the mean over a sequence's action tokens before masking, then over sequences.
      A sequence's reward then counts 1 / length.
    - `constant`: 1 / (sequences * constant), independent of length (Dr. GRPO, arXiv 2503.20783).

    Only sequences with an action token count. Compute it on the whole batch, across all ranks. The
    result is float64. Raises ValueError for `constant <= 0`.
    """
    counted = keep if how == "kept" else sampled
    index, num_rows = renumber(torch.where(sampled, sequence, 0))
    rows = index.reshape(sampled.shape)
    tokens = torch.bincount(rows[sampled], minlength=num_rows)
    num_sequences = tokens.count_nonzero().clamp(min=1).double()
    match how:
        case "action_tokens" | "kept":
            denominator = counted.sum().clamp(min=1).double()
        case "sequence_mean":
            denominator = tokens.clamp(min=1)[rows] * num_sequences
        case "constant":
            if not constant > 0:
                raise ValueError(f"constant must be > 0, got {constant}")
            denominator = constant * num_sequences
        case _:
            raise ValueError(
                f"how must be action_tokens, kept, sequence_mean or constant, got {how!r}"
            )
    return counted / denominator


def reference_kl(
    logp: Float[Tensor, "*shape"],
    reference_logp: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Tensor, "*shape"]:
    """Return KL(pi || reference) per action token, to be added to the loss with a coefficient.

    With x = logp - reference_logp the value is k1 = x, k2 = x^2 / 2 or k3 = e^-x - 1 + x
    (joschu.net/blog/kl-approx.html). The gradient is that of k2, x * grad logp, for all three: on
    tokens drawn from pi only its mean is the gradient of KL(pi || reference). The gradient of k1 is
    0 in the mean, and that of k3 belongs to KL(reference || pi) (arXiv 2506.09477). On stale tokens
    multiply by sg(D * S). The effect of a token on later contexts is not included.
    """
    gap = torch.where(sampled, widen(logp) - widen(reference_logp.detach()), 0.0)
    k2 = gap.square() / 2
    held = gap.detach()
    match estimator:
        case "k1":
            value = held
        case "k2":
            return k2
        case "k3":
            value = bounded_exp(-held) - 1 + held
        case _:
            raise ValueError(f"estimator must be k1, k2 or k3, got {estimator!r}")
    return value + (k2 - k2.detach())


def entropy(logits: Float[Tensor, "*shape vocabulary"]) -> Float[Tensor, "*shape"]:
    """Return the exact entropy, in nats, of next-token distributions; subtract it from the loss.

    `logits` are already divided by the sampling temperature. A logit of -inf is a token that cannot
    be drawn: it adds nothing, and its gradient is 0.
    """
    logps = torch.log_softmax(widen(logits), dim=-1)
    return -(logps.exp() * logps.masked_fill(logps.isneginf(), 0.0)).sum(-1)


def sampled_entropy(
    logp: Float[Tensor, "*shape"], *, sampled: Bool[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return an estimate of the entropy from the sampled tokens, without full logits.

    The value is -logp. Its derivative is 0 in the mean, so the gradient is that of -logp^2 / 2: its
    mean over tokens drawn from pi is the gradient of the entropy. On stale tokens multiply by sg(D
    * S).
    """
    values = torch.where(sampled, widen(logp), 0.0)
    half_square = values.square() / 2
    return -values.detach() - (half_square - half_square.detach())
