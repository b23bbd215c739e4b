"""Divergences of a policy from a teacher, for on-policy distillation.

The functions take log-probabilities over a whole vocabulary, `[*shape, V]`. The gradient is with
respect to the policy. The teacher has none. `reverse_advantage` needs only the log-probabilities of
sampled tokens.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

MIXTURES = {"forward": 0.0, "reverse": 1.0}
"""The `beta` for which `mixed_divergence` computes each divergence, by the divergence's name."""


def reverse_advantage(
    logp: Float[Tensor, "*shape"], teacher_logp: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return log q - log p of each token, where p is the policy and q the teacher.

    The result has no gradient. With this advantage and the importance ratio p / mu, the policy
    gradient on tokens that mu sampled is minus the gradient of KL(p || q), in expectation. `logp`
    must be that of the policy whose gradient is taken, not an older one.
    """
    return teacher_logp - logp.detach()


def mixed_divergence(
    logp: Float[Tensor, "*shape V"], teacher_logp: Float[Tensor, "*shape V"], *, beta: float
) -> Float[Tensor, "*shape"]:
    """Return the generalised Jensen-Shannon divergence of two distributions, in nats.

    With the policy p, the teacher q and m = beta q + (1 - beta) p it is beta KL(q || m) + (1 -
    beta) KL(p || m) (arXiv 2306.13649, eq. 1). That is 0 for beta 0 and 1, so KL(q || p) and KL(p
    || q) are returned for these. KL(p || q) is infinite if a token is impossible under the teacher.
    Raises ValueError unless beta is from 0 to 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be from 0 to 1, got {beta}")
    if beta == 0:
        return _kl(teacher_logp, logp)
    if beta == 1:
        return _kl(logp, teacher_logp)
    mixture = torch.logaddexp(logp + math.log1p(-beta), teacher_logp + math.log(beta))
    return beta * _kl(teacher_logp, mixture) + (1 - beta) * _kl(logp, mixture)


def _kl(logp: Tensor, other: Tensor) -> Tensor:
    """Return KL(p || other) from log-probabilities. A token with p = 0 adds 0."""
    difference = torch.where(logp > -math.inf, logp - other, 0.0)
    return (logp.exp() * difference).sum(-1)
