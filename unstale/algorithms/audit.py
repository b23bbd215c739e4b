"""How wrong a stand-in for the old logit is, and in which direction: the figures of algorithm.md, section 5.

    log D_hat = prox - behavior_logp,    log S_hat = logp - prox,    error = prox - old_logp

Plain functions of log-probabilities with the truth among them, in any one shape: packed `[T]`, or padded `[B, T]` with
a mask. A figure that its data cannot tell is None, never 0. Standard errors take sequences as clusters: tokens of one
sequence err together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_TOKENS = 100
"""With fewer, no leak is fitted."""
SIGNAL = 10.0
"""A log-ratio whose standard deviation is under so many times the noise counts as constant."""
ALIKE = 0.9999
"""Two regressors that are more correlated than this cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The log-probabilities of a batch, taken before the step's first update."""

    prox: Float[Tensor, "*shape"]
    """What the route says."""
    old_logp: Float[Tensor, "*shape"]
    """The truth: the trainer's own forward pass at the weights that sampled the token."""
    logp: Float[Tensor, "*shape"]
    behavior_logp: Float[Tensor, "*shape"]
    lag: Int[Tensor, "*shape"]
    """Batches between sampling and training."""
    sequence: Int[Tensor, "*shape"]
    sampled: Bool[Tensor, "*shape"]
    """Action tokens that have a truth; everything else is ignored, whatever it holds."""

    def flat(self) -> "Tokens":
        """`[N]`: the action tokens alone, log-probabilities in float64."""
        where = self.sampled
        columns = (getattr(self, field.name)[where] for field in fields(self))
        return Tokens(
            *(column.double() if column.is_floating_point() else column for column in columns)
        )

    def older_than(self, lag: int) -> "Tokens":
        """`[N]`: of the action tokens, those of a greater lag."""
        flat = self.flat()
        where = flat.lag > lag
        return Tokens(*(getattr(flat, field.name)[where] for field in fields(flat)))

    @property
    def error(self) -> Tensor:
        return self.prox - self.old_logp

    @property
    def log_d(self) -> Tensor:
        """The true discrepancy."""
        return self.old_logp - self.behavior_logp

    @property
    def log_s(self) -> Tensor:
        """The true staleness."""
        return self.logp - self.old_logp

    @property
    def log_d_hat(self) -> Tensor:
        return self.prox - self.behavior_logp

    @property
    def log_s_hat(self) -> Tensor:
        return self.logp - self.prox

    def __len__(self) -> int:
        return int(self.sampled.sum())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its standard error (None with a single sequence), and the action tokens behind it."""

    value: float
    se: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Leaks:
    """Shares of the two true factors that a stand-in puts into the other one; None where they cannot be told."""

    staleness: Estimate | None
    discrepancy: Estimate | None


def decomposition_error(tokens: Tokens) -> Estimate | None:
    """Mean abs(prox - old_logp): at once the error of log D_hat and, with the sign turned, of log S_hat."""
    flat = tokens.flat()
    return _ratio(flat.error.abs(), torch.ones_like(flat.error), flat.sequence)


def error_by_lag(tokens: Tokens) -> dict[int, Estimate]:
    """`decomposition_error` of the tokens of each lag."""
    flat, found = tokens.flat(), dict[int, Estimate]()
    for lag in flat.lag.unique().tolist():
        where = flat.lag == lag
        estimate = _ratio(
            flat.error[where].abs(), torch.ones_like(flat.error[where]), flat.sequence[where]
        )
        assert estimate is not None  # the lag is among the tokens'
        found[lag] = estimate
    return found


def error_ratio(one: Tokens, other: Tokens) -> Estimate | None:
    """The decomposition error of `one` over that of `other`, a stand-in on the same tokens; None when that has none.

    The standard error is of the paired ratio (delta method): what is hard for both does not widen it.
    """
    ours, theirs = one.flat(), other.flat()
    if len(ours) != len(theirs):
        raise ValueError(
            f"a ratio needs the same tokens on both sides, got {len(ours)} and {len(theirs)}"
        )
    return _ratio(ours.error.abs(), theirs.error.abs(), ours.sequence)


def leaks(tokens: Tokens, *, noise: float = 0.0) -> Leaks:
    """`staleness_leak` s and `discrepancy_leak` d, by joint least squares with intercept over tokens of lag >= 1:

        prox - old_logp = s * log S - d * log D

    Exact (0, 0); `rollout` (0, 1); `current_recompute` (1, 0); log-linear at constant alpha (alpha, 1 - alpha).
    `noise` is the standard deviation of `old_logp` about itself in another packing. A factor that varies by less than
    `SIGNAL` times it is left out of the fit, and its leak is None; so are both with fewer than `MIN_TOKENS` tokens.
    """
    old = tokens.older_than(0)
    columns = {"staleness": old.log_s, "discrepancy": -old.log_d}
    columns = {name: column for name, column in columns.items() if not _constant(column, noise)}
    if len(old) < MIN_TOKENS or not columns or abs(_correlation(*columns.values())) > ALIKE:
        return Leaks(None, None)
    regressors = torch.stack([torch.ones_like(old.error), *columns.values()], 1)
    fit = torch.linalg.lstsq(regressors, old.error[:, None]).solution[:, 0]
    scores = _by_sequence(regressors * (old.error - regressors @ fit)[:, None], old.sequence)
    bread = torch.linalg.inv(regressors.T @ regressors)
    spread = (bread @ scores.T @ scores @ bread).diagonal().clamp(min=0).sqrt()
    several = len(scores) > len(fit)  # clusters, against what was fitted
    found = {
        name: Estimate(fit[i].item(), spread[i].item() if several else None, len(old))
        for i, name in enumerate(columns, start=1)
    }
    return Leaks(found.get("staleness"), found.get("discrepancy"))


def factor_correlation(tokens: Tokens, *, noise: float = 0.0) -> float | None:
    """Correlation of log D_hat with log S_hat: +1 for log-linear at a constant 0 < alpha < 1.

    None when a factor is constant: `rollout`, `current_recompute`, alpha 0 or 1.
    """
    flat = tokens.flat()
    if _constant(flat.log_d_hat, noise) or _constant(flat.log_s_hat, noise):
        return None
    return _correlation(flat.log_d_hat, flat.log_s_hat)


def agreement(
    with_prox: Bool[Tensor, "*shape"],
    with_truth: Bool[Tensor, "*shape"],
    *,
    sampled: Bool[Tensor, "*shape"],
) -> float | None:
    """F1 of a threshold's verdicts taken with the stand-in against those taken with the truth.

    `mask_agreement` is that of the tokens *dropped* by the discrepancy control, `clip_agreement` of the tokens
    *clipped* by the objective: a threshold acts on few tokens, and agreeing on the many that it leaves alone would
    hide every difference. None when it acts on no token either way.

    >>> a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    >>> agreement(a, b, sampled=torch.ones(4, dtype=torch.bool))
    0.5
    """
    ours, theirs = with_prox & sampled, with_truth & sampled
    acted = int(ours.sum()) + int(theirs.sum())
    return 2 * int((ours & theirs).sum()) / acted if acted else None


def exact_fraction(
    exact: Bool[Tensor, "*shape"], *, sampled: Bool[Tensor, "*shape"]
) -> float | None:
    """Share of action tokens whose `old_logp` the route calls exact; None of no tokens."""
    return exact[sampled].double().mean().item() if sampled.any() else None


def join(parts: Sequence[Tokens]) -> Tokens:
    """`[N]`: the action tokens of several batches. Sequences of different parts stay apart."""
    flats, first = [], 0
    for part in parts:
        flat = part.flat()
        flats.append(replace(flat, sequence=flat.sequence + first))
        first += int(flat.sequence.max()) + 1 if len(flat) else 0
    return Tokens(
        *(torch.cat([getattr(flat, field.name) for flat in flats]) for field in fields(Tokens))
    )


def _ratio(above: Tensor, below: Tensor, sequence: Tensor) -> Estimate | None:
    """Sum over sum, with the standard error of a ratio whose terms come in clusters."""
    total = below.sum()
    if not total > 0:
        return None
    ratio = above.sum() / total
    apart = _by_sequence((above - ratio * below)[:, None], sequence)
    count = len(apart)
    se = (apart.square().sum() * count / (count - 1)).sqrt() / total if count > 1 else None
    return Estimate(ratio.item(), None if se is None else se.item(), len(above))


def _by_sequence(rows: Tensor, sequence: Tensor) -> Tensor:
    """Sums of the rows of each sequence."""
    known, place = sequence.unique(return_inverse=True)
    return rows.new_zeros(len(known), rows.shape[1]).index_add(0, place, rows)


def _constant(values: Tensor, noise: float) -> bool:
    spread = values.std(correction=0).item() if len(values) else 0.0
    return not spread > SIGNAL * noise


def _correlation(one: Tensor, *other: Tensor) -> float:
    """0 of a single column."""
    return torch.corrcoef(torch.stack([one, *other]))[0, 1].item() if other else 0.0
