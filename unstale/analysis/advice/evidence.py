"""Collect from a run folder the figures on which advice about its route is based.

A route is a method to obtain old log-probabilities. The run folder is only read. A figure that
cannot be computed from it is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy

from unstale.analysis.advice.measured import (
    known,
    of_audit,
    of_costs,
    of_learning,
    of_metrics,
    of_moments,
    read_lengths,
)
from unstale.analysis.advice.samples import (
    BLOCKS,
    Difference,
    Factors,
    Lengths,
    Thresholds,
    difference,
    draw_sequences,
    factors_of_route,
    is_computable,
    spread,
)
from unstale.analysis.report.compare import ended
from unstale.config import ConfigError, OldLogpsConfig, RunConfig
from unstale.config.options import stored_config
from unstale.config.routes import routes
from unstale.durability.run_folder import AUDIT, METRICS, Row, RunFolder
from unstale.observe.run_rows import step_of
from unstale.observe.words import mapping, number
from unstale.records import nearest_rank

Source = Literal["exact", "audited", "replayed", "lag 0", "moments", "none"]
"""The source of the figures on D = pi_old / mu and S = pi / pi_old. `exact`: the journal of a run
whose `old_logp` is exact. `audited`: the audit during training. `replayed`: the command `unstale
audit`. `lag 0`: tokens without staleness, whose pi / mu is D. `moments`: variances estimated from
metrics. `none`: the run has no source.
"""
SOURCES: Mapping[Source, str] = {
    "exact": "the route's exact values, in the journal",
    "audited": "the audit's exact values, in the journal",
    "replayed": "the exact values of `unstale audit`",
    "lag 0": "pi / mu of tokens of lag 0, which contains no staleness",
    "moments": "the divergences in the metrics, because there is no sample of tokens",
    "none": "nothing in this run",
}
FIGURES = {
    "steps": ("", "optimizer steps read"),
    "tokens": ("", "action tokens trained on"),
    "sample_tokens": ("", "tokens in the sample"),
    "staleness_mean": ("versions", "mean staleness of a token"),
    "staleness_max": ("versions", "largest staleness of a token"),
    "log_d_sd": ("nats", "standard deviation of log D"),
    "log_s_sd": ("nats", "standard deviation of log S"),
    "log_ratio_sd": ("nats", "standard deviation of log(pi / mu)"),
    "log_d_log_s_corr": ("", "correlation of log D and log S"),
    "d_variance_share": ("share", "part of D in the variances of log D and log S"),
    "d_variance_share_se": ("share", "its standard error"),
    "log_d_abs_p99": ("nats", "99% of tokens have abs(log D) below"),
    "log_d_abs_p999": ("nats", "99.9% of tokens have abs(log D) below"),
    "log_s_abs_p99": ("nats", "99% of tokens have abs(log S) below"),
    "log_s_abs_p999": ("nats", "99.9% of tokens have abs(log S) below"),
    "nearest_threshold": ("nats", "distance of the nearest threshold from 1, as a logarithm"),
    "unit_tokens": ("", "tokens in the largest unit (sequence, turn) of a threshold"),
    "log_d_unit_sd": ("nats", "standard deviation of log D of the nearest threshold's unit"),
    "log_s_unit_sd": ("nats", "standard deviation of log S of the nearest threshold's unit"),
    "log_d_unit_abs_p99": ("nats", "99% of the band's units have abs(log D) below"),
    "log_s_unit_abs_p99": ("nats", "99% of the clip's units have abs(log S) below"),
    "band_share": ("share", "tokens with D outside the band"),
    "clip_outside_share": ("share", "tokens with S outside the clip"),
    "stopped_share": ("share", "tokens that band or clip would stop by the exact values"),
    "kept_share": ("share", "tokens that the correction kept, in the metrics"),
    "clip_share": ("share", "tokens that the clip stopped, in the metrics"),
    "exact_share": ("share", "tokens whose old log-probability is exact"),
    "changed_by_route": ("share", "tokens that this route treats differently from exact values"),
    "changed_by_route_low": ("share", "its 95% interval, from"),
    "changed_by_route_high": ("share", "its 95% interval, to"),
    "passed_by_route": ("share", "tokens that exact values would stop and this route passes"),
    "audit_tokens": ("", "tokens of the audit"),
    "audit_error": ("nats", "mean error of this route's old log-probability"),
    "audit_noise": ("nats", "change of a log-probability by another packing"),
    "staleness_leak": ("share", "part of log S that the route counts as D"),
    "discrepancy_leak": ("share", "part of log D that the route counts as S"),
    "mask_f1": ("", "agreement (F1) of dropped tokens with exact values"),
    "clip_f1": ("", "agreement (F1) of clipped tokens with exact values"),
    "equal_rewards_share": ("share", "groups whose rewards are all equal, in the last half"),
    "cut_off_share": ("share", "episodes that a limit cut off, in the last half"),
    "reward_share": ("share", "mean reward of an episode, in the last half"),
    "ratio_ess_share": ("share", "effective sample size of pi / mu, in the last half"),
    "entropy_left": ("share", "entropy at the end, as a part of that at the start"),
    "replay_clip_share": ("share", "replayed tokens that the clip stopped, in the last half"),
    "signal_share": ("share", "squared gradient that is not noise (outer_step), in the last half"),
    "step_s": ("s", "time of a step"),
    "route_s": ("s", "time of the route in a step"),
    "route_share": ("share", "part of the step that the route takes"),
    "wait_s": ("s", "time in a step that the trainer waits for episodes"),
    "update_s": ("s", "time of forward and backward passes in a step"),
    "versions_per_episode": ("", "versions that sampled an episode, on average"),
    "scoring_s": ("s", "time to score a batch exactly in the trainer"),
    "live_versions": ("", "versions whose tokens wait for training, at most"),
    "route_mb": ("MB", "memory of the route's weights and differences, at most"),
}
"""Name of a figure -> its unit and meaning. Names `changed/ROUTE` are not listed: the share of
tokens that thresholds stop only with the route ROUTE (a way to get `old_logp`), or only with exact
values.
"""

Row4 = tuple[float, float, float, float]
"""A token: log D = old_logp - behavior_logp, log S = logp - old_logp, lag (its staleness in
versions) and optimizer step.
"""

MAX_TOKENS = 200_000
"""Approximate largest number of tokens kept of a sample from the journal."""
MIN_LAG_0 = 100
"""Smallest number of tokens without staleness (lag 0) from which the standard deviation of log D =
old_logp - behavior_logp is estimated.
"""
MIN_OF_BLOCK = 100
"""Smallest number of tokens in a block. The tokens in `audit.json` do not name their step, so
standard errors are computed over blocks of successive tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts about a run that the advice uses: its configuration, and its figures by name (see
    `FIGURES`).
    """

    folder: str
    """The path of the run folder, as given to `gather_evidence`."""
    state: str
    """`finished`, `failed` or `unfinished`."""
    config: RunConfig
    figures: Mapping[str, float]
    source: Source = "none"
    lengths: Lengths = field(default_factory=Lengths)
    is_moe: bool = False
    gaps: Sequence[str] = field(default_factory=tuple)

    def get(self, name: str) -> float | None:
        return self.figures.get(name)

    @property
    def run(self) -> str:
        return Path(self.folder).resolve().name

    @property
    def limits(self) -> Thresholds:
        return Thresholds.of(self.config, self.lengths)

    @property
    def route(self) -> str:
        return self.config.old_logps.route


def gather_evidence(path: Path) -> Evidence:
    """Read the run folder `path`: its configuration, and the figures that advice is based on.

    The run may be in progress, killed or failed. Raises `ConfigError` if the folder has no run, or
    no readable configuration.
    """
    folder = RunFolder(path)
    stored = folder.config()
    if not stored:
        raise ConfigError(
            f"{path} has no readable config.json, which names the route and its thresholds"
        )
    config = stored_config(stored, str(path / "config.json"))
    rows = sorted(
        (row for row in folder.rows(METRICS) if number(row.get("step")) is not None), key=step_of
    )
    trained = [row for row in rows if step_of(row) > 0]
    sample = read_sample(folder)
    lengths = read_lengths(trained)
    replayed = folder.read_object(AUDIT)
    source, truth, present = _truth(config, sample, replayed)
    figures = {
        **of_metrics(trained),
        **of_learning(trained),
        **of_audit(trained, replayed, config.old_logps),
        **of_costs(config, trained, sample.versions_per_episode),
        **(of_moments(trained) if config.old_logps.exact and not len(sample.tokens) else {}),
        **of_sample(config, truth, present, lengths=lengths, source=source),
    }
    if source == "none" and "d_variance_share" in figures:
        source = "moments"
    return Evidence(
        folder=str(path),
        state=ended(path)[0],
        config=config,
        figures=figures,
        source=source,
        lengths=lengths,
        is_moe=any("trainer/packing_noise" in row for row in rows),
        gaps=tuple(folder.gaps),
    )


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sample of a run's trained tokens from its journal: log D = old_logp - behavior_logp and
    log S = logp - old_logp of each.
    """

    tokens: Factors
    """Tokens that no audit scored. Their D = pi_old / mu and S = pi / pi_old are computed from the
    run's own `old_logp`.
    """
    audited: Factors
    """Tokens that the audit scored. Their D = pi_old / mu and S = pi / pi_old are computed from its
    exact `old_logp`.
    """
    audited_by_route: Factors
    """The tokens of `audited`, with D = pi_old / mu and S = pi / pi_old computed from the run's own
    `old_logp`.
    """
    versions_per_episode: float | None = None
    """Mean number of weight versions that sampled an episode. None without a journal."""


