"""The discrepancy D between engine and trainer: log-ratios, their aggregation, and corrections.

    pi / mu  =  D * S,    log D = old_logp - behavior_logp,    log S = logp - old_logp

Functions take tensors of any one shape: packed `[T]` with ids per token, or padded `[B, T]` with a
mask. `sampled` is True on action tokens; other tokens are ignored, whatever their values. Ids
(`unit`, `sequence`) are any integers, such as hashes. D is always detached: it repairs a numerical
defect, and no policy should learn from it. D contains numerical differences alone only if
`old_logp` is exact; behind an approximation it contains staleness, too.

Order of use: `log_discrepancy`, `aggregate`, `keep_all`, then any of `veto`, `mask`, `truncate`,
`clamp`, `mask_weight`; each receives the `Control` of the one before. A function with `@control` is
a value of the option `correction.control`, and its keyword-only parameters are options of that
section.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.config.algorithm import Aggregate, Unit
from unstale.records import HAS_BEHAVIOR

LOG_LIMIT = 20.0
"""Bound on |log-ratio| before `exp`: e^20 = 4.9e8 is finite and far outside any useful band."""


class NonFinite(ValueError):
    """A log-probability of an action token is NaN or infinite."""

    def __init__(self, name: str, value: float, *, sequence: int, token: int, version: int) -> None:
        super().__init__(
            f"{name} is {value} at token {token} of sequence {sequence}, sampled by version "
            f"{version}; every action token needs a finite log-probability"
        )
        self.name, self.sequence, self.token, self.version = name, sequence, token, version


def has_behavior(provenance: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return True for tokens that an engine sampled in the context they have now.

    >>> has_behavior(torch.tensor([0, 1, 2, 3, 4, 5])).int().tolist()
    [0, 1, 0, 0, 0, 1]
    """
    return torch.isin(provenance, provenance.new_tensor(sorted(HAS_BEHAVIOR)))


def check_finite(
    logps: Mapping[str, Tensor],
    sampled: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    version: Int[Tensor, "*shape"],
) -> None:
    """Raise `NonFinite` at the first action token whose log-probability is NaN or infinite.

    `logps` are named tensors of the shape of `sampled`. The error gives the value of `sequence` (an
    index or an episode number) and the token's position in it. Synchronizes with the device.
    """
    for name, values in logps.items():
        bad = (sampled & ~values.isfinite()).flatten().nonzero()
        if len(bad):
            at = int(bad[0])
            rows = sequence.flatten()
            raise NonFinite(
                name,
                values.flatten()[at].item(),
                sequence=int(rows[at]),
                token=int((rows[:at] == rows[at]).sum()),
                version=int(version.flatten()[at]),
            )


def unit_ids(
    unit: Unit,
    *,
    sequence: Int[Tensor, "*shape"],
    turn: Int[Tensor, "*shape"],
    version: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
) -> Int[Tensor, "*shape"]:
    """Return the unit of each action token, numbered 0, 1, ... in token order; -1 for other tokens.

    `turn`: one reply. `segment`: a maximal run of one version in a reply. Sequences must be
    contiguous. Padded batches pass `arange(B)[:, None].expand(B, T)` as `sequence`.

    >>> row, turn = torch.zeros(5, dtype=torch.int64), torch.tensor([-1, 0, 0, -1, 1])
    >>> version = torch.tensor([-1, 3, 4, -1, 4])
    >>> unit_ids("segment", sequence=row, turn=turn, version=version, sampled=turn >= 0)
    tensor([-1,  0,  1, -1,  2])
    """
    position = sampled.flatten().nonzero().squeeze(1)
    match unit:
        case "token":
            columns = [torch.arange(sampled.numel(), device=sampled.device)]
        case "turn":
            columns = [sequence, turn]
        case "segment":
            columns = [sequence, turn, version]
        case "sequence":
            columns = [sequence]
        case _:
            raise ValueError(f"unit must be token, turn, segment or sequence, got {unit!r}")
    keys = torch.stack([column.flatten()[position] for column in columns])
    begins = (keys[:, 1:] != keys[:, :-1]).any(0).long()
    ids = torch.full((sampled.numel(),), -1, dtype=torch.long, device=sampled.device)
    ids[position] = torch.cat([begins.new_zeros(1), begins]).cumsum(0)[: len(position)]
    return ids.reshape(sampled.shape)


