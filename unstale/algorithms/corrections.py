"""Corrections of the discrepancy D between engine and trainer: masks and weights on tokens.

    pi / mu  =  D * S,    log D = old_logp - behavior_logp,    log S = logp - old_logp

Functions take tensors of any one shape: packed `[T]`, or padded `[B, T]` with a mask. `sampled` is
True for tokens that the policy sampled. Other tokens are ignored, whatever their values. Ids
(`unit`, `sequence`) are any integers, such as hashes. D never carries a gradient: it corrects a
numerical difference, and the policy must not learn from that. D contains only numerical differences
if `old_logp` is exact. If `old_logp` is an approximation, D also contains some staleness.

Call `log_discrepancy`, `aggregate` and `keep_all` in this order. Then call any of `veto`, `mask`,
`truncate`, `clamp`, `mask_weight`, `kpop`, `k3_mask`. Each of them receives the `CorrectionWeights`
that the previous one returned. A function with the decorator `@mode` is a value of the option
`correction.mode`. Its keyword-only parameters get the values of the options of the same names in
`correction`. A parameter with a name in `DIVERGENCES` gets this divergence, aggregated in the same
way as log D.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.config.algorithm import Aggregate, Unit
from unstale.records import HAS_BEHAVIOR, nearest_rank

LOG_LIMIT = 20.0
"""Largest absolute log-ratio to which `exp` is applied, so that the result is finite. e^20 = 4.9e8
is far above any useful limit of a ratio.
"""

PROBABILITY_FLOOR = 1e-6
"""Smallest probability in a binary KL (`binary_kl`). Without it, a token whose probability is
rounded to 1 in float32 would have an infinite divergence.
"""


class NonFinite(ValueError):
    """Error: a log-probability or other value of a sampled token is NaN or infinite."""

    def __init__(self, name: str, value: float, *, sequence: int, token: int, version: int) -> None:
        super().__init__(
            f"{name} is {value} at token {token} of sequence {sequence}, sampled by version "
            f"{version}; every action token needs a finite {name}"
        )
        self.name, self.sequence, self.token, self.version = name, sequence, token, version
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        place = {"sequence": self.sequence, "token": self.token, "version": self.version}
        return partial(type(self), self.name, self.value, **place), ()


def has_behavior(provenance: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return True for tokens that an engine sampled in exactly the recorded context.

    Only such tokens have a `behavior_logp`. `provenance` has the values of
    `unstale.records.Provenance`.

    >>> has_behavior(torch.tensor([0, 1, 2, 3, 4, 5])).int().tolist()
    [0, 1, 0, 0, 0, 1]
    """
    return torch.stack([provenance == int(each) for each in HAS_BEHAVIOR]).any(0)


def check_finite(
    logps: Mapping[str, Tensor],
    sampled: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    version: Int[Tensor, "*shape"],
) -> None:
    """Raise `NonFinite` at the first sampled token whose log-probability is NaN or infinite.

    `logps` are tensors by name, with the shape of `sampled`. The message names the tensor, the
    token's entry of `sequence` (such as an episode number), its position in that sequence, and its
    version. On a GPU, the call waits for the device.
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
    """Return the number of each sampled token's unit: 0, 1, ... in the order of the tokens.

    A unit is a set of tokens over which ratios are aggregated: a token, a turn (one reply), a
    segment (the tokens of one version in a reply), or a sequence. The tokens of a sequence must be
    adjacent. For a padded batch, `sequence` is `arange(B)[:, None].expand(B, T)`. The result is -1
    for tokens that were not sampled.

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
    """Give the distinct ids new numbers 0, 1, ... in ascending order of the ids.

    Return the new number of each id, flattened, and the number of distinct ids.

    >>> renumber(torch.tensor([-7, 2**60, -7]))
    (tensor([0, 1, 0]), 2)
    """
    values, index = ids.unique(return_inverse=True)
    return index.flatten(), len(values)


