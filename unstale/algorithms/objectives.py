"""Objectives: losses that depend on the staleness ratio S = pi / pi_old, and the loss's divisor.

    loss = sum_t  norm[t] * weight[t] * keep[t] * surrogate.loss[t]

Functions take tensors of any one shape: packed `[T]` or padded `[B, T]`. An objective receives log
S from `corrections.log_staleness`: the value of the token's unit, with gradient 1 for the token's
own log-probability. It also receives the advantage A of each token. `sampled` is the mask of tokens
that the policy sampled. If it is given, the advantages of other tokens are ignored, even NaN.
Otherwise all advantages must be finite. Weights, masks and `norm` carry no gradient. Compute `norm`
once on the whole batch. The losses of its micro-batches then sum to the loss of the batch.

`unstale/objectives` declares an objective for each of these functions, with the same name.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import (
    LOG_LIMIT,
    aggregate,
    binary_kl,
    bounded_exp,
    log_discrepancy,
    renumber,
    widen,
)
from unstale.config.algorithm import LossAggregation


class Surrogate(NamedTuple):
    """The loss of each token before weights are applied, and masks of clipped tokens.

    A token is clipped if its ratio S = pi / pi_old is beyond a limit of the objective. With most
    objectives, the loss of such a token does not change with S.
    """

    loss: Tensor
    clipped_low: Tensor
    """True where S is below the lower limit of the objective."""
    clipped_high: Tensor
    """True where S is above the upper limit of the objective."""

    @property
    def clipped(self) -> Tensor:
        return self.clipped_low | self.clipped_high


def ppo_clip(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Surrogate:
    """PPO's clipped loss: -min(S A, clip(S, 1 - clip_low, 1 + clip_high) A).

    S is the staleness ratio pi / pi_old and A the advantage. See arXiv 1707.06347, eq. 7; different
    limits on the two sides are from arXiv 2503.14476. Clipped tokens have no gradient.
    """
    advantage = _of_actions(advantage, sampled)
    ratio = bounded_exp(log_staleness)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    held = ratio.detach()
    too_low = (advantage < 0) & (held < 1 - clip_low)
    too_high = (advantage > 0) & (held > 1 + clip_high)
    return Surrogate(loss, too_low, too_high)


def dual_clip(  # noqa: PLR0913 - two clips
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> Surrogate:
    """PPO's clipped loss, limited to `dual_clip * |A|` where the advantage A is negative.

    Without this limit (arXiv 1912.09729) the loss is unbounded for a token with A < 0 whose
    probability grew. With it, S = pi / pi_old counts as at most `dual_clip` for such a token.
    Raises ValueError unless `dual_clip` is above 1.
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


def gspo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """GSPO: PPO's clipped loss on the mean ratio of a sequence (arXiv 2507.18071, eq. 13).

    The limits are near 1, because a mean ratio varies little. `log_staleness` must be aggregated
    over the unit `sequence` by `mean`. The paper averages the loss by `sequence_mean`
    (`token_norm`).
    """
    return ppo_clip(
        log_staleness, advantage, sampled=sampled, clip_low=clip_low, clip_high=clip_high
    )


