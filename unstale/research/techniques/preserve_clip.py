"""`preserve_clip`: the gradient of tokens above the clip is kept.

PPO's clip drops the gradient of a token with a positive advantage A whose ratio r is above
1 + e_h (`objective.clip_high`). Here its loss is -(1 + e_h) / sg(r) * r * A, where sg stops the
gradient. The value is that of the clip, and the gradient is -(1 + e_h) A grad log pi. All other
tokens are as in `objective.loss_type`. From AEPO (Agentic Entropy-Balanced Policy Optimization,
arXiv 2510.14545).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unstale.config.checks import Section
from unstale.config.objectives import objectives
from unstale.config.techniques import Entry, require_value

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.algorithms.objectives import Surrogate
    from unstale.config import ObjectiveConfig, RunConfig
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveClipConfig(Section):
    """The gradient of tokens above the clip is kept (AEPO)."""


class PreserveClip:
    """A technique that keeps a gradient for tokens above the upper limit of PPO's clip (1 +
    clip_high).
    """

    def __init__(self, options: PreserveClipConfig) -> None:
        pass

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        import torch

        plain = options.surrogate(log_ratio, batch.advantage, sampled=batch.sampled)
        above = plain.clipped_high & (batch.advantage > 0)
        held = plain.loss.detach() * (log_ratio - log_ratio.detach()).exp()
        return plain._replace(loss=torch.where(above, held, plain.loss))


def _check(options: PreserveClipConfig, config: RunConfig) -> None:
    allowed = [name for name, each in objectives().items() if each().clips_tokens]
    kind = config.objective.loss_type
    require_value("preserve_clip", "objective.loss_type", kind, allowed, "it changes their clip")


def _describe(options: PreserveClipConfig) -> str:
    return (
        "a token with a positive advantage above 1 + clip_high keeps a gradient, with the limit as "
        "its ratio"
    )


_MEASURED = """
A bandit of 10 positions with 10 arms, noisy rewards, 100 steps, learning rate 1, 24 seeds: the
mean probability of the best arm at the end (standard error at most 0.02), and the share of tokens
without a gradient.

| lag in versions | no limit | `ppo_clip` | `preserve_clip` |
|---|---|---|---|
| 4 | 0.61, 0% | 0.43, 5.1% | 0.50, 3.6% |
| 16 | 0.60, 0% | 0.20, 11.8% | 0.30, 9.8% |
| 64 | 0.57, 0% | 0.14, 12.3% | 0.18, 11.4% |

Here no limit is best: nothing in this toy breaks by a large step. It has not been measured on the
desks.
"""

ENTRY = Entry(
    name="preserve_clip",
    slot="objective",
    rows=(55,),
    makes=PreserveClip,
    options=PreserveClipConfig,
    changes=frozenset({"objective"}),
    describe=_describe,
    check=_check,
    use="The clip stops rare tokens of good replies, and the entropy falls.",
    measured=_MEASURED,
    exactness="Above the clip, the weight of a token is 1 + clip_high instead of 0, so S no longer "
    "stays within the band by itself. D does not change.",
)