def aggregate(
    log_ratio: Float[Tensor, "*shape"],
    unit: Int[Tensor, "*shape"] | None,
    *,
    sampled: Bool[Tensor, "*shape"],
    how: Aggregate = "mean",
) -> Float[Tensor, "*shape"]:
    """Aggregate log-ratios over units (sets of tokens). Return the aggregate of each token's unit.

    `unit` has the number of each token's unit, as from `unit_ids`. None means that each token is a
    unit. `how` "mean" gives the log of the geometric mean of the ratios, "sum" the log of their
    product, and "max" the log-ratio farthest from 0. The result is 0 for tokens that were not
    sampled. On a GPU, the call waits for the device once.
    """
    if unit is None:
        return torch.where(sampled, widen(log_ratio), 0.0)
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
    """Return log D = old_logp - behavior_logp of each token, without gradient.

    The result is 0 for tokens that were not sampled. The dtype is float32, or float64 if an input
    is float64.
    """
    return torch.where(sampled, widen(old_logp.detach()) - widen(behavior_logp.detach()), 0.0)


def log_staleness(
    logp: Float[Tensor, "*shape"],
    old_logp: Float[Tensor, "*shape"],
    *,
    unit: Int[Tensor, "*shape"] | None,
    sampled: Bool[Tensor, "*shape"],
    how: Aggregate = "mean",
) -> Float[Tensor, "*shape"]:
    """Return log S of each token's unit, with gradient 1 for the token's own `logp`.

    S = pi / pi_old is aggregated over the unit (see `aggregate`). The result is 0 for tokens that
    were not sampled. Its `exp` is `sg(S_u) * exp(logp_t - sg(logp_t))`, where S_u is the aggregate
    and sg stops the gradient. So a product over a unit of n tokens does not multiply the gradient
    by n (GSPO-token, arXiv 2507.18071, eq. 14).
    """
    now = widen(logp)
    held = aggregate(now.detach() - widen(old_logp.detach()), unit, sampled=sampled, how=how)
    return held + torch.where(sampled, now - now.detach(), 0.0)


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `exp(log_ratio)`, after limiting `log_ratio` to +-20 (`LOG_LIMIT`)."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def binary_kl(
    logp: Float[Tensor, "*shape"], other_logp: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return KL(p, q) in nats between two distributions over {the token, any other token}.

    p = exp(`logp`) and q = exp(`other_logp`) are the token's probabilities. The KL is p log(p / q)
    + (1 - p) log((1 - p) / (1 - q)). Each of the four probabilities is at least
    `PROBABILITY_FLOOR`.
    """
    both = [widen(each) for each in (logp, other_logp)]
    p, q = (each.exp().clamp(min=PROBABILITY_FLOOR) for each in both)
    rest, other_rest = ((-each.expm1()).clamp(min=PROBABILITY_FLOOR) for each in both)
    return p * (p / q).log() + rest * (rest / other_rest).log()


def two_way_kl(
    log_discrepancy: Float[Tensor, "*shape"], behavior_logp: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the larger of KL(pi_old, mu) and KL(mu, pi_old) over {the token, any other token}, in
    nats.

    `log_discrepancy` is log(pi_old / mu) of each token, not aggregated. No gradient.
    """
    mu = widen(behavior_logp.detach())
    old = mu + log_discrepancy.detach()
    return torch.maximum(binary_kl(old, mu), binary_kl(mu, old))


