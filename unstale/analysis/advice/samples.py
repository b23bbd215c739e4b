"""Compute the spread of D and S over a sample of trained tokens, and the tokens that thresholds
drop or clip.

    pi / mu  =  D * S,    log D = old_logp - behavior_logp,    log S = logp - old_logp

D is the discrepancy of trainer and engine, S the staleness ratio. A column is a float64 array
`[N]`, with one value per token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy
from numpy import ndarray

from unstale.config import RunConfig, Unit
from unstale.config.algorithm import Aggregate
from unstale.observe.statistics import wilson

Column = ndarray[Any, numpy.dtype[Any]]
MAX_DRAWN = 400_000
"""Approximate total number of tokens that `draw_sequences` draws."""
BLOCKS = 20
"""Largest number of blocks of successive steps over which a standard error is computed."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A sample of N tokens: arrays `[N]` of log D, log S, lag (staleness in versions) and optimizer
    step.
    """

    log_d: Column
    log_s: Column
    lag: Column
    step: Column

    @classmethod
    def of(cls, rows: list[tuple[float, float, float, float]]) -> "Factors":
        """Return the tokens of `rows`. A row is log D, log S, lag (staleness in versions) and
        step.
        """
        columns = numpy.array(rows, dtype=float).reshape(-1, 4).T
        return cls(*columns)

    @classmethod
    def join(cls, parts: "Sequence[Factors]") -> "Factors":
        """Join the tokens of several runs. Steps are renumbered, so that no two runs share a
        step.
        """
        last = max((part.step.max().item() for part in parts if len(part)), default=0.0)
        apart = [replace(part, step=part.step + i * (last + 1)) for i, part in enumerate(parts)]
        names = ("log_d", "log_s", "lag", "step")
        return cls(*(numpy.concatenate([getattr(part, name) for part in apart]) for name in names))

    def __len__(self) -> int:
        return len(self.log_d)

    @property
    def log_ratio(self) -> Column:
        """Array `[N]` of log(pi / mu) = log D + log S. It does not depend on `old_logp`."""
        return self.log_d + self.log_s

    def where(self, chosen: Column) -> "Factors":
        """Return the tokens for which the bool array `chosen` `[N]` is True."""
        return Factors(self.log_d[chosen], self.log_s[chosen], self.lag[chosen], self.step[chosen])


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations over tokens of log D, log S and log(pi / mu), and figures that compare
    them.

    D = pi_old / mu is the discrepancy of trainer and engine, and S = pi / pi_old the staleness
    ratio.
    """

    log_d: float
    log_s: float
    log_ratio: float
    correlation: float | None
    """Correlation of log D = old_logp - behavior_logp and log S = logp - old_logp over tokens. None
    if one of them is constant.
    """
    d_share: float | None
    """var log D / (var log D + var log S). None if both are constant."""
    d_share_se: float | None
    """Standard error of `d_share`. None if it cannot be estimated, as with fewer than three
    steps.
    """


def spread(factors: Factors) -> Spread:
    """Return how log D and log S vary over the tokens, and the share of D in the variance.

        var log(pi / mu)  =  var log D + var log S + 2 cov

    The share leaves out the covariance, which belongs to neither. Its standard error is a jackknife
    over blocks of steps, because the tokens of a step are not independent.

    >>> rows = [(0.3, 0.0, 1, 1), (-0.3, 0.0, 1, 1), (0.0, 0.1, 1, 2), (0.0, -0.1, 1, 2)]
    >>> round(spread(Factors.of(rows)).d_share, 3)
    0.9
    """
    share = _d_share(factors)
    constant = min(factors.log_d.std(), factors.log_s.std()) == 0
    correlation = None if constant else numpy.corrcoef(factors.log_d, factors.log_s)[0, 1].item()
    return Spread(
        log_d=factors.log_d.std().item(),
        log_s=factors.log_s.std().item(),
        log_ratio=factors.log_ratio.std().item(),
        correlation=correlation,
        d_share=share,
        d_share_se=None if share is None else _jackknife(factors, _d_share),
    )


def _d_share(factors: Factors) -> float | None:
    of_d, of_s = factors.log_d.var().item(), factors.log_s.var().item()
    return of_d / (of_d + of_s) if of_d + of_s > 0 else None


