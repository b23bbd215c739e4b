"""The discrepancy D between engine and trainer: log-ratios, their aggregation, and what is done about them.

    pi / mu  =  D * S,    log D = old_logp - behavior_logp,    log S = logp - old_logp

Plain functions of tensors of any one shape: packed `[T]` with ids per token, or padded `[B, T]` with a mask.
`sampled` is True on action tokens; everything else is ignored, whatever it holds. Ids (`unit`, `sequence`) are any
integers >= 0 on action tokens. D is always detached: it repairs a defect of the system and is nothing to learn from.
D is numerics alone only where `old_logp` is exact; behind a proxy it holds staleness too.

Order of use: `log_discrepancy` -> `aggregate` -> `start`, then any of `veto`, `mask`, `truncate`, `mask_weight`, each
taking the verdict of the one before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOG_LIMIT = 20.0
"""Log-ratios are held within +-20 before `exp`: e^20 = 4.9e8 is far outside any useful band and still finite."""

WITH_BEHAVIOR = (1, 5)
"""`trajectory.HAS_BEHAVIOR` as integers (sampled, replayed): this room imports no record. A test pins the two."""

Unit = Literal["token", "turn", "segment", "sequence"]
How = Literal["mean", "sum"]


class NonFinite(ValueError):
    """A log-probability of an action token is NaN or infinite."""

    def __init__(self, name: str, value: float, *, sequence: int, token: int, version: int) -> None:
        super().__init__(
            f"{name} is {value} at token {token} of sequence {sequence}, sampled by version {version}; "
            "every action token needs a finite log-probability"
        )
        self.name, self.sequence, self.token, self.version = name, sequence, token, version


def has_behavior(provenance: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """True where a token may enter an importance product: it was sampled here, in this context, so it has a mu.

    >>> has_behavior(torch.tensor([0, 1, 2, 3, 4, 5])).int().tolist()
    [0, 1, 0, 0, 0, 1]
    """
    return torch.isin(
        provenance, torch.tensor(WITH_BEHAVIOR, dtype=provenance.dtype, device=provenance.device)
    )


def check_finite(
    logps: Mapping[str, Tensor],
    sampled: Bool[Tensor, "*shape"],
    *,
    sequence: Int[Tensor, "*shape"],
    version: Int[Tensor, "*shape"],
) -> None:
    """Raise `NonFinite` at the first action token whose log-probability is NaN or infinite.

    `logps` are named tensors of the shape of `sampled`. `sequence` may be indices or episode numbers: the error
    repeats it, with the token's position inside that sequence. Waits for the device.
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
    """The unit each action token belongs to, numbered 0, 1, ... in token order; -1 off the mask.

    `turn`: one reply. `segment`: a maximal run of one version inside a reply. Sequences lie one after the other, so
    a unit is a run of action tokens with equal keys. Padded batches pass `arange(B)[:, None].expand(B, T)`.

    >>> row, turn = torch.zeros(5, dtype=torch.int64), torch.tensor([-1, 0, 0, -1, 1])
    >>> unit_ids("segment", sequence=row, turn=turn, version=torch.tensor([-1, 3, 4, -1, 4]), sampled=turn >= 0)
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


def aggregate(
    log_ratio: Float[Tensor, "*shape"],
    unit: Int[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
    how: How = "mean",
) -> Float[Tensor, "*shape"]:
    """A log-ratio over the action tokens of each unit, given back to each of its tokens; 0 off the mask.

    `mean` is the log of the geometric-mean ratio, `sum` the log of the product. Waits for the device once.
    """
    if how not in ("mean", "sum"):
        raise ValueError(f"how must be mean or sum, got {how!r}")
    index = torch.where(sampled, unit, 0).flatten()
    values = torch.where(sampled, _widen(log_ratio), 0.0).flatten()
    total = values.new_zeros(int(index.max()) + 1 if len(index) else 0)
    result = total.index_add(0, index, values)
    if how == "mean":
        result = result / total.index_add(0, index, sampled.flatten().to(values.dtype)).clamp(min=1)
    return torch.where(sampled, result[index].reshape(sampled.shape), 0.0)


def log_discrepancy(
    old_logp: Float[Tensor, "*shape"],
    behavior_logp: Float[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """log D per token, detached; 0 off the mask. Float32 at least (float64 stays), not clamped."""
    return torch.where(sampled, _widen(old_logp.detach()) - _widen(behavior_logp.detach()), 0.0)


def log_staleness(
    logp: Float[Tensor, "*shape"],
    old_logp: Float[Tensor, "*shape"],
    *,
    unit: Int[Tensor, "*shape"],
    sampled: Bool[Tensor, "*shape"],
    how: How = "mean",
) -> Float[Tensor, "*shape"]:
    """log S of each token's unit, with a gradient of exactly 1 towards its own `logp` and none towards `old_logp`.

    So `exp` of it is `sg(S_u) * exp(logp_t - sg(logp_t))`: broadcasting a product over a unit of n tokens does not
    multiply the gradient by n (GSPO-token, arXiv 2507.18071, eq. 14). 0 off the mask; not clamped.
    """
    now = _widen(logp)
    held = aggregate(now.detach() - _widen(old_logp.detach()), unit, sampled=sampled, how=how)
    return held + torch.where(sampled, now - now.detach(), 0.0)


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The ratio itself, with its logarithm held within `LOG_LIMIT`."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class Control:
    """The verdict on each token. Carries no gradient."""

    weight: Float[Tensor, "*shape"]
    """What a kept token's loss is multiplied by."""
    keep: Bool[Tensor, "*shape"]
    """False on dropped tokens and off the mask."""
    weighted: bool = False
    """A control has put D into `weight`; a second one would count D twice and is refused."""

    @property
    def factor(self) -> Tensor:
        """`weight` where kept, 0 elsewhere."""
        return torch.where(self.keep, self.weight, 0.0)


