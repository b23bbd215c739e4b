"""`estr`: a mask of the tokens whose log-ratio is large for the entropy of their distribution.

A token is kept if (log r)^2 / (H + 0.01) is at most `tau`. r is pi / mu: the current policy over
the engine's. H is the entropy of mu before the token was drawn, in nats, as the engine measured it.
So the limit is sqrt(tau * (H + 0.01)) for the absolute log r: narrow where mu was sure, and wide
where it was not. The mask is made once per batch. From ESTR (entropy-scaled trust regions, arXiv
2607.22186), which makes it in each training pass and also clips r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unstale.config.checks import ConfigError, NonNegative, Section
from unstale.config.techniques import Entry
from unstale.research.techniques.m2po import check_ratio, log_ratio
from unstale.techniques.hooks import Shaped, Signals

if TYPE_CHECKING:
    from unstale.config import RunConfig
    from unstale.records import Batch

_LEAST = 0.01
"""The addend to the entropy, epsilon in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstrConfig(Section):
    """A mask of the tokens whose log-ratio is large for their entropy (ESTR)."""

    tau: NonNegative = 0.0
    """Largest (log r)^2 / (H + 0.01) of a token that is kept, above 0. It must be set: no value of
    the paper is known.
    """
    of: Literal["whole", "staleness", "discrepancy"] = "whole"
    """The ratio r: pi / mu as in the paper, the staleness ratio pi / pi_old, or the discrepancy
    pi_old / mu.
    """


class Estr:
    """A technique that masks tokens by their log-ratio and entropy."""

    def __init__(self, options: EstrConfig) -> None:
        self._options = options

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        assert batch.engine_entropy is not None, "the engine returns it to this technique"
        score = log_ratio(self._options.of, batch, signals).square()
        score /= batch.engine_entropy.double() + _LEAST
        return Shaped(
            batch.advantage, batch.trained & ~(batch.sampled & (score > self._options.tau))
        )


def _check(options: EstrConfig, config: RunConfig) -> None:
    if not options.tau:
        raise ConfigError(
            "estr.tau must be above 0, got 0: no value of the paper is known. A token with an "
            "entropy of H nats is kept up to an absolute log-ratio of sqrt(tau * (H + 0.01)), so "
            "--estr.tau 0.04 allows 0.2 at 1 nat and 0.02 where the engine was sure"
        )
    if "replay" in config.techniques.split():
        raise ConfigError(
            "the technique estr is not built with replay: stored groups have no entropies of the "
            "engine. Leave out one of them"
        )
    check_ratio("estr", options.of, config)


def _describe(options: EstrConfig) -> str:
    ratio = {"whole": "pi / mu", "staleness": "pi / pi_old", "discrepancy": "pi_old / mu"}
    return (
        f"no gradient for tokens whose {ratio[options.of]} is outside exp(+-"
        f"{math.sqrt(options.tau):.3g} sqrt(H + 0.01)), with H the entropy of the engine's "
        "distribution; one more forward pass per batch"
    )


ENTRY = Entry(
    name="estr",
    slot="shaper",
    rows=(61,),
    makes=Estr,
    options=EstrConfig,
    changes=frozenset({"objective"}),
    describe=_describe,
    check=_check,
    signals=lambda options: True,
    evidence="notes",
    by_group=lambda options: True,
    use="Tokens are many versions old, and a limit on the ratio drops those where the policy "
    "explores. The paper's form has `--old_logps.route rollout --correction.mode none`.",
    measured="SmolLM2 on two-number sums, 24 steps, two seeds: +0.6 points against `snapshot_old` "
    "in the form of the paper (-24 to +25), and +2.7 with the ratio S (-7 to +13). Neither is told "
    "apart from 0 ([study](../benchmarks/results/entropy-study.md)).",
    exactness="The gradient of masked tokens is missing, and the divisor of the loss still counts "
    "them. D and S of the others do not change.",
)