def _jackknife(factors: Factors, figure: Callable[[Factors], float | None]) -> float | None:
    """Return the jackknife standard error of `figure`, computed without one block of steps at a
    time.

    None with fewer than three steps, or if `figure` is None without one of the blocks.
    """
    steps = numpy.unique(factors.step)
    count = min(BLOCKS, len(steps))
    if count < 3:
        return None
    values = [
        figure(factors.where(~numpy.isin(factors.step, block)))
        for block in numpy.array_split(steps, count)
    ]
    known = numpy.array([value for value in values if value is not None])
    if len(known) < count:
        return None
    return math.sqrt((count - 1) / count * ((known - known.mean()) ** 2).sum())


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean numbers of sampled tokens in a sequence and in a turn."""

    sequence: float = 1.0
    turn: float = 1.0

    def of(self, unit: Unit) -> int:
        """Return the number of tokens of a token, turn, segment or sequence. A segment counts as a
        turn.
        """
        tokens = {"token": 1.0, "sequence": self.sequence}.get(unit, self.turn)
        return max(1, round(tokens))


@dataclass(frozen=True, slots=True)
class Limit:
    """A range of the log ratio of a unit: a token, turn or sequence. The ratio is D (pi_old / mu)
    or S (pi / pi_old).

    `low` and `high` are in nats. `tokens` is the length of a unit, and `how` the way in which the
    log ratios of its tokens are aggregated.
    """

    low: float
    high: float
    tokens: int = 1
    how: Aggregate = "mean"
    unit: Unit = "token"

    @property
    def narrowest(self) -> float:
        """The distance from 0 to the nearer end of the range, in nats."""
        return min(abs(self.low), abs(self.high))

    def outside(self, log_ratio: Column) -> Column:
        """Return a bool array `[U, n]`, True for tokens whose unit has a log ratio outside the
        range.

        `log_ratio` `[U, n]` has a sequence in each row.
        """
        log_ratio = self.of_units(log_ratio)
        return (log_ratio < self.low) | (log_ratio > self.high)

    def of_units(self, log_ratio: Column) -> Column:
        """Return for each token the log ratio of its unit, `[U, n]`.

        `log_ratio` `[U, n]` has a sequence in each row. A sequence is divided into units of
        `tokens` tokens. The last unit may be shorter.
        """
        if self.tokens == 1:
            return log_ratio
        starts = numpy.arange(0, log_ratio.shape[1], self.tokens)
        sizes = numpy.diff([*starts, log_ratio.shape[1]])
        return numpy.repeat(self._aggregate(log_ratio, starts, sizes), sizes, axis=1)

    def _aggregate(self, rows: Column, starts: Column, sizes: Column) -> Column:
        if self.how == "max":
            high = numpy.maximum.reduceat(rows, starts, axis=1)
            low = numpy.minimum.reduceat(rows, starts, axis=1)
            return numpy.where(high >= -low, high, low)
        total = numpy.add.reduceat(rows, starts, axis=1)
        return total if self.how == "sum" else total / sizes


def is_of_tokens(limit: Limit | None) -> TypeGuard[Limit]:
    """Return True if `limit` is a range of the ratio of single tokens. False for None."""
    return limit is not None and limit.tokens == 1


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The ranges of log D and log S outside which a token gets no gradient.

    Log D is old_logp - behavior_logp, and log S is logp - old_logp.
    """

    band: Limit | None
    """The range of log D = old_logp - behavior_logp outside which the correction drops a token.
    None if the correction drops none.
    """
    clip: Limit | None
    """The range of log S = logp - old_logp outside which the objective stops a token. The sign of
    its advantage, on which a clip of PPO depends, is ignored. None if the objective stops no token.
    """

    @classmethod
    def of(cls, config: RunConfig, lengths: Lengths) -> "Thresholds":
        rule, objective = config.correction, config.objective
        band = clip = None
        if rule.mode in ("mask", "mask_weight"):
            low, high = _log(rule.low), _log(rule.high)
            band = Limit(low, high, lengths.of(rule.unit), rule.aggregate, rule.unit)
        if objective.stops and objective.bounds():
            first = objective.bounds()[0]
            unit = objective.ratio_unit
            ends = _log(first.low), _log(first.high)
            clip = Limit(*ends, lengths.of(unit), objective.ratio_aggregate, unit)
        return cls(band, clip)

    @property
    def limits(self) -> list[Limit]:
        return [limit for limit in (self.band, self.clip) if limit is not None]

    @property
    def nearest(self) -> Limit | None:
        """Return the limit of `band` and `clip` that is nearest to 0 (a ratio of 1). None without
        either.
        """
        limits = (each for each in self.limits if each.narrowest > 0)
        return min(limits, key=lambda limit: limit.narrowest, default=None)

    @property
    def tokens(self) -> int:
        """The number of tokens in the unit (token, turn or sequence) of `band` or of `clip`, the
        larger.
        """
        return max((limit.tokens for limit in self.limits), default=1)

    def dropped(self, factors: Factors, rows: Column) -> Column:
        """Return True for tokens whose log D is outside `band`.

        `rows` `[U, n]` has the indices in `factors` of the n tokens of U sequences. The result is a
        bool array of the same shape.
        """
        inside = numpy.zeros(rows.shape, dtype=bool)
        return inside if self.band is None else self.band.outside(factors.log_d[rows])

    def clipped(self, factors: Factors, rows: Column) -> Column:
        """Return True for tokens whose log S is outside `clip`.

        `rows` `[U, n]` has the indices in `factors` of the n tokens of U sequences. The result is a
        bool array of the same shape.
        """
        inside = numpy.zeros(rows.shape, dtype=bool)
        return inside if self.clip is None else self.clip.outside(factors.log_s[rows])

    def stopped(self, factors: Factors, rows: Column) -> Column:
        """Return True for tokens whose log D is outside `band` or whose log S is outside `clip`.

        `rows` `[U, n]` has the indices in `factors` of the n tokens of U sequences. The result is a
        bool array of the same shape.
        """
        return self.dropped(factors, rows) | self.clipped(factors, rows)


