"""`minpro`: the smallest ratio of the earlier tokens as a factor of each token's ratio.

In the objective, the ratio rho_t of token t is multiplied by min_{i<t} rho_i over the earlier
tokens that the policy sampled in the same sequence. This minimum stands for the product of all
ratios of the prefix, whose variance grows with the prefix's length. The factor has no gradient, and
is 1 for the first token. The objective clips the result: `objective.loss_type cispo` keeps the
gradient of clipped tokens, as in the paper, and `ppo_clip` drops it. `objective.clip_low 1` sets no
lower limit. From MinPRO (arXiv 2601.22718).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unstale.config.checks import ConfigError, Section
from unstale.config.objectives import objectives
from unstale.config.techniques import Entry, require_value

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig, Unit
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MinproConfig(Section):
    """The smallest ratio of the earlier tokens as a factor of each token's ratio (MinPRO)."""

    of: Literal["staleness", "whole"] = "staleness"
    """The ratio rho: the staleness ratio S = pi / pi_old, or pi / mu. In the paper they are equal.
    """
    prefix: Literal["strict", "inclusive"] = "strict"
    """The tokens whose smallest ratio is the factor: those before the token, or also the token
    itself.
    """
    reset: Literal["never", "turn"] = "never"
    """The start of a token's prefix: `never` is the start of its sequence, `turn` the start of its
    reply.
    """
    cap: bool = False
    """Limit the factor of each ratio to 1, so that it never raises a ratio."""


class Minpro:
    """A technique that multiplies the ratio of a token by the smallest ratio before it."""

    def __init__(self, options: MinproConfig) -> None:
        self._options = options

    def log_ratio(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
        import torch

        from unstale.algorithms import corrections

        options = self._options
        ids = {"sequence": batch.sequence, "turn": batch.turn, "version": batch.version}
        ratio = corrections.log_staleness(
            logp,
            old_logp if options.of == "staleness" else batch.behavior_logp,
            unit=corrections.unit_ids("token", **ids, sampled=batch.sampled),
            sampled=batch.sampled,
        )
        unit: Unit = "sequence" if options.reset == "never" else "turn"
        units = corrections.unit_ids(unit, **ids, sampled=batch.sampled)
        factor = prefix_minimum(
            ratio.detach()[batch.sampled],
            units[batch.sampled],
            inclusive=options.prefix == "inclusive",
        )
        if options.cap:
            factor = factor.clamp(max=0)
        whole = torch.zeros_like(ratio).detach()
        whole[batch.sampled] = factor
        return ratio + whole


def prefix_minimum(values: Tensor, unit: Tensor, *, inclusive: bool) -> Tensor:
    """Return for each value the smallest of the earlier values in the same unit, `[n]`, or 0 for
    none.

    `unit` `[n]` has the number of each value's unit (sequence or reply), in ascending order from 0.
    With `inclusive`, the value itself counts, too.
    """
    import torch

    if not len(values):
        return values
    rows = values.split(torch.bincount(unit).tolist())
    padded = torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=float("inf")
    )
    lowest = padded.cummin(1).values
    if not inclusive:
        lowest = torch.nn.functional.pad(lowest[:, :-1], (1, 0), value=0.0)
    lengths = torch.tensor([len(row) for row in rows])
    return lowest[torch.arange(padded.shape[1]) < lengths[:, None]]


def _check(options: MinproConfig, config: RunConfig) -> None:
    objective, correction = config.objective, config.correction
    reason = "only there is the ratio a weight"
    kinds = [name for name, each in objectives().items() if each().is_token_weight]
    require_value("minpro", "objective.loss_type", objective.loss_type, kinds, reason)
    reason = "its ratio is that of a token and its prefix"
    require_value("minpro", "objective.unit", objective.unit, ["token"], reason)
    if options.of == "whole" and correction.is_weight:
        raise ConfigError(
            "minpro.of = whole needs correction.mode = none, mask or k3_mask, got "
            f"{correction.mode}: the weight D is in pi / mu already. Or set minpro.of staleness"
        )


def _describe(options: MinproConfig) -> str:
    ratio = "S = pi / pi_old" if options.of == "staleness" else "pi / mu"
    tokens = "up to the token" if options.prefix == "inclusive" else "before the token"
    within = "sequence" if options.reset == "never" else "turn"
    cap = ", at most 1" if options.cap else ""
    return (
        f"in the objective, {ratio} of a token times the smallest of the sampled tokens {tokens} "
        f"in its {within}{cap}"
    )


_MEASURED = """
All 64 sequences of 3 tokens, 4 words, random policies pi and mu whose logits differ by normal noise
of size 0.5, and random rewards; the mean over 200 pairs. The error is that of the mean gradient of
32 sequences.

| weight of a token | squared bias | variance | error with 32 sequences |
|---|---|---|---|
| token ratio | 0.0154 | 2.19 | 0.084 |
| `minpro` | 0.0105 | 2.09 | 0.076 |
| product of the prefix | 0.0082 | 2.62 | 0.090 |
| product of the sequence | 0 | 3.12 | 0.098 |
| token ratio, `cispo` with `clip_high 0.28` and no lower limit | 0.0165 | 1.56 | 0.065 |
| `minpro`, the same | 0.0128 | 1.38 | 0.056 |
| `minpro`, `cispo` with `clip_low 0.2` | 0.0200 | 1.65 | 0.071 |

With noise of size 1 and no clip it loses: the error is 0.204, and 0.193 with token ratios. It has
not been measured on the desks.
"""

ENTRY = Entry(
    name="minpro",
    slot="ratio",
    rows=(38,),
    makes=Minpro,
    options=MinproConfig,
    changes=frozenset({"objective"}),
    describe=_describe,
    check=_check,
    use="Tokens are several versions old, and token ratios let training become unstable. Use it "
    "with `objective.loss_type cispo`.",
    measured=_MEASURED,
    exactness="The gradient is biased, less than with token ratios: the exact weight of a token is "
    "the product of the ratios of its whole sequence. D does not change. `of whole`, `prefix "
    "inclusive`, `reset turn` and `cap` are not in the paper.",
    evidence="notes",
)
