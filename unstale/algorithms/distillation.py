"""Divergences of a policy from a teacher, for on-policy distillation.

The functions take log-probabilities over a whole vocabulary, `[*shape, V]`. The gradient is with
respect to the policy. The teacher has none. `reverse_advantage` needs only the log-probabilities of
sampled tokens.
"""

from typing import Any

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
    found: Tensor = _Divergence.apply(logp, teacher_logp, beta)
    return found


class _Divergence(torch.autograd.Function):
    """The divergence of `mixed_divergence`, whose forward pass also computes the gradient.

    A token adds 0 if its probability is 0 in the type of the tensors.
    """

    @staticmethod
    def forward(ctx: Any, logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
        if beta == 0:
            q = teacher_logp.exp()
            slope = -q
            found = _weighted(q, teacher_logp - logp).sum(-1)
        elif beta == 1:
            p = logp.exp()
            terms = _weighted(p, logp - teacher_logp)
            found, slope = terms.sum(-1), terms.add_(p)
        else:
            p, q = logp.exp(), teacher_logp.exp()
            mixture = p.lerp(q, beta).log_()
            # The slope of the mixture adds up to 0 over both terms.
            least = torch.finfo(p.dtype).tiny / min(beta, 1 - beta)
            slope = _weighted(p, logp - mixture, least).mul_(1 - beta)
            terms = _weighted(q, teacher_logp - mixture, least).mul_(beta)
            found = terms.add_(slope).sum(-1)
        ctx.save_for_backward(slope)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradients[0][..., None], None, None


def _weighted(probability: Tensor, terms: Tensor, least: float = 0.0) -> Tensor:
    """Multiply `terms` by `probability` in place; 0 where the probability is at most `least`."""
    return terms.masked_fill_(probability <= least, 0.0).mul_(probability)
