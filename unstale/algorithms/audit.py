"""Measure the errors of approximate old log-probabilities against the true ones.

    true values:            log D     = old_logp - behavior_logp,    log S     = logp - old_logp
    with `prox` instead:    log D_hat = prox - behavior_logp,        log S_hat = logp - prox

Here `prox` is the approximation. docs/old-logps.md has results. All tensors have one shape: packed
`[T]`, or padded `[B, T]` with a mask. An estimate is None if the data are too few or vary too
little. Tokens of one sequence have correlated errors, so standard errors treat each sequence as one
cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.corrections import renumber

MIN_TOKENS = 100
"""Smallest number of tokens to which `leaks` fits the shares of log S and log D that an
approximation puts into the wrong ratio.
"""
SIGNAL = 10.0
"""A log-ratio is treated as constant if its standard deviation is less than this many times the
numerical noise.
"""
ALIKE = 0.9999
"""Largest correlation of log S and log D with which `leaks` fits both together. It could not
separate the effects of more correlated log-ratios.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Log-probabilities of a batch for the audit, taken before the step's first update."""

    prox: Float[Tensor, "*shape"]
    """The approximation of `old_logp` that is audited."""
    old_logp: Float[Tensor, "*shape"]
    """The true old log-probability: the trainer's, with the weights that sampled the token."""
    logp: Float[Tensor, "*shape"]
    behavior_logp: Float[Tensor, "*shape"]
    lag: Int[Tensor, "*shape"]
    """Number of batches that were trained on between sampling the token and training on it."""
    sequence: Int[Tensor, "*shape"]
    sampled: Bool[Tensor, "*shape"]
    """True for sampled tokens whose true `old_logp` is known. All other tokens are ignored."""

    def flat(self) -> "Tokens":
        """Return only the tokens to compare: tensors `[N]`, log-probabilities in float64."""
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
    """An estimate, its standard error, and the number of tokens that the estimate is based on.

    The standard error is None if there are too few sequences.
    """

    value: float
    se: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Leaks:
    """The shares of log S and log D that an approximation of `old_logp` puts into the wrong ratio.

    The true ratios are S = pi / pi_old (staleness) and D = pi_old / mu (discrepancy). The
    approximation gives S_hat and D_hat. `staleness` is the share of log S that log D_hat contains.
    `discrepancy` is the share of log D that log S_hat contains. A share is None if there are too
    few tokens, or if the log-ratio varies too little.
    """

    staleness: Estimate | None
    discrepancy: Estimate | None


def decomposition_error(tokens: Tokens) -> Estimate | None:
    """Return the mean of |prox - old_logp| over the sampled tokens.

    This is the error of both approximate log-ratios, log D_hat and log S_hat. None without tokens.
    """
    flat = tokens.flat()
    return _ratio(flat.error.abs(), torch.ones_like(flat.error), flat.sequence)


def error_by_lag(tokens: Tokens) -> dict[int, Estimate]:
    """Return the mean absolute error of the approximated `old_logp`, by the lag of the tokens."""
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

    None if the error of `other` is 0. The standard error is that of a ratio of paired values (delta
    method): tokens that are difficult for both approximations do not increase it. Raises ValueError
    if the numbers of tokens differ.
    """
    above = one.flat()
    below = other.flat()
    if len(above) != len(below):
        raise ValueError(
            f"a ratio needs the same tokens on both sides, got {len(above)} and {len(below)}"
        )
    return _ratio(above.error.abs(), below.error.abs(), above.sequence)


def leaks(tokens: Tokens, *, noise: float = 0.0) -> Leaks:
    """Fit the staleness leak s and the discrepancy leak d on the tokens of lag 1 or more.

    A leak is the share of a true log-ratio that the approximation `prox` puts into the other one.
    The fit is by least squares with an intercept:

        prox - old_logp = s * log S - d * log D

    `(s, d)` is (0, 0) for exact values, (0, 1) for the route `rollout`, (1, 0) for
    `current_recompute`, and (alpha, 1 - alpha) for log-linear interpolation with a constant alpha.
    `noise` is the standard deviation of `old_logp` between two ways of packing the same tokens. A
    log-ratio that varies by less than `SIGNAL * noise` is left out of the fit, and its leak is
    None. With fewer than `MIN_TOKENS` tokens both leaks are None.
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

    They are `prox - behavior_logp` and `logp - prox`. The correlation is +1 for log-linear
    interpolation with a constant 0 < alpha < 1. None if a log-ratio is constant, as for the routes
    `rollout` and `current_recompute`, and for alpha 0 or 1.
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
    """Return the F1 score of the decisions of a threshold on approximate ratios.

    `with_prox` marks the tokens that the threshold drops or clips by the approximate ratios, and
    `with_truth` those by the true ratios. Most tokens are in neither set and are not counted,
    because their agreement would hide every difference. None if both sets are empty.

    >>> a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    >>> agreement(a, b, sampled=torch.ones(4, dtype=torch.bool))
    0.5
    """
    by_prox = with_prox & sampled
    by_truth = with_truth & sampled
    total = int(by_prox.sum()) + int(by_truth.sum())
    return 2 * int((by_prox & by_truth).sum()) / total if total else None


def join(parts: Sequence[Tokens]) -> Tokens:
    """Return the sampled tokens of several batches, one batch after another, `[N]`.

    Sequences of different batches get different numbers.
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
    """Return sum(above) / sum(below) with its standard error. Each sequence is one cluster."""
    total = below.sum()
    if not total > 0:
        return None
    ratio = above.sum() / total
    residuals = _by_sequence((above - ratio * below)[:, None], sequence)
    count = len(residuals)
    se = (residuals.square().sum() * count / (count - 1)).sqrt() / total if count > 1 else None
    return Estimate(ratio.item(), None if se is None else se.item(), len(above))


def _by_sequence(rows: Tensor, sequence: Tensor) -> Tensor:
    """Add up the rows (one per token) of each sequence."""
    index, count = renumber(sequence)
    return rows.new_zeros(count, rows.shape[1]).index_add(0, index, rows)


def _constant(values: Tensor, noise: float) -> bool:
    spread = values.std(correction=0).item() if len(values) else 0.0
    return not spread > SIGNAL * noise


def _correlation(one: Tensor, *other: Tensor) -> float:
    """Return the correlation of two columns, or 0 if only one is given."""
    return torch.corrcoef(torch.stack([one, *other]))[0, 1].item() if other else 0.0
