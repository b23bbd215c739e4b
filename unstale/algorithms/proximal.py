"""Approximations of old log-probabilities, for when the old weights were not kept.

Below, mu is the engine's policy when it sampled the token, pi the current policy, and prox the
approximation of the old one. docs/old-logps.md describes the error that each approximation makes in
D = prox / mu and S = pi / prox. All tensors have one shape, packed `[T]` or padded `[B, T]`. They
are computed in float32, or in float64 if they have it.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import widen


def weight_of_now(lag: Int[Tensor, "*shape"], *, fresh: float = 1.0) -> Float[Tensor, "*shape"]:
    """Return alpha, the weight of the current policy: (d - 1) / d at lag d >= 1, else `fresh`.

    The proximal policy is then one version older than the current one. This is the schedule of
    arXiv 2512.06547; AReaL's has `fresh` = 0.

    >>> weight_of_now(torch.tensor([0, 1, 2, 4])).tolist()
    [1.0, 0.0, 0.5, 0.75]
    """
    d = lag.clamp(min=1).float()
    return torch.where(lag >= 1, (d - 1) / d, fresh)


def loglinear(
    behavior_logp: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    alpha: Float[Tensor, "*shape"] | float,
    *,
    sampled: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return log mu + alpha (log pi - log mu), detached, and 0 where not `sampled`.

    Then log D = alpha r and log S = (1 - alpha) r, with r = log pi - log mu (arXiv 2512.06547).
    Both are powers of one ratio: a limit on either is a limit on r, so the two effects are not
    separated (arXiv 2605.12070, Proposition 1).
    """
    mu = widen(behavior_logp.detach())
    pi = widen(logp.detach())
    return torch.where(sampled, mu + alpha * (pi - mu), 0.0)


def linear(
    behavior_logp: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    alpha: Float[Tensor, "*shape"] | float,
    *,
    sampled: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return the log-probability of the mixture (1 - alpha) mu + alpha pi.

    It is detached, and 0 where not `sampled`.

    >>> mu, pi, one = torch.tensor([0.2]), torch.tensor([0.6]), torch.ones(1, dtype=torch.bool)
    >>> linear(mu.log(), pi.log(), 0.5, sampled=one).exp()
    tensor([0.4000])
    """
    mu = widen(behavior_logp.detach())
    pi = widen(logp.detach())
    weight = torch.as_tensor(alpha, dtype=pi.dtype, device=pi.device)
    mixed = torch.logaddexp((1 - weight).log() + mu, weight.log() + pi)
    return torch.where(sampled, mixed, 0.0)


def averaged(weight: float, age: float, *, beta: float) -> tuple[float, float]:
    """Return weight and age of a moving average after one more update (arXiv 2110.00641).

        w_k = beta w_{k-1} + 1 ;   a_k = beta w_{k-1} (a_{k-1} + 1) / w_k

    The average itself moves by `(theta_k - ewma) / w_k`. It begins with weight 1 and age 0. `age`
    is the mean age, in updates, of what it holds, and tends to beta / (1 - beta).

    >>> averaged(1.0, 0.0, beta=0.5)
    (1.5, 0.3333333333333333)
    """
    after = beta * weight + 1
    return after, beta * weight * (age + 1) / after


def beta_for_age(weight: float, age: float, *, target: float, beta_max: float) -> float:
    """Return the decay for the next update that brings an average's age closest to `target`.

    The decay is at most `beta_max`, which is below 1 (else ValueError).

    An age gains less than 1 an update, so a target of `age + 1` or more takes `beta_max`. In the
    long run beta = d / (1 + d) holds the age at d.

    >>> averaged(2.0, 1.0, beta=beta_for_age(2.0, 1.0, target=1.0, beta_max=0.9))
    (2.0, 1.0)
    """
    if not 0 <= beta_max < 1:
        raise ValueError(f"beta_max must be at least 0 and below 1, got {beta_max}")
    if target >= age + 1:
        return beta_max
    return min(beta_max, max(0.0, target) / (weight * (age + 1 - target)))


def nearest_age(lag: Int[Tensor, "*shape"], ages: list[float]) -> Int[Tensor, "*shape"]:
    """Return the index of the age nearest to each token's lag. Of two equally near, the first.

    >>> nearest_age(torch.tensor([0, 1, 2, 5]), [0.5, 3.0]).tolist()
    [0, 0, 1, 1]
    """
    far = torch.stack([(lag - age).abs() for age in ages])
    return far.argmin(0)