def renumber(ids: Int[Tensor, "*shape"]) -> tuple[Int[Tensor, "n"], int]:
    """Return the ids, flattened and renumbered 0, 1, ... in their order, and how many there are.

    >>> renumber(torch.tensor([-7, 2**60, -7]))
    (tensor([0, 1, 0]), 2)
    """
    values, index = ids.unique(return_inverse=True)
    return index.flatten(), len(values)


def aggregate(
    log_ratio: Float[Tensor, "*shape"],
    unit: Int[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
    how: Aggregate = "mean",
) -> Float[Tensor, "*shape"]:
    """Aggregate log-ratios over units of tokens (`unit_ids`). Return that of each token's unit.

    It is 0 for tokens that are not action tokens.

    `mean` is the log of the geometric-mean ratio, `sum` the log of the product, `max` the log-ratio
    farthest from 0. Synchronizes with the device once.
    """
    index, size = renumber(torch.where(sampled, unit, 0))
    values = torch.where(sampled, widen(log_ratio), 0.0).flatten()
    zeros = values.new_zeros(size)
    match how:
        case "sum":
            result = zeros.index_add(0, index, values)
        case "mean":
            count = zeros.index_add(0, index, sampled.flatten().to(values.dtype))
            result = zeros.index_add(0, index, values) / count.clamp(min=1)
        case "max":
            high = zeros.scatter_reduce(0, index, values, "amax")
            low = zeros.scatter_reduce(0, index, values, "amin")
            result = torch.where(high >= -low, high, low)
        case _:
            raise ValueError(f"how must be mean, sum or max, got {how!r}")
    return torch.where(sampled, result[index].reshape(sampled.shape), 0.0)


def log_discrepancy(
    old_logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return log D per token, detached, not clamped, in float32 or float64; 0 for others."""
    return torch.where(sampled, widen(old_logp.detach()) - widen(behavior_logp.detach()), 0.0)


def log_staleness(
    logp: Float[Tensor, "*shape"],
    old_logp: Float[Tensor, "*shape"],
    *,
    unit: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
    how: Aggregate = "mean",
) -> Float[Tensor, "*shape"]:
    """Return log S of each token's unit. Its gradient is 1 for the token's own `logp`.

    Its `exp` is `sg(S_u) * exp(logp_t - sg(logp_t))`, so a product over a unit of n tokens does not
    multiply the gradient by n (GSPO-token, arXiv 2507.18071, eq. 14). 0 for other tokens; not
    clamped.
    """
    now = widen(logp)
    held = aggregate(now.detach() - widen(old_logp.detach()), unit, sampled=sampled, how=how)
    return held + torch.where(sampled, now - now.detach(), 0.0)


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the ratio, with its logarithm clamped to `LOG_LIMIT`."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class Control:
    """The correction of each token: a weight, and whether it is kept. Carries no gradient."""

    weight: Float[Tensor, "*shape"]
    """Factor of a kept token's loss."""
    keep: Bool[Tensor, "*shape"]
    """False for dropped tokens and for tokens that are not action tokens."""
    weighted: bool = False
    """True if `weight` contains D. A second weight would count D twice, and is a ValueError."""

    @property
    def factor(self) -> Tensor:
        """`weight` where kept, 0 elsewhere."""
        return torch.where(self.keep, self.weight, 0.0)


Function = TypeVar("Function", bound=Callable[..., Control])

CONTROLS: dict[str, Callable[..., Control]] = {}


def control(function: Function) -> Function:
    """Register a function as a value of `correction.control`."""
    CONTROLS[function.__name__] = function
    return function


def keep_all(sampled: Bool[Tensor, "*shape"]) -> Control:
    """Return the control to begin with: it keeps every action token with weight 1."""
    return Control(weight=torch.ones(sampled.shape, device=sampled.device), keep=sampled)


@control
def none(log_discrepancy: Float[Tensor, "*shape"], before: Control) -> Control:
    """Change nothing: right if D is known to be 1, as with `old_logp = behavior_logp`."""
    return before


@control
def mask(
    log_discrepancy: Float[Tensor, "*shape"], before: Control, *, low: float, high: float
) -> Control:
    """Keep a token if `low <= D <= high`.

    With `mean` aggregation use a narrow band, such as 1/1.005 to 1.005.
    """
    return replace(before, keep=before.keep & _inside(log_discrepancy, low=low, high=high))


@control
def truncate(
    log_discrepancy: Float[Tensor, "*shape"],
    before: Control,
    *,
    high: float,
    normalize: bool = False,
) -> Control:
    """Weight a token by `min(D, high)`: truncated importance sampling.

    IMPALA's rho-bar (arXiv 1802.01561); called TIS in LLM training. `high = inf` is the plain
    weight D. `normalize` divides the weights by their mean over kept tokens, which must then be
    those of the whole batch: self-normalized importance sampling.
    """
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}")
    return clamp(log_discrepancy, before, low=0.0, high=high, normalize=normalize)


@control
def clamp(
    log_discrepancy: Float[Tensor, "*shape"],
    before: Control,
    *,
    low: float,
    high: float,
    normalize: bool = False,
) -> Control:
    """Weight a token by `min(max(D, low), high)`: `truncate` with a lower bound."""
    if not (0 <= low <= high and high > 0):
        raise ValueError(f"clamp needs 0 <= low <= high and high > 0, got {low} .. {high}")
    weight = bounded_exp(log_discrepancy.detach()).clamp(min=low, max=high)
    return _add_weight(before, weight, normalize=normalize)


@control
def mask_weight(
    log_discrepancy: Float[Tensor, "*shape"],
    before: Control,
    *,
    low: float,
    high: float,
    normalize: bool = False,
) -> Control:
    """Weight a token by D inside the band; drop it outside (IcePop or MIS, arXiv 2510.18855).

    `normalize` is that of `truncate`. Dropped tokens do not count in the mean.
    """
    inside = _inside(log_discrepancy, low=low, high=high)
    weight = torch.where(inside, bounded_exp(log_discrepancy.detach()), 0.0)
    kept = replace(before, keep=before.keep & inside)
    return _add_weight(kept, weight, normalize=normalize)


def veto(
    log_discrepancy: Float[Tensor, "*shape"],
    before: Control,
    *,
    sequence: Int[Tensor, "*shape"],
    below: float,
) -> Control:
    """Drop each sequence that has an action token with D below `below`; 0 drops none.

    `log_discrepancy` is per token, not aggregated. Tokens that an earlier control dropped count,
    too: one impossible token shows that engine and trainer saw different contexts, which affects
    the whole sequence.
    """
    if not 0 <= below <= 1:
        raise ValueError(f"below must be between 0 and 1, got {below}")
    impossible = (log_discrepancy < _log(below)).flatten()  # never off the mask, where log D is 0
    index, size = renumber(sequence)
    count = index.new_zeros(size).index_add(0, index, impossible.long())
    return replace(before, keep=before.keep & (count[index] == 0).reshape(before.keep.shape))


def cap_ratio(
    logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
    high: float,
) -> Float[Tensor, "*shape"]:
    """Return the factor on a token's loss that limits pi / mu to `high`: min(1, high mu / pi).

    With a weight D and a surrogate that is S A, the token then counts `min(D S, high)` times:
    V-trace's rho-bar on the whole ratio (arXiv 1802.01561), however it divides into D and S.
    Detached; 1 for other tokens.
    """
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}")
    log_ratio = log_discrepancy(logp, behavior_logp, sampled=sampled)
    return torch.where(sampled, (math.log(high) - log_ratio).clamp(max=0).exp(), 1.0)


