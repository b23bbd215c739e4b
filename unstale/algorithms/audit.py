"""Measure the errors of approximate old log-probabilities against the true ones.

    true values:            log D     = old_logp - behavior_logp,    log S     = logp - old_logp
    with `prox` instead:    log D_hat = prox - behavior_logp,        log S_hat = logp - prox

`prox` is the approximation of `old_logp`. docs/old-logps.md has results. All tensors have one
shape: packed `[T]`, or padded `[B, T]` with a mask. An estimate is None if there are too few data
or if they vary too little. Tokens of one sequence have correlated errors, so standard errors treat
each sequence as one cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import renumber

MIN_TOKENS = 100
"""Smallest number of tokens from which `leaks` makes estimates."""
SIGNAL = 10.0
"""A log-ratio counts as constant if its standard deviation is at most this many times the numerical
noise of `old_logp`.
"""
ALIKE = 0.9999
"""Largest correlation of log S and log D for which `leaks` makes estimates. With a higher
correlation, the effects of the two log-ratios cannot be separated.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Log-probabilities of a batch's tokens for the audit, from before its first optimizer step."""

    prox: Float[Tensor, "*shape"]
    """The approximate `old_logp` that is compared with the true one."""
    old_logp: Float[Tensor, "*shape"]
    """The true old log-probability: the trainer's, with the weights that sampled the token."""
    logp: Float[Tensor, "*shape"]
    behavior_logp: Float[Tensor, "*shape"]
    lag: Int[Tensor, "*shape"]
    """Number of batches trained on after the token was sampled and before the token's batch."""
    sequence: Int[Tensor, "*shape"]
    sampled: Bool[Tensor, "*shape"]
    """True for sampled tokens whose true `old_logp` is known. All other tokens are ignored."""

    def flat(self) -> "Tokens":
        """Return only the tokens where `sampled` is True, as tensors `[N]`.

        Log-probabilities are float64.
        """
        where = self.sampled
        columns = (getattr(self, field.name)[where] for field in fields(self))
        return Tokens(
            *(column.double() if column.is_floating_point() else column for column in columns)
        )

    @property
    def error(self) -> Tensor:
        return self.prox - self.old_logp

    @property
    def log_d(self) -> Tensor:
        """The true log D of each token: `old_logp - behavior_logp`."""
        return self.old_logp - self.behavior_logp

    @property
    def log_s(self) -> Tensor:
        """The true log S of each token: `logp - old_logp`."""
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
    """An estimate, its standard error, and the number of tokens from which it was made.

    The standard error is None if there are too few sequences.
    """

    value: float
    se: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Leaks:
    """The share of each true log-ratio that an approximation of `old_logp` puts into the other one.

    The true ratios are S = pi / pi_old (staleness) and D = pi_old / mu (discrepancy). The
    approximation gives S_hat and D_hat. `staleness` is the share of log S that log D_hat contains.
    `discrepancy` is the share of log D that log S_hat contains. A share is None if there are too
    few tokens, or if its log-ratio varies too little.
    """

    staleness: Estimate | None
    discrepancy: Estimate | None


def decomposition_error(tokens: Tokens) -> Estimate | None:
    """Return the mean of |prox - old_logp| over the sampled tokens. None without tokens.

    This is the mean error of both approximate log-ratios, log D_hat and log S_hat.
    """
    flat = tokens.flat()
    return _ratio(flat.error.abs(), torch.ones_like(flat.error), flat.sequence)


def error_by_lag(tokens: Tokens) -> dict[int, Estimate]:
    """Return the mean absolute error of the approximated `old_logp`, by lag in batches."""
    flat = tokens.flat()
    estimates: dict[int, Estimate] = {}
    for lag in flat.lag.unique().tolist():
        where = flat.lag == lag
        error = flat.error[where].abs()
        estimate = _ratio(error, torch.ones_like(error), flat.sequence[where])
        assert estimate is not None  # not None, because at least one token has this lag
        estimates[lag] = estimate
    return estimates


def error_ratio(one: Tokens, other: Tokens) -> Estimate | None:
    """Return the mean error of one approximation divided by that of another, on the same tokens.

    None if the mean error of `other` is 0. The standard error is that of a ratio of paired values,
    so tokens that are difficult for both approximations do not increase it. Raises ValueError if
    the numbers of tokens differ.
    """
    above = one.flat()
    below = other.flat()
    if len(above) != len(below):
        raise ValueError(
            f"a ratio needs the same tokens on both sides, got {len(above)} and {len(below)}"
        )
    return _ratio(above.error.abs(), below.error.abs(), above.sequence)