def cispo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Surrogate:
    """CISPO: -sg(clip(S, 1 - clip_low, 1 + clip_high)) A log pi, so clipped tokens keep a gradient.

    S is the staleness ratio pi / pi_old, A the advantage, and sg stops the gradient (arXiv
    2506.13585, eq. 4). The code uses log S instead of log pi. The two differ by the constant
    `old_logp`, so the gradient is the same, and the loss is 0 where S = 1. The paper uses `clip_low
    = 1`, which sets no lower limit.
    """
    advantage = _of_actions(advantage, sampled)
    ratio = bounded_exp(log_staleness.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(-weight * advantage * log_staleness, ratio < weight, ratio > weight)


def sapo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Surrogate:
    """SAPO: -4 / tau * sigmoid(tau (S - 1)) A, a soft limit instead of a clip.

    From soft adaptive policy optimization (arXiv 2511.20347). S is the staleness ratio pi / pi_old,
    A the advantage, and tau is `tau_pos` where A > 0, else `tau_neg`. At S = 1 the gradient is that
    of -S A. It becomes smaller on both sides of 1, faster for a greater tau. The paper averages the
    loss by `sequence_mean` (`token_norm`). Raises ValueError if a tau is not > 0.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be > 0, got {tau_pos} and {tau_neg}")
    advantage = _of_actions(advantage, sampled)
    tau = torch.full_like(log_staleness, tau_neg).masked_fill(advantage > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (bounded_exp(log_staleness) - 1))
    return _unclipped(-gate * advantage)


def dro(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    dro_beta: float = 0.05,
) -> Surrogate:
    """DRO: -(A log S - dro_beta / 2 (log S)^2), which fits `dro_beta` log S to the advantage A.

    S is the staleness ratio pi / pi_old. In the papers (direct reward optimization, arXiv
    2405.19107, and arXiv 2501.12599) it is the ratio of a whole sequence: unit `sequence`,
    aggregated by `sum`. The loss plus A^2 / (2 dro_beta) is (A - dro_beta log S)^2 / (2 dro_beta).
    No importance weight is needed: the gradient of a token's loss is `dro_beta log S - A` times the
    gradient of `logp`.
    """
    advantage = _of_actions(advantage, sampled)
    return _unclipped(dro_beta / 2 * log_staleness.square() - log_staleness * advantage)


def kl_penalty(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    kl_penalty: float = 1.0,
) -> Surrogate:
    """PPO with a KL penalty instead of a clip: -(S A - (kl_penalty / 2) * (log S)^2).

    S is the staleness ratio pi / pi_old and A the advantage. See arXiv 1707.06347, section 4. (log
    S)^2 / 2 is the k2 estimator of the KL divergence.
    """
    gain = bounded_exp(log_staleness) * _of_actions(advantage, sampled)
    return _unclipped(kl_penalty / 2 * log_staleness.square() - gain)


def dppo(  # noqa: PLR0913 - two limits
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    old_logp: Float[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"] | None = None,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    kl_tau: float = 0.0,
) -> Surrogate:
    """DPPO: -S A, without gradient where pi is too far from pi_old and A moves it further away.

    S is the staleness ratio pi / pi_old of the token and A the advantage. The distance is a
    divergence of pi from pi_old over two events: the token, and any other token. It is |pi -
    pi_old| (`tv`) or KL(pi_old, pi) in nats (`kl`). The loss is 0 for a token with A > 0 that
    became likelier by more than `divergence_high`, and for one with A < 0 that became less likely
    by more than `divergence_low`. `kl_tau` (log S)^2 is added to the loss of every token, including
    these. See arXiv 2602.04879, eq. 12 (mask), 13 (`tv`) and 14 (`kl`). In the paper, pi_old is the
    engine's policy mu.
    """
    advantage = _of_actions(advantage, sampled)
    old = widen(old_logp.detach())
    now = old + log_staleness.detach()
    change = now.exp() - old.exp()
    distance = change.abs() if divergence == "tv" else binary_kl(old, now)
    too_low = (advantage < 0) & (change < 0) & (distance > divergence_low)
    too_high = (advantage > 0) & (change > 0) & (distance > divergence_high)
    gain = torch.where(too_low | too_high, 0.0, bounded_exp(log_staleness) * advantage)
    return Surrogate(kl_tau * log_staleness.square() - gain, too_low, too_high)


def vespo(  # noqa: PLR0913 - two pairs of constants
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Surrogate:
    """VESPO: -sg(W^k exp(lambda (1 - W))) A log pi, a smooth weight of a whole sequence.

    W is the product of a sequence's staleness ratios: `log_staleness` must be aggregated over the
    unit `sequence` by `sum`. k and lambda are `vespo_k_pos` and `vespo_lambda_pos` where the
    advantage A >= 0, else `vespo_k_neg` and `vespo_lambda_neg`. sg stops the gradient. The weight
    is 1 at W = 1, and goes to 0 far below and far above. The code uses log S instead of log pi, as
    in `cispo`. See arXiv 2602.10693, whose W is pi / mu, with c1 = k and c2 = lambda. The paper
    does not divide by lengths.
    """
    advantage = _of_actions(advantage, sampled)
    log_w = log_staleness.detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    positive, negative = (
        (k * log_w + rate * (1 - log_w.exp())).exp()
        for k, rate in ((vespo_k_pos, vespo_lambda_pos), (vespo_k_neg, vespo_lambda_neg))
    )
    weight = torch.where(advantage >= 0, positive, negative)
    return _unclipped(-weight * advantage * log_staleness)


def drpo(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    old_logp: Float[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"] | None = None,
    drpo_delta: float = 0.2,
) -> Surrogate:
    """DRPO: -(S A - |A| / (2 drpo_delta) pi_old (S - 1)^2), a smooth form of `dppo`.

    S is the staleness ratio pi / pi_old of the token and A the advantage. The gradient of a token's
    logp is that of -S A, times 1 - sign(A) (pi - pi_old) / drpo_delta. So it shrinks as A moves the
    token's probability away from pi_old, is 0 at a change of `drpo_delta`, and has the opposite
    sign beyond. See arXiv 2606.09821, eq. 8, whose pi_old is the engine's policy mu.
    """
    advantage = _of_actions(advantage, sampled)
    old = widen(old_logp.detach()).exp()
    if sampled is not None:
        old = torch.where(sampled, old, 0.0)
    ratio = bounded_exp(log_staleness)
    pull = advantage.abs() * old * (ratio - 1).square() / (2 * drpo_delta)
    return _unclipped(pull - ratio * advantage)


def vaco(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
    vaco_delta: float = 0.2,
) -> Surrogate:
    """VACO: -S A, without gradient where A moves a token of a far sequence further away.

    S is the staleness ratio pi / pi_old of the token and A the advantage. A sequence is far if the
    mean of |S - 1| over its sampled tokens is above `vaco_delta`. Half of that mean estimates the
    total variation between pi_old and pi. In a far sequence, tokens with A log S > 0 have the loss
    0. See arXiv 2603.01365, whose pi_old is the engine's policy mu. The mean is per sequence as in
    open-instruct.
    """
    advantage = _of_actions(advantage, sampled)
    ratio = bounded_exp(log_staleness)
    far = aggregate((ratio.detach() - 1).abs(), sequence, sampled=sampled) > vaco_delta
    stopped = far & (advantage * log_staleness.detach() > 0)
    loss = -torch.where(stopped, 0.0, ratio * advantage)
    return Surrogate(loss, stopped & (advantage < 0), stopped & (advantage > 0))


def none(
    log_staleness: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"] | None = None,
) -> Surrogate:
    """REINFORCE with an importance weight and no trust region: -S A.

    S is the staleness ratio pi / pi_old and A the advantage.
    """
    return _unclipped(-bounded_exp(log_staleness) * _of_actions(advantage, sampled))


def mask_sequences(  # noqa: PLR0913 - the values of tokens
    surrogate: Surrogate,
    logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
    threshold: float,
) -> Surrogate:
    """Set the loss of tokens with A < 0 to 0 in sequences from which the policy has moved away.

    This is off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556). The policy has moved away
    from a sequence if the mean of log mu - log pi over its sampled tokens is above `threshold`, in
    nats. mu is the engine's policy, so the mean contains discrepancy and staleness. The masked
    tokens have no gradient, and count as clipped from below.
    """
    log_ratio = log_discrepancy(logp, behavior_logp, sampled=sampled)
    far = aggregate(-log_ratio, sequence, sampled=sampled) > threshold
    dropped = sampled & far & (advantage < 0)
    loss = torch.where(dropped, 0.0, surrogate.loss)
    return surrogate._replace(loss=loss, clipped_low=surrogate.clipped_low | dropped)


def _of_actions(advantage: Tensor, sampled: Tensor | None) -> Tensor:
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
    """Return the factor on each token's loss, so that the sum over tokens is the loss of the batch.

    - `action_tokens`: 1 / number of sampled tokens before the correction. So a dropped token does
      not change the gradients of the others.
    - `kept`: 1 / number of tokens that the correction kept.
    - `sequence_mean`: the mean over the sampled tokens of a sequence, then the mean over sequences.
      A token of a longer sequence has a smaller weight.
    - `constant`: 1 / (sequences * constant), which ignores lengths (Dr. GRPO, arXiv 2503.20783).

    Only sequences with a sampled token count. Compute this factor on the whole batch, across all
    ranks. The result is float64. Raises ValueError for `constant <= 0`.
    """
    counted = keep if how == "kept" else sampled
    if how in ("action_tokens", "kept"):
        return counted / counted.sum().clamp(min=1).double()
    index, num_rows = renumber(torch.where(sampled, sequence, 0))
    rows = index.reshape(sampled.shape)
    tokens = torch.bincount(rows[sampled], minlength=num_rows)
    num_sequences = tokens.count_nonzero().clamp(min=1).double()
    match how:
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


def loss_divisor(
    sampled: Bool[Tensor, "*shape"],
    keep: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    how: LossAggregation = "action_tokens",
) -> int:
    """Return the number of tokens or sequences by which the loss of a part of a batch is divided.

    With its own `token_norm`, the loss of a part does not depend on the other parts. The loss of
    the batch is the sum over its parts of this loss times this number, divided by the sum of these
    numbers. Tokens are counted as in `token_norm`. Sequences (for `sequence_mean` and `constant`)
    are counted if they have a sampled token.
    """
    if how in ("action_tokens", "kept"):
        return int((keep if how == "kept" else sampled).sum())
    return len(sequence[sampled].unique())


def reference_kl(
    logp: Float[Tensor, "*shape"],
    reference_logp: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Tensor, "*shape"]:
    """Return an estimate of KL(pi || reference) for each sampled token, to be added to the loss.

    With x = logp - reference_logp the value is k1 = x, k2 = x^2 / 2 or k3 = e^-x - 1 + x
    (joschu.net/blog/kl-approx.html). All three have the gradient of k2, which is x * grad logp. Its
    mean over tokens drawn from pi is the gradient of KL(pi || reference). The mean gradient of k1
    would be 0, and that of k3 would belong to KL(reference || pi) (arXiv 2506.09477). Multiply by
    sg(D * S) on stale tokens, where sg stops the gradient. The effect of a token on later contexts
    is not included.
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
    """Return the exact entropy of next-token distributions, in nats. As a bonus, subtract it from a
    loss.

    `logits` must already be divided by the sampling temperature. A token with logit -inf adds
    nothing, and has gradient 0.
    """
    logps = torch.log_softmax(widen(logits), dim=-1)
    return -(logps.exp() * logps.masked_fill(logps.isneginf(), 0.0)).sum(-1)