def summary(
    control: Control,
    *,
    sampled: Bool[Tensor, "*shape"],
    log_discrepancy: Float[Tensor, "*shape"],
    log_staleness: Float[Tensor, "*shape"],
) -> dict[str, float]:
    """Return metrics of the control and of both log-ratios over action tokens; empty without any.

    Percentiles (nearest rank) are of the signed log-ratio. Shares and means count action tokens
    before masking.
    """
    if not sampled.any():
        return {}
    figures = {
        "correction/kept_share": control.keep[sampled].double().mean().item(),
        "correction/weight_mean": control.factor[sampled].double().mean().item(),
    }
    for name, ratio in (("correction/log_d", log_discrepancy), ("objective/log_s", log_staleness)):
        values = ratio.detach()[sampled].double().sort().values
        figures[f"{name}_mean"] = values.mean().item()
        figures[f"{name}_abs_mean"] = values.abs().mean().item()
        for percent in (1, 50, 99):
            figures[f"{name}_p{percent:02d}"] = values[
                round(percent / 100 * (len(values) - 1))
            ].item()
    return figures


def divergence(
    old_logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
) -> dict[str, float]:
    """Return estimates of the divergence between `old_logp` and `behavior_logp`.

    `kl_k1` and `kl_k3` estimate KL(mu || pi_old) (joschu.net/blog/kl-approx.html). `chi2` is E[D^2]
    - 1, per token and for the product over a sequence; it can be negative on a finite sample. A
    log-perplexity is the mean of -logp over a sequence, and `diff` is that of pi_old minus that of
    mu. Sequences have equal weights. Empty without an action token.
    """
    if not sampled.any():
        return {}
    log_d = log_discrepancy(old_logp.double(), behavior_logp.double(), sampled=sampled)
    rows, size = renumber(sequence[sampled])
    count = torch.bincount(rows).double()
    total = count.new_zeros(size).index_add(0, rows, log_d[sampled])
    behavior = count.new_zeros(size).index_add(0, rows, behavior_logp[sampled].detach().double())
    gap = -(total / count)
    perplexity = -(behavior / count)
    tokens = log_d[sampled]
    return {
        "correction/kl_k1": -tokens.mean().item(),
        "correction/kl_k3": (bounded_exp(tokens) - 1 - tokens).mean().item(),
        "correction/chi2_token": bounded_exp(tokens).square().mean().item() - 1,
        "correction/chi2_sequence": bounded_exp(total).square().mean().item() - 1,
        "correction/behavior_log_ppl_mean": perplexity.mean().item(),
        "correction/old_log_ppl_mean": (perplexity + gap).mean().item(),
        "correction/log_ppl_diff_mean": gap.mean().item(),
        "correction/log_ppl_diff_abs_mean": gap.abs().mean().item(),
        "correction/log_ppl_diff_min": gap.min().item(),
        "correction/log_ppl_diff_max": gap.max().item(),
    }


def widen(values: Tensor) -> Tensor:
    """Return `values` in float64 if they are, else in float32."""
    return values if values.dtype == torch.float64 else values.float()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    if not 0 <= low <= high:
        raise ValueError(f"a band needs 0 <= low <= high, got {low} .. {high}")
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _add_weight(before: Control, weight: Tensor, *, normalize: bool) -> Control:
    if before.weighted:
        raise ValueError(
            "the tokens already carry a weight D; a second control would count it twice, use mask"
        )
    if normalize and before.keep.any():
        weight = weight / weight[before.keep].mean()
    return replace(before, weight=weight, weighted=True)
