"""Staleness control: per-token losses on S = pi / pi_old, what they are divided by, and two regularisers.

    loss = sum_t  norm[t] * weight[t] * keep[t] * surrogate.loss[t]

Plain functions of tensors of any one shape (packed `[T]` or padded `[B, T]`). The objectives take `log_staleness`
as `corrections.log_staleness` makes it (log S of a unit, gradient 1 towards the token's own log-probability) and
`advantage` per token. Weights, masks and `norm` never carry a gradient; `norm` is computed once on the whole batch,
so a batch cut into micro-batches sums to the same loss.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOG_LIMIT = 20.0
"""log S is held within +-20 before `exp`, as log D is."""

Normalise = Literal["action_tokens", "kept", "sequence_mean", "constant"]


class Surrogate(NamedTuple):
    """`loss` per token, before weights and denominators. `clipped`: True where the trust region acts."""

    loss: Tensor
    clipped: Tensor


def ppo_clip(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    low: float = 0.2,
    high: float = 0.28,
) -> Surrogate:
    """-min(S A, clip(S, 1 - low, 1 + high) A) (arXiv 1707.06347, eq. 7; unequal ends: arXiv 2503.14476).

    `clipped` tokens get no gradient: moving further would pay nothing.
    """
    ratio = _ratio(log_staleness)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return Surrogate(loss, _outside(ratio, advantage, low=low, high=high))


def dual_clip(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    low: float = 0.2,
    high: float = 0.28,
    cap: float = 3.0,
) -> Surrogate:
    """`ppo_clip`, and where A < 0 the loss is at most `cap * |A|` (arXiv 1912.09729).

    Bounds what PPO leaves unbounded: a token that became likelier although it was bad. `cap` is a value of S, > 1.
    """
    if not cap > 1:
        raise ValueError(
            f"cap must be > 1 (at S = 1 it would already take the gradient), got {cap}"
        )
    once = ppo_clip(log_staleness, advantage, low=low, high=high)
    capped = (advantage < 0) & (once.loss > -cap * advantage)
    return Surrogate(torch.where(capped, -cap * advantage, once.loss), once.clipped | capped)


def gspo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Surrogate:
    """`ppo_clip` on the sequence-mean ratio (arXiv 2507.18071, eq. 13), with that paper's narrow clip.

    `log_staleness` must be aggregated over `sequence` by `mean`; the paper divides by `sequence_mean`.
    """
    return ppo_clip(log_staleness, advantage, low=low, high=high)


def cispo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    low: float = 0.2,
    high: float = 0.28,
) -> Surrogate:
    """-sg(clip(S, 1 - low, 1 + high)) A log pi (arXiv 2506.13585, eq. 4): clipped tokens keep a gradient.

    Written with log S in the place of log pi: they differ by `old_logp`, a constant, so the gradient is the same and
    the value is 0 on fresh data. `low = 1` is the paper's choice, no lower bound.
    """
    ratio = _ratio(log_staleness.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    return Surrogate(-weight * advantage * log_staleness, weight != ratio)


def kl_penalty(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    coefficient: float = 1.0,
) -> Surrogate:
    """-(S A - coefficient / 2 (log S)^2): a soft trust region (arXiv 1707.06347, section 4, with the k2 estimator)."""
    loss = coefficient / 2 * log_staleness.square() - _ratio(log_staleness) * advantage
    return Surrogate(loss, torch.zeros_like(advantage, dtype=torch.bool))


def none(log_staleness: Float[Tensor, "*shape"], advantage: Float[Tensor, "*shape"]) -> Surrogate:
    """-S A: importance-weighted REINFORCE with no trust region."""
    return Surrogate(
        -_ratio(log_staleness) * advantage, torch.zeros_like(advantage, dtype=torch.bool)
    )


def token_norm(
    sampled: Bool[Tensor, "*shape"],
    keep: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    how: Normalise = "action_tokens",
    constant: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """What each token's loss is multiplied by so that the sum over the whole batch is the loss; 0 off the mask.

    `action_tokens`: 1 / action tokens **before** masking: dropping a token removes its gradient and leaves the
    others' alone. `kept`: 1 / tokens that the controls kept. `sequence_mean`: the mean over a sequence's action
    tokens (before masking), then over sequences. `constant`: 1 / (sequences * constant), no length in it (Dr. GRPO,
    arXiv 2503.20783). Only sequences with an action token are counted. Compute it on the whole batch, across every
    rank, before cutting. float64: denominators are counts, and the products are then summed in double precision.
    """
    counted = keep if how == "kept" else sampled
    rows = torch.where(sampled, sequence, 0)
    tokens = torch.bincount(rows[sampled], minlength=1)
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
    """KL(pi || reference) at each token, to be **added** to the loss with its own coefficient; 0 off the mask.

    With x = logp - reference_logp the value is k1 = x, k2 = x^2 / 2 or k3 = e^-x - 1 + x
    (joschu.net/blog/kl-approx.html). The gradient is that of k2, x * grad logp, for all three: on tokens drawn from
    pi it is the only one of them whose mean is the gradient of KL(pi || reference). Differentiating k1 gives 0 in
    the mean, and k3 gives the gradient of KL(reference || pi) (arXiv 2506.09477). On stale tokens multiply by
    sg(D * S). Contexts are taken as given: how a token steers later ones is not in it.
    """
    gap = torch.where(sampled, _widen(logp) - _widen(reference_logp.detach()), 0.0)
    k2 = gap.square() / 2
    held = gap.detach()
    match estimator:
        case "k1":
            value = held
        case "k2":
            return k2
        case "k3":
            value = _ratio(-held) - 1 + held
        case _:
            raise ValueError(f"estimator must be k1, k2 or k3, got {estimator!r}")
    return value + (k2 - k2.detach())


def entropy(logits: Float[Tensor, "*shape vocabulary"]) -> Float[Tensor, "*shape"]:
    """Entropy (nats) of the next-token distribution, exact, to be **subtracted** from the loss with its coefficient.

    `logits` are divided by the sampling temperature already.
    """
    logps = torch.log_softmax(_widen(logits), dim=-1)
    return -(logps.exp() * logps).sum(-1)


def sampled_entropy(
    logp: Float[Tensor, "*shape"], *, sampled: Bool[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Entropy from the sampled token alone, where full logits cost too much; 0 off the mask.

    The value is -logp. Its derivative would be 0 in the mean, so the gradient is that of -logp^2 / 2, whose mean
    over tokens drawn from pi is the entropy's. On stale tokens multiply by sg(D * S).
    """
    own = torch.where(sampled, _widen(logp), 0.0)
    half_square = own.square() / 2
    return -own.detach() - (half_square - half_square.detach())


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def _outside(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    ratio = ratio.detach()
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