def read_sample(folder: RunFolder) -> TokenSample:
    """Read the sample of trained tokens from a run's journal.

    If the journal is missing or damaged, the sample is empty and `folder.gaps` says why.
    """
    from unstale.durability.journal import JOURNAL, Journal, JournalError  # this imports torch

    tokens: list[Row4] = []
    audited: list[Row4] = []
    by_route: list[Row4] = []
    versions = None
    if not folder.holds(JOURNAL):
        folder.add_gap(f"{JOURNAL} is missing")
        return TokenSample(Factors.of([]), Factors.of([]), Factors.of([]))
    try:
        with Journal.read(folder.path) as journal:
            ((versions,),) = journal.rows(
                "SELECT avg(n) FROM (SELECT count(DISTINCT version) AS n FROM pieces "
                "WHERE version IS NOT NULL GROUP BY episode)"
            )
            for row in journal.token_samples():
                by = _numbers(row, ("log_d", "log_s", "lag", "step"))
                true = _numbers(row, ("true_log_d", "true_log_s", "lag", "step"))
                if by and by[2] >= 0:
                    if true:
                        audited.append(true)
                        by_route.append(by)
                    else:
                        tokens.append(by)
    except (JournalError, OSError) as error:
        folder.add_gap(f"the sample of tokens is incomplete: {error}")
    return TokenSample(
        Factors.of(_thinned(tokens)),
        Factors.of(_thinned(audited)),
        Factors.of(_thinned(by_route)),
        number(versions),
    )