def draw_sequences(factors: Factors, tokens: int) -> Column:
    """Return U sequences drawn from the sample, as indices `[U, tokens]` in `factors`.

    The journal has single tokens. So for a threshold on the ratio of several tokens, sequences are
    made of tokens of one step, drawn with replacement. Their tokens are independent, which real
    ones are only in part. Equal samples give equal draws. With `tokens` = 1 the result is every
    token once, `[N, 1]`.
    """
    if tokens == 1:
        return numpy.arange(len(factors))[:, None]
    rng = numpy.random.default_rng(0)
    order = numpy.argsort(factors.step, kind="stable")
    _, starts, counts = numpy.unique(factors.step[order], return_index=True, return_counts=True)
    number = min(4000, max(200, MAX_DRAWN // tokens))
    chosen = rng.choice(len(counts), size=number, p=counts / counts.sum())
    places = (rng.random((number, tokens)) * counts[chosen, None]).astype(int)
    return order[starts[chosen, None] + places]


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def is_computable(config: RunConfig) -> bool:
    """Return True if log S of a token follows from only its pi / mu and lag (staleness in
    versions).

    This is so if the run's route (way to get `old_logp`) mixes the policies pi and mu. With several
    minibatches, the journal has the pi after some of the batch's optimizer steps. The route must
    then mix this pi, or use only mu.
    """
    old = config.old_logps
    needs = old.needs
    if config.trainer.steps_per_batch > 1 and not needs.inline:
        return old.weight_of_now(config) == 0
    models = needs.averages or needs.resident_models or needs.own_process or needs.snapshots
    return not old.partly_exact and not models


def factors_of_route(config: RunConfig, true: Factors) -> Factors:
    """Return the tokens `true`, with the log D and log S that the route of `config` would give
    them.

    The route (way to get `old_logp`) must satisfy `is_computable`. `true` has the exact log D and
    log S. The ratios are those before the first optimizer step on the batch.
    """
    ratio = true.log_ratio
    log_s = numpy.zeros(len(true))
    for lag in numpy.unique(true.lag).astype(int).tolist():
        schedule = replace(config.schedule, max_staleness=lag, lookahead_window=1)
        oldest = replace(config, schedule=schedule)
        if config.old_logps.weight_of_now(oldest) == 1:
            continue  # the old policy is the current one, so log S is 0
        of_lag = true.lag == lag
        log_s[of_lag] = [
            math.log(config.old_logps.s_of(math.exp(value), oldest))
            for value in ratio[of_lag].clip(-20, 20).tolist()
        ]
    return replace(true, log_d=ratio - log_s, log_s=log_s)


@dataclass(frozen=True, slots=True)
class Difference:
    """The share of tokens that thresholds stop with only one of two values of `old_logp`."""

    share: float
    passed: float
    """Share of tokens that are stopped with the reference values of `old_logp`, and pass with the
    other values.
    """
    effective: int
    """Number of independent tokens or sequences, from which `interval` is computed."""

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends of the 95% confidence interval of `share`."""
        return wilson(self.share, self.effective) if self.effective else (0.0, 1.0)


def difference(reference: Column, other: Column, *, effective: int) -> Difference:
    """Return the share of tokens that are stopped with only one of two values of `old_logp`.

    `reference` and `other` are bool arrays of equal shape, True for a stopped token. `effective` is
    the number of tokens or sequences among them that are independent.
    """
    return Difference(
        share=(reference != other).mean().item(),
        passed=(reference & ~other).mean().item(),
        effective=effective,
    )
