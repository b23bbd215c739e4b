"""The losses of Tinker, from which a client chooses. Each is a sum over tokens.

The ratio is exp(logp - behavior_logp), where behavior_logp is the client's `logprobs`: the
log-probabilities under which the tokens were sampled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Inputs = Mapping[str, Tensor]
"""Values `[R]` that the client sent for each of R tokens, by name."""
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Default bounds of the ratio. A client may set other bounds, for all tokens or for each token."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: its inputs per token, its options, and the function that computes it."""

    needs: tuple[str, ...]
    options: Mapping[str, float]
    terms: Callable[[Tensor, Inputs], Tensor]
    """A function of logp `[R]` and the inputs, which include the options. It returns the loss of
    each token, `[R]`.
    """


def _cross_entropy(logp: Tensor, given: Inputs) -> Tensor:
    return -logp * given["weights"]


def _importance_sampling(logp: Tensor, given: Inputs) -> Tensor:
    return -_ratio(logp, given) * given["advantages"]


def _ppo(logp: Tensor, given: Inputs) -> Tensor:
    ratio, advantages = _ratio(logp, given), given["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, given) * advantages)


def _cispo(logp: Tensor, given: Inputs) -> Tensor:
    weight = _clipped(_ratio(logp, given), given).detach()
    return -weight * logp * given["advantages"]


def _dro(logp: Tensor, given: Inputs) -> Tensor:
    """Return the loss of Direct Reward Optimization (arXiv 2405.19107) of each token.

    It has a penalty of (log r)^2, where r is the ratio exp(logp - behavior_logp).
    """
    penalty = 0.5 * given["beta"] * (logp - given["logprobs"]).square()
    return penalty - logp * given["advantages"]


def _ratio(logp: Tensor, given: Inputs) -> Tensor:
    return (logp - given["logprobs"]).exp()


def _clipped(ratio: Tensor, given: Inputs) -> Tensor:
    return ratio.clamp(given["clip_low_threshold"], given["clip_high_threshold"])


_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_SAMPLED, {}, _importance_sampling),
    "ppo": Loss(_SAMPLED, CLIP, _ppo),
    "cispo": Loss(_SAMPLED, CLIP, _cispo),
    "dro": Loss(_SAMPLED, {"beta": 0.05}, _dro),
}