def _thinned(rows: list[Row4]) -> list[Row4]:
    """Return about `MAX_TOKENS` evenly spaced rows, or all rows if there are fewer."""
    return rows[:: max(1, len(rows) // MAX_TOKENS)]


def _numbers(row: Mapping[str, Any], names: Sequence[str]) -> Row4 | None:
    """Return the values of `row` for the four keys `names`. None unless all are numbers."""
    values = [value for name in names if (value := number(row.get(name))) is not None]
    return (values[0], values[1], values[2], values[3]) if len(values) == 4 else None


def _truth(
    config: RunConfig, sample: TokenSample, replayed: Row
) -> tuple[Source, Factors, Factors | None]:
    """Return the source of exact `old_logp`, tokens with exact D and S, and tokens with the D and S
    that the run used.

    The third is None if the D and S that the run used are not known.
    """
    if config.old_logps.exact and len(sample.tokens):
        return "exact", sample.tokens, sample.tokens
    if len(sample.audited):
        return "audited", sample.audited, sample.audited_by_route
    points = mapping(replayed.get("points"))
    columns: dict[str, Any] = {name: points.get(name) for name in ("log_d", "log_s", "lag")}
    if all(isinstance(column, list) and column for column in columns.values()):
        length = min(len(column) for column in columns.values())
        blocks = min(BLOCKS, max(1, length // MIN_OF_BLOCK))  # they take the place of steps
        columns["step"] = [at * blocks // length for at in range(length)]
        rows = (
            _numbers({name: column[at] for name, column in columns.items()}, list(columns))
            for at in range(length)
        )
        true = Factors.of([row for row in rows if row])
        by_route = factors_of_route(config, true) if is_computable(config) else None
        return "replayed", true, by_route
    fresh = sample.tokens.where(sample.tokens.lag == 0)
    if config.trainer.steps_per_batch == 1 and len(fresh) >= MIN_LAG_0:
        return "lag 0", replace(fresh, log_d=fresh.log_ratio, log_s=0 * fresh.log_s), sample.tokens
    return "none", sample.tokens.where(sample.tokens.lag < 0), None


def of_sample(
    config: RunConfig,
    true: Factors,
    present: Factors | None,
    *,
    lengths: Lengths,
    source: Source = "exact",
) -> dict[str, float]:
    """Return the figures of a sample of tokens, named as in `FIGURES`.

    `true` has their exact log D = old_logp - behavior_logp and log S = logp - old_logp. `present`
    has those that the run used, or is None. With the source `lag 0`, `true` has only tokens without
    staleness, and only log D of them; `present` has pi / mu of all tokens. `lengths` are the mean
    lengths of sequences and turns in tokens.
    """
    if not len(true):
        return {}
    figures = {"sample_tokens": float(len(true)), **_sizes("log_d_abs", true.log_d)}
    if source == "lag 0":
        assert present is not None
        whole = present.log_ratio.std().item()
        figures |= {"log_d_sd": true.log_d.std().item(), "log_ratio_sd": whole}
        if whole > 0:
            figures["d_variance_share"] = min(1.0, (figures["log_d_sd"] / whole) ** 2)
        return figures
    divided = spread(true)
    figures |= _sizes("log_s_abs", true.log_s) | known(
        log_d_sd=divided.log_d,
        log_s_sd=divided.log_s,
        log_ratio_sd=divided.log_ratio,
        log_d_log_s_corr=divided.correlation,
        d_variance_share=divided.d_share,
        d_variance_share_se=divided.d_share_se,
    )
    return figures | _of_decisions(config, true, present, lengths)


def _of_decisions(
    config: RunConfig, true: Factors, present: Factors | None, lengths: Lengths
) -> dict[str, float]:
    """Return the shares of tokens that thresholds stop by exact D and S.

    Also return, for each route (a way to get `old_logp`), the share of tokens that thresholds would
    stop or pass differently with that route's D and S.
    """
    limits = Thresholds.of(config, lengths)
    # `rollout` has no correction; with any other route the run's own is kept.
    exact = config if config.old_logps.exact else with_route(config, "snapshot_old")
    by_exact = Thresholds.of(exact, lengths)
    tokens = max(limits.tokens, by_exact.tokens)
    rows = draw_sequences(true, tokens)
    effective = max(1, len(true) // tokens)
    near = by_exact.nearest
    figures = known(
        nearest_threshold=None if near is None else near.narrowest,
        unit_tokens=float(tokens) if tokens > 1 else None,
    )
    for name, column, limit in (
        ("log_d_unit", true.log_d, by_exact.band),
        ("log_s_unit", true.log_s, by_exact.clip),
    ):
        if near is not None and near.tokens > 1:
            figures[f"{name}_sd"] = near.of_units(column[rows]).std().item()
        if limit is not None and limit.tokens > 1:
            sizes = _sizes("units", limit.of_units(column[rows]).ravel())
            figures[f"{name}_abs_p99"] = sizes["units_p99"]
    if limits.band is not None:
        figures["band_share"] = limits.dropped(true, rows).mean().item()
    if limits.clip is not None:
        figures["clip_outside_share"] = limits.clipped(true, rows).mean().item()
    reference = by_exact.stopped(true, rows)
    figures["stopped_share"] = reference.mean().item()
    for name in routes():
        other = with_route(exact, name)
        if by_exact.clip is not None and is_computable(other):
            decided = Thresholds.of(other, lengths).stopped(factors_of_route(other, true), rows)
            changed = difference(reference, decided, effective=effective)
            figures |= _changes(f"changed/{name}", changed)
    if present is not None and not config.old_logps.exact:
        changed = difference(reference, limits.stopped(present, rows), effective=effective)
        figures |= _changes("changed_by_route", changed)
        figures["passed_by_route"] = changed.passed
    return figures


def with_route(config: RunConfig, name: str) -> RunConfig:
    """Return `config` with the route `name`, a way to get `old_logp`, and its default options.

    The mode of correction that this route requires is set. A mode that only the previous route
    required returns to the default.
    """
    if name == config.old_logps.route:
        return config
    correction = config.correction
    lacks = routes()[config.old_logps.route].requires
    if lacks.get("correction.mode") == correction.mode:
        correction = type(correction)()
    required = routes()[name].requires.get("correction.mode")
    if required is not None:
        correction = type(correction)(mode=required)
    # `baseline` only silences the linter, and does not change a ratio
    old = OldLogpsConfig(route=name, baseline=True)
    return replace(config, old_logps=old, correction=correction)


def _changes(name: str, changed: Difference) -> dict[str, float]:
    low, high = changed.interval
    return {name: changed.share, f"{name}_low": low, f"{name}_high": high}


def _sizes(name: str, log_ratio: "numpy.ndarray") -> dict[str, float]:
    """Return the 99th percentile of |`log_ratio`| as `NAME_p99`, and the 99.9th as `NAME_p999`."""
    ordered = numpy.sort(numpy.abs(log_ratio))
    return {
        f"{name}_p99": ordered[nearest_rank(len(ordered), 0.99)].item(),
        f"{name}_p999": ordered[nearest_rank(len(ordered), 0.999)].item(),
    }
