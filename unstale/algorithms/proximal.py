"""Approximations of old log-probabilities, for use when the old weights were not kept.

mu is the engine's policy that sampled the token, pi the current policy, and prox the approximation
of the old policy. docs/old-logps.md describes the errors of each approximation in D = prox / mu and
S = pi / prox. All tensors have one shape, packed `[T]` or padded `[B, T]`. Computations are in
float32, or in float64 if an input is float64.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import widen


def weight_of_now(lag: Int[Tensor, "*shape"], *, fresh: float = 1.0) -> Float[Tensor, "*shape"]:
    """Return alpha, the weight of the current policy in a mixture with the engine's policy.

    `lag` is the number d of batches trained on since the token was sampled. The weight is (d - 1) /
    d for d >= 1, and `fresh` for d = 0. The mixture is then about one version older than the
    current policy. The formula is from arXiv 2512.06547. AReaL uses it with `fresh` = 0.

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
    """Return a weighted mean of two log-probabilities, `log mu + alpha (log pi - log mu)`.

    log mu is `behavior_logp` (the engine's policy), and log pi is `logp` (the current policy). The
    result has no gradient, and is 0 where not `sampled`. With r = log pi - log mu this gives log D
    = alpha r and log S = (1 - alpha) r (arXiv 2512.06547). Both are powers of one ratio, so a limit
    on either is a limit on r. Staleness and discrepancy are not separated (arXiv 2605.12070,
    Proposition 1).
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

    mu is the engine's probability (`behavior_logp`), pi the current policy's (`logp`). The result
    has no gradient, and is 0 where not `sampled`.

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
    """Return `weight` and `age` of a moving average of weights after one more update.

        w_k = beta w_{k-1} + 1 ;   a_k = beta w_{k-1} (a_{k-1} + 1) / w_k

    `weight` is w: the sum of the weights of all updates, which decay by `beta` with each update.
    `age` is a: the mean age of the averaged weights, in updates (arXiv 2110.00641). The update
    itself adds `(theta_k - ewma) / w_k` to the average. The first update gives weight 1 and age 0.
    The age approaches beta / (1 - beta).

    >>> averaged(1.0, 0.0, beta=0.5)
    (1.5, 0.3333333333333333)
    """
    after = beta * weight + 1
    return after, beta * weight * (age + 1) / after


def beta_for_age(weight: float, age: float, *, target: float, beta_max: float) -> float:
    """Return the decay with which the next update brings the age of an average closest to `target`.

    `weight` and `age` are those of the average before the update (see `averaged`). Ages are in
    updates. The decay is at most `beta_max`. An update adds less than 1 to the age, so a target of
    `age + 1` or more gives `beta_max`. Repeated updates with beta = d / (1 + d) keep the age at d.
    Raises ValueError if `beta_max` is not below 1.

    >>> averaged(2.0, 1.0, beta=beta_for_age(2.0, 1.0, target=1.0, beta_max=0.9))
    (2.0, 1.0)
    """
    if not 0 <= beta_max < 1:
        raise ValueError(f"beta_max must be at least 0 and below 1, got {beta_max}")
    if target >= age + 1:
        return beta_max
    return min(beta_max, max(0.0, target) / (weight * (age + 1 - target)))


def nearest_age(lag: Int[Tensor, "*shape"], ages: list[float]) -> Int[Tensor, "*shape"]:
    """Return for each token the index of the entry of `ages` that is nearest to its `lag`.

    Both are in batches. If two ages are equally near, return the lower index.

    >>> nearest_age(torch.tensor([0, 1, 2, 5]), [0.5, 3.0]).tolist()
    [0, 0, 1, 1]
    """
    far = torch.stack([(lag - age).abs() for age in ages])
    return far.argmin(0)
