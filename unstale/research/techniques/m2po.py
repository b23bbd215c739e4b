"""`m2po`: a mask of the tokens with the largest log-ratios, instead of a clip.

Tokens with the largest (log r)^2 are masked, so they get no gradient: as many as needed for the
mean of (log r)^2 over the other tokens to be at most `limit`. r is pi / mu: the current policy over
the engine's. Only sampled tokens of a batch that move away from mu are counted: those with r > 1
and a positive advantage, or r < 1 and a negative one. The mask is made once per batch. From M2PO
(arXiv 2510.01161), whose code limits r to the largest remaining value; AReaL drops the tokens, as
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unstale.config.checks import ConfigError, Positive, Section
from unstale.config.techniques import Entry
from unstale.techniques.hooks import Shaped, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poConfig(Section):
    """A mask of the tokens with the largest log-ratios, instead of a clip (M2PO)."""

    limit: Positive = 0.04
    """Largest mean of (log r)^2 over the tokens that are not masked, where r is the ratio `of`."""
    of: Literal["whole", "staleness", "discrepancy"] = "whole"
    """The ratio r: pi / mu, the staleness ratio pi / pi_old, or the discrepancy pi_old / mu. AReaL
    uses the last one.
    """
    over: Literal["away", "all"] = "away"
    """The tokens that count and may be masked: only those that move away from the old policy, as in
    the paper's code, or all, as in AReaL.
    """


class M2po:
    """A technique that masks the tokens with the largest absolute log-ratios of two policies."""

    def __init__(self, options: M2poConfig) -> None:
        self._options = options

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        log_r = log_ratio(self._options.of, batch, signals)
        counted = batch.sampled
        if self._options.over == "away":
            counted = counted & (log_r * batch.advantage > 0)
        keep = batch.trained.clone()
        keep[counted] = under_limit(log_r[counted].square(), self._options.limit)
        return Shaped(batch.advantage, keep)


def log_ratio(of: str, batch: Batch, signals: Signals) -> Tensor:
    """Return the logarithm `[T]` of the ratio that a value of `M2poConfig.of` names, in float64."""
    above = signals.old_logp if of == "discrepancy" else signals.logp
    below = signals.old_logp if of == "staleness" else batch.behavior_logp
    return above.double() - below.double()


def under_limit(squares: Tensor, limit: float) -> Tensor:
    """Return a mask `[n]` that is False for as few of the largest values as possible.

    The mean of the others must be at most `limit`.
    """
    import torch

    ordered, order = squares.sort(stable=True)
    mean = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    return torch.zeros_like(squares, dtype=torch.bool).index_put((order,), mean <= limit)


def check_ratio(technique: str, of: str, config: RunConfig) -> None:
    """Raise `ConfigError` if the run cannot compute a ratio, or if it is always 1.

    `of` is the value of the technique's option of this name.
    """
    if of != "whole" and config.old_logps.needs.inline:
        raise ConfigError(
            f"{technique}.of = {of} needs a route that computes old_logp once per batch, got "
            f"old_logps.route = {config.old_logps.route}. Set {technique}.of whole"
        )
    now = config.old_logps.weight_of_now(config)
    if (of == "discrepancy" and now == 0) or (of == "staleness" and now == 1):
        raise ConfigError(
            f"{technique}.of = {of} masks nothing with old_logps.route = "
            f"{config.old_logps.route}, because this ratio is always 1 when the mask is made. Set "
            f"{technique}.of whole"
        )


def _describe(options: M2poConfig) -> str:
    ratio = {"whole": "pi / mu", "staleness": "pi / pi_old", "discrepancy": "pi_old / mu"}
    tokens = " of tokens that move away from it" if options.over == "away" else ""
    return (
        f"no gradient for the tokens with the largest {ratio[options.of]}, so that the mean of its "
        f"squared logarithm{tokens} is at most {options.limit:g}; one more forward pass per batch"
    )


_MEASURED = """
A bandit of 10 positions with 10 arms, noisy rewards, 100 steps, learning rate 1, 24 seeds: the
mean probability of the best arm at the end (standard error at most 0.02), and the share of tokens
without a gradient.

| lag in versions | no limit | `ppo_clip` | `m2po` with `objective.loss_type none` |
|---|---|---|---|
| 4 | 0.61, 0% | 0.43, 5.1% | 0.60, 0.1% |
| 16 | 0.60, 0% | 0.20, 11.8% | 0.28, 5.9% |
| 64 | 0.57, 0% | 0.14, 12.3% | 0.16, 8.6% |

Here no limit is best: nothing in this toy breaks by a large step. It has not been measured on the
desks.
"""

ENTRY = Entry(
    name="m2po",
    slot="shaper",
    rows=(39,),
    makes=M2po,
    options=M2poConfig,
    changes=frozenset({"objective"}),
    describe=_describe,
    check=lambda options, config: check_ratio("m2po", options.of, config),
    use="Tokens are many versions old, and a clip stops too many of them. Use it with "
    "`objective.loss_type none`, because it takes the place of the clip.",
    measured=_MEASURED,
    exactness="The gradient of masked tokens is missing, and the divisor of the loss still counts "
    "them. D and S of the others do not change.",
)