def k3(
    log_discrepancy: Float[Tensor, "*shape"], behavior_logp: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return D - 1 - log D of each token, which estimates KL(mu, pi_old) in nats. No gradient."""
    held = log_discrepancy.detach()
    return bounded_exp(held) - 1 - held


DIVERGENCES = {"two_way_kl": two_way_kl, "k3": k3}
"""Divergences between pi_old and mu at a token, by name. Each is a function of the token's log D
and `behavior_logp`. A correction mode that has a parameter with this name gets the divergence.
"""


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """The result of a correction: a weight and a mask for each token, without gradient."""

    weight: Float[Tensor, "*shape"]
    """Factor on the loss of each kept token."""
    keep: Bool[Tensor, "*shape"]
    """False for tokens that the correction dropped, and for tokens that were not sampled."""
    weighted: bool = False
    """True if D is a factor of `weight`. Then a second weighting by D raises ValueError."""

    @property
    def factor(self) -> Tensor:
        """The weight of each kept token, and 0 for all others."""
        return torch.where(self.keep, self.weight, 0.0)


Function = TypeVar("Function", bound=Callable[..., CorrectionWeights])

MODES: dict[str, Callable[..., CorrectionWeights]] = {}


def mode(function: Function) -> Function:
    """Register a function as a value of the option `correction.mode`. Used as a decorator."""
    MODES[function.__name__] = function
    return function


def keep_all(sampled: Bool[Tensor, "*shape"]) -> CorrectionWeights:
    """Return the `CorrectionWeights` before any correction: all sampled tokens kept, weight 1."""
    return CorrectionWeights(weight=torch.ones(sampled.shape, device=sampled.device), keep=sampled)


@mode
def none(log_discrepancy: Float[Tensor, "*shape"], before: CorrectionWeights) -> CorrectionWeights:
    """Correct nothing. This is right if D is known to be 1, as with `old_logp = behavior_logp`."""
    return before


@mode
def mask(
    log_discrepancy: Float[Tensor, "*shape"], before: CorrectionWeights, *, low: float, high: float
) -> CorrectionWeights:
    """Keep a token only if `low <= D <= high`, where D = pi_old / mu is the discrepancy.

    A D that is aggregated by `mean` varies little, and needs a range such as 1/1.005 to 1.005.
    """
    return replace(before, keep=before.keep & _inside(log_discrepancy, low=low, high=high))


@mode
def truncate(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    high: float,
    normalize: bool = False,
) -> CorrectionWeights:
    """Weight each token by `min(D, high)`, where D = pi_old / mu: truncated importance sampling.

    This is the rho-bar of IMPALA (arXiv 1802.01561), called TIS in LLM training. With `high = inf`
    the weight is D. With `normalize`, the weights are divided by their mean over kept tokens
    (self-normalized importance sampling). The tensors must then be those of the whole batch.
    """
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}")
    return clamp(log_discrepancy, before, low=0.0, high=high, normalize=normalize)


@mode
def clamp(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    low: float,
    high: float,
    normalize: bool = False,
) -> CorrectionWeights:
    """Weight each token by D = pi_old / mu, limited to the range from `low` to `high`.

    `truncate` does the same without a lower limit. With `normalize`, the weights are divided by
    their mean over kept tokens.
    """
    if not (0 <= low <= high and high > 0):
        raise ValueError(f"clamp needs 0 <= low <= high and high > 0, got {low} .. {high}")
    weight = bounded_exp(log_discrepancy.detach()).clamp(min=low, max=high)
    return _add_weight(before, weight, normalize=normalize)


@mode
def mask_weight(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    low: float,
    high: float,
    normalize: bool = False,
) -> CorrectionWeights:
    """Weight a token by D = pi_old / mu if `low <= D <= high`, and drop it otherwise.

    The method is known as IcePop and as MIS (arXiv 2510.18855). With `normalize`, the weights are
    divided by their mean over kept tokens.
    """
    inside = _inside(log_discrepancy, low=low, high=high)
    return _weight_inside(log_discrepancy, before, inside, normalize=normalize)


@mode
def kpop(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    two_way_kl: Float[Tensor, "*shape"],
    kl_limit: float,
    normalize: bool = False,
) -> CorrectionWeights:
    """Weight a token by D = pi_old / mu if a KL is at most `kl_limit`, and drop it otherwise.

    This is KPop (ringtech.notion.site/kpop). The KL (`two_way_kl`) is between pi_old and mu, over
    two events: the token, and any other token. It is the larger one of both directions. A limit on
    it allows large ratios of rare tokens, but only small ones of likely tokens. With `normalize`,
    the weights are divided by their mean over kept tokens.
    """
    inside = two_way_kl <= kl_limit
    return _weight_inside(log_discrepancy, before, inside, normalize=normalize)


@mode
def k3_mask(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    k3: Float[Tensor, "*shape"],
    kl_limit: float,
) -> CorrectionWeights:
    """Keep a token only if D - 1 - log D is at most `kl_limit`, where D = pi_old / mu.

    The mean of D - 1 - log D over a sequence estimates KL(mu, pi_old) per token
    (joschu.net/blog/kl-approx.html).
    """
    return replace(before, keep=before.keep & (k3 <= kl_limit))


def veto(
    log_discrepancy: Float[Tensor, "*shape"],
    before: CorrectionWeights,
    *,
    sequence: Int[Tensor, "*shape"],
    below: float,
) -> CorrectionWeights:
    """Drop each sequence in which a sampled token's D = pi_old / mu is below `below`. 0 drops none.

    `log_discrepancy` is log D per token, not aggregated. Tokens that an earlier correction dropped
    are checked, too. A token that is nearly impossible for the trainer shows that engine and
    trainer had different contexts, which affects the whole sequence.
    """
    if not 0 <= below <= 1:
        raise ValueError(f"below must be between 0 and 1, got {below}")
    # tokens that were not sampled have log D = 0 and never get here
    impossible = (log_discrepancy < _log(below)).flatten()
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
    """Return a factor on each token's loss that limits pi / mu to `high`: min(1, high mu / pi).

    pi / mu is the product of D = pi_old / mu and S = pi / pi_old. If a token has the weight D and
    the loss -S A, where A is its advantage, this factor gives -min(D S, high) A. This is the
    rho-bar of V-trace (arXiv 1802.01561) on the whole ratio. The factor has no gradient, and is 1
    for tokens that were not sampled.
    """
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}")
    log_ratio = log_discrepancy(logp, behavior_logp, sampled=sampled)
    return torch.where(sampled, (math.log(high) - log_ratio).clamp(max=0).exp(), 1.0)


def summary(
    correction: CorrectionWeights,
    *,
    sampled: Bool[Tensor, "*shape"],
    log_discrepancy: Float[Tensor, "*shape"],
    log_staleness: Float[Tensor, "*shape"],
) -> dict[str, float]:
    """Return metrics of a correction: weights, kept shares, and percentiles of log D and log S.

    D = pi_old / mu is the discrepancy, and S = pi / pi_old the staleness ratio. Percentiles
    (nearest rank) are of the signed values. Shares and means are over all sampled tokens, including
    dropped ones. Empty if no token was sampled.
    """
    if not sampled.any():
        return {}
    figures = {
        "correction/kept_share": correction.keep[sampled].double().mean().item(),
        "correction/weight_mean": correction.factor[sampled].double().mean().item(),
    }
    for name, ratio in (("correction/log_d", log_discrepancy), ("objective/log_s", log_staleness)):
        values = ratio.detach()[sampled].double().sort().values
        figures[f"{name}_mean"] = values.mean().item()
        figures[f"{name}_abs_mean"] = values.abs().mean().item()
        for percent in (1, 50, 99):
            rank = nearest_rank(len(values), percent / 100)
            figures[f"{name}_p{percent:02d}"] = values[rank].item()
    return figures


def divergence(
    old_logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
) -> dict[str, float]:
    """Return metrics of the divergence between the trainer (`old_logp`) and the engine.

    `kl_k1` and `kl_k3` estimate KL(mu || pi_old), where mu is the engine's policy
    (joschu.net/blog/kl-approx.html). `chi2` estimates E[D^2] - 1 with D = pi_old / mu, per token
    and for the product over a sequence. It can be negative on a finite sample. `log_ppl`
    (log-perplexity) is the mean of -logp over a sequence, and `log_ppl_diff` is the trainer's minus
    the engine's. Their means give sequences equal weights. Empty if no token was sampled.
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
        "correction/kl_k3": k3(tokens, behavior_logp[sampled]).mean().item(),
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
    """Return `values` in float32, or unchanged if they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    if not 0 <= low <= high:
        raise ValueError(f"a band needs 0 <= low <= high, got {low} .. {high}")
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _weight_inside(
    log_discrepancy: Tensor, before: CorrectionWeights, inside: Tensor, *, normalize: bool
) -> CorrectionWeights:
    weight = torch.where(inside, bounded_exp(log_discrepancy.detach()), 0.0)
    kept = replace(before, keep=before.keep & inside)
    return _add_weight(kept, weight, normalize=normalize)


def _add_weight(before: CorrectionWeights, weight: Tensor, *, normalize: bool) -> CorrectionWeights:
    if before.weighted:
        raise ValueError(
            "the tokens already carry a weight D; a second one would count it twice, use mask"
        )
    if normalize and before.keep.any():
        weight = weight / weight[before.keep].mean()
    return replace(before, weight=weight, weighted=True)