def start(sampled: Bool[Tensor, "*shape"]) -> Control:
    """Every action token kept with weight 1: what the first control begins from."""
    return Control(weight=torch.ones(sampled.shape, device=sampled.device), keep=sampled)


def none(log_discrepancy: Float[Tensor, "*shape"], before: Control) -> Control:
    """No control. Sound only if the objective is anchored on mu, or D is known to be 1."""
    return before


def mask(
    log_discrepancy: Float[Tensor, "*shape"], before: Control, *, low: float, high: float
) -> Control:
    """Keep a token if `low <= D <= high`. With `mean` aggregation bands are narrow: 1/1.005 .. 1.005."""
    return replace(before, keep=before.keep & _inside(log_discrepancy, low=low, high=high))


def truncate(log_discrepancy: Float[Tensor, "*shape"], before: Control, *, high: float) -> Control:
    """Weight `min(D, high)`: truncated importance sampling (IMPALA's rho-bar, arXiv 1802.01561; TIS in LLM training).

    `high = inf` is the plain weight D.
    """
    if not high > 0:
        raise ValueError(f"high must be > 0, got {high}")
    return _weigh(before, bounded_exp(log_discrepancy.detach()).clamp(max=high))


def mask_weight(
    log_discrepancy: Float[Tensor, "*shape"], before: Control, *, low: float, high: float
) -> Control:
    """Weight D inside the band, drop the token outside it (IcePop, arXiv 2510.18855; also called MIS)."""
    inside = _inside(log_discrepancy, low=low, high=high)
    weighed = _weigh(before, torch.where(inside, bounded_exp(log_discrepancy.detach()), 0.0))
    return replace(weighed, keep=before.keep & inside)