def leaks(tokens: Tokens, *, noise: float = 0.0) -> Leaks:
    """Estimate which share of log S and of log D an approximation puts into the other log-ratio.

    These shares, s and d, are fitted on tokens of lag 1 or more, by least squares with an
    intercept:

        prox - old_logp = s * log S - d * log D

    `(s, d)` is (0, 0) for exact values, (0, 1) for the route (method) `rollout`, (1, 0) for the
    route `current_recompute`, and (alpha, 1 - alpha) for log-linear interpolation with a constant
    alpha. `noise` is the standard deviation of `old_logp` between two ways of packing the same
    tokens. A log-ratio is left out of the fit if its standard deviation is at most `SIGNAL *
    noise`, and its share is None. With fewer than `MIN_TOKENS` tokens both shares are None.
    """
    old = replace(tokens, sampled=tokens.sampled & (tokens.lag > 0)).flat()
    columns = {"staleness": old.log_s, "discrepancy": -old.log_d}
    columns = {name: column for name, column in columns.items() if not _constant(column, noise)}
    if len(old) < MIN_TOKENS or not columns or abs(_correlation(*columns.values())) > ALIKE:
        return Leaks(None, None)
    # Columns without their means need no intercept. Sums are used, because products of large
    # matrices have different last bits with another number of threads.
    centred = torch.stack([column - column.mean() for column in columns.values()], 1)
    scale = centred.square().mean(0).sqrt()
    regressors = centred / scale
    gram = (regressors[:, :, None] * regressors[:, None, :]).sum(0)
    error = old.error - old.error.mean()
    fit = torch.linalg.solve(gram, (regressors * error[:, None]).sum(0))
    residual = error - (regressors * fit).sum(1)
    scores = _by_sequence(regressors * residual[:, None], old.sequence)
    bread = torch.linalg.inv(gram)
    middle = (scores[:, :, None] * scores[:, None, :]).sum(0)
    spread = (bread @ middle @ bread).diagonal().clamp(min=0).sqrt() / scale
    slopes = fit / scale
    # there must be more sequences than the slopes and the intercept
    has_error = len(scores) > len(fit) + 1
    estimates = {
        name: Estimate(slopes[i].item(), spread[i].item() if has_error else None, len(old))
        for i, name in enumerate(columns)
    }
    return Leaks(estimates.get("staleness"), estimates.get("discrepancy"))


def factor_correlation(tokens: Tokens, *, noise: float = 0.0) -> float | None:
    """Return the correlation of the approximate log-ratios log D_hat and log S_hat.

    The correlation is +1 for log-linear interpolation with a constant 0 < alpha < 1. It is None if
    one of the two is constant, as for the routes (methods) `rollout` and `current_recompute`, and
    for interpolation with alpha 0 or 1.
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
    """Return the F1 score of decisions by approximate ratios against those by true ratios.

    A decision is to drop or clip a token. `with_prox` marks the tokens with this decision by the
    approximate ratios, `with_truth` those by the true ratios. Tokens in neither set do not count,
    because they are the majority and would hide every difference. None if both sets are empty.

    >>> a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    >>> agreement(a, b, sampled=torch.ones(4, dtype=torch.bool))
    0.5
    """
    by_prox = with_prox & sampled
    by_truth = with_truth & sampled
    total = int(by_prox.sum()) + int(by_truth.sum())
    return 2 * int((by_prox & by_truth).sum()) / total if total else None


def join(parts: Sequence[Tokens]) -> Tokens:
    """Return the sampled tokens of several batches as one `Tokens` with tensors `[N]`.

    Sequences get new numbers, which differ between the batches.
    """
    flats, first = [], 0
    for part in parts:
        flat = part.flat()
        index, count = renumber(flat.sequence)
        flats.append(replace(flat, sequence=index + first))
        first += count
    return Tokens(
        *(torch.cat([getattr(flat, field.name) for flat in flats]) for field in fields(Tokens))
    )


def _ratio(above: Tensor, below: Tensor, sequence: Tensor) -> Estimate | None:
    """Return sum(above) / sum(below) with its standard error. None if sum(below) is not above 0.

    Each sequence is one cluster.
    """
    total = below.sum()
    if not total > 0:
        return None
    ratio = above.sum() / total
    residuals = _by_sequence((above - ratio * below)[:, None], sequence)
    count = len(residuals)
    se = (residuals.square().sum() * count / (count - 1)).sqrt() / total if count > 1 else None
    return Estimate(ratio.item(), None if se is None else se.item(), len(above))


def _by_sequence(rows: Tensor, sequence: Tensor) -> Tensor:
    index, count = renumber(sequence)
    return rows.new_zeros(count, rows.shape[1]).index_add(0, index, rows)


def _constant(values: Tensor, noise: float) -> bool:
    spread = values.std(correction=0).item() if len(values) else 0.0
    return not spread > SIGNAL * noise


def _correlation(one: Tensor, *other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one, *other]))[0, 1].item() if other else 0.0