def veto(
    log_discrepancy: Float[Tensor, "*shape"],
    before: Control,
    *,
    sequence: Int[Tensor, "*shape"],
    below: float,
) -> Control:
    """Drop a whole sequence with any action token whose D is under `below`; 0 never does.

    Takes log D per token, not aggregated. Looks at every action token, also those that an earlier control dropped:
    one impossible token says that the context was another one, and that holds for its neighbours.
    """
    if not 0 <= below <= 1:
        raise ValueError(f"below must be between 0 and 1, got {below}")
    impossible = (log_discrepancy < _log(below)).flatten()  # never off the mask, where log D is 0
    index = sequence.clamp(min=0).flatten()
    count = torch.zeros(
        int(index.max()) + 1 if len(index) else 0, dtype=torch.long, device=index.device
    )
    count = count.index_add(0, index, impossible.long())
    return replace(before, keep=before.keep & (count[index] == 0).reshape(before.keep.shape))


def summary(
    control: Control,
    *,
    sampled: Bool[Tensor, "*shape"],
    log_discrepancy: Float[Tensor, "*shape"],
    log_staleness: Float[Tensor, "*shape"],
) -> dict[str, float]:
    """What the controls did, and how far both factors are from 1, over action tokens. Empty if there are none.

    Percentiles are of the log-ratio (nearest rank); shares and means count action tokens before masking.
    """
    if not sampled.any():
        return {}
    figures = {
        "corrections/kept_share": control.keep[sampled].double().mean().item(),
        "corrections/weight_mean": control.factor[sampled].double().mean().item(),
    }
    for name, ratio in (("log_discrepancy", log_discrepancy), ("log_staleness", log_staleness)):
        values = ratio.detach()[sampled].double().sort().values
        figures[f"corrections/{name}_mean"] = values.mean().item()
        figures[f"corrections/{name}_abs_mean"] = values.abs().mean().item()
        for percent in (1, 50, 99):
            figures[f"corrections/{name}_p{percent:02d}"] = values[
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
    """How far `old_logp` is from `behavior_logp`, estimated on tokens drawn from mu. Empty if there are none.

    `kl` is KL(mu || pi_old) by k1, `kl_k3` by k3 (joschu.net/blog/kl-approx.html); `chi2` is E[D^2] - 1, per token
    and for the product over a sequence, and can be negative on a finite sample. A log-perplexity is the mean of
    -logp over a sequence; its `gap` is pi_old's minus mu's. Sequences count equally in the means over sequences.
    """
    if not sampled.any():
        return {}
    log_d = log_discrepancy(old_logp.double(), behavior_logp.double(), sampled=sampled)
    rows = sequence[sampled]
    size = int(rows.max()) + 1
    count = torch.bincount(rows, minlength=size).double()
    total = count.new_zeros(size).index_add(0, rows, log_d[sampled])
    behavior = count.new_zeros(size).index_add(0, rows, behavior_logp[sampled].detach().double())
    seen = count > 0
    gap = -(total[seen] / count[seen])
    perplexity = -(behavior[seen] / count[seen])
    tokens = log_d[sampled]
    return {
        "corrections/kl": -tokens.mean().item(),
        "corrections/kl_k3": (bounded_exp(tokens) - 1 - tokens).mean().item(),
        "corrections/chi2_token": bounded_exp(tokens).square().mean().item() - 1,
        "corrections/chi2_sequence": bounded_exp(total[seen]).square().mean().item() - 1,
        "corrections/behavior_log_perplexity": perplexity.mean().item(),
        "corrections/old_log_perplexity": (perplexity + gap).mean().item(),
        "corrections/log_perplexity_gap": gap.mean().item(),
        "corrections/log_perplexity_gap_abs": gap.abs().mean().item(),
        "corrections/log_perplexity_gap_min": gap.min().item(),
        "corrections/log_perplexity_gap_max": gap.max().item(),
    }


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    if not 0 <= low <= high:
        raise ValueError(f"a band needs 0 <= low <= high, got {low} .. {high}")
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _weigh(before: Control, weight: Tensor) -> Control:
    if before.weighted:
        raise ValueError(
            "the tokens already carry a weight D; a second control would count it twice, use mask"
        )
    return replace(before, weight=weight, weighted=True)
