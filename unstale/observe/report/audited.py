"""The report's section on the audit: how far the route's old_logp is from the true one.

A route is a method to compute old_logp. The true old_logp is computed with a full copy of the
version of the weights that sampled the token.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from unstale.durability.run_folder import Row
from unstale.observe.report.figures import density_axes, over_steps
from unstale.observe.report.gather import MAX_LAG, Gathered, by_lag
from unstale.observe.report.markup import figure, gap, render
from unstale.observe.report.plots import (
    Axis,
    Guides,
    Mark,
    Point,
    Series,
    Track,
    hex_plot,
    thin,
    track_plot,
)
from unstale.observe.report.words import NONE, amount, mapping, number, percent, records

MAX_ROUTES = 40
TITLE = "Audit of the old log-probabilities"


class Column(NamedTuple):
    """A column of the table of routes. A terminal shows only the columns with `brief`."""

    name: str
    about: str = ""
    brief: bool = True


COLUMNS = (
    Column("route"),
    Column(
        "error",
        "mean |prox - old_logp| over the action tokens, ± standard error (clustered by sequence)",
    ),
    Column(
        "of current", "the error divided by that of current_recompute on these tokens", brief=False
    ),
    Column("s", "staleness leak: share of log S that the approximation moves into log D"),
    Column("d", "discrepancy leak: share of log D that the approximation moves into log S"),
    Column(
        "correlation",
        "correlation of the approximate log D and log S; none if one of them is constant",
        brief=False,
    ),
    Column(
        "mask F1",
        "agreement on dropped tokens between the route and the true old_logp; none if neither "
        "drops a token, 0 if they drop no token in common",
    ),
    Column(
        "clip F1",
        "agreement on clipped tokens between the route and the true old_logp, as mask F1",
    ),
    Column("exact", "share of action tokens that the route marks as exact"),
    Column("worst exact", "largest error of a token that the route marks as exact", brief=False),
    Column("seconds", "time of the route, including the policy's forward pass where it is used"),
    Column("forward tokens", brief=False),
    Column("MB", "peak size of additional weights", brief=False),
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table of routes as text, with one entry for each of `COLUMNS`."""
    costs = mapping(row.get("costs"))
    forward_tokens = number(costs.get("forward_tokens"))
    memory_bytes = number(costs.get("memory_bytes"))
    return [
        str(row.get("route", NONE))[:80],
        _with_error(row, "logp_error_abs_mean", amount),
        _with_error(row, "error_ratio", _places),
        _with_error(row, "staleness_leak", _places),
        _with_error(row, "discrepancy_leak", _places),
        _places(number(row.get("log_d_log_s_corr"))),
        _agreement(row, "mask_f1"),
        _agreement(row, "clip_f1"),
        percent(number(row.get("exact_fraction")), 1),
        amount(number(row.get("claimed_error_max"))),
        amount(number(row.get("seconds"))),
        amount(forward_tokens),
        amount(None if memory_bytes is None else memory_bytes / 1e6),
    ]


def _places(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}".replace("-0.000", "0.000")


def _agreement(row: Mapping[str, Any], name: str) -> str:
    """Return an F1 as text. The audit records None if neither side has a token."""
    return "none" if name in row and row[name] is None else _places(number(row.get(name)))


def _with_error(row: Mapping[str, Any], name: str, show: Any) -> str:
    value, se = number(row.get(name)), number(row.get(f"{name}_se"))
    return show(value) + (f" ± {show(se)}" if value is not None and se is not None else "")


def audit(run: Gathered) -> Markup:
    """Return the section on the audit as HTML.

    Its first part has figures that the run measured for its own route during training. Its second
    part has the results of `unstale audit`, which scores the same tokens with all routes.
    """
    during = after = None
    if run.series("audit/tokens"):
        during = [_error_over_steps(run), _leaks_over_steps(run), _by_route_and_true(run)]
    if run.audit:
        after = _after(run)
    return render("audit.html", title=TITLE, columns=COLUMNS, during=during, after=after)


def _error_over_steps(run: Gathered) -> Markup:
    tokens, seconds = (
        sum(value for _, value in run.series(f"audit/{name}")) for name in ("tokens", "duration_s")
    )
    memory_bytes = max((value for _, value in run.series("audit/memory_bytes")), default=0.0)
    about = f"Mean |prox - old_logp| of a step's audited tokens: {tokens:,.0f} in all. The audit "
    about += f"took {amount(seconds)} s and {amount(memory_bytes / 1e6)} MB of copies."
    errors = thin(run.series("audit/logp_error_abs_mean"))
    noise = thin(run.series("audit/logp_noise_rms"))
    noise_key = "noise of another packing"
    lines = [Series(name="error", colour="trainer", points=errors, key=run.route)]
    lines.append(Series(name="noise", colour="wait", points=noise, key=noise_key))
    title = "Decomposition error over the run"
    missing = "No audited token could be scored by its version."
    return over_steps(run, title, about, lines, missing=missing) if errors else gap(title, missing)


def _leaks_over_steps(run: Gathered) -> Markup:
    lines = [
        Series(name=name, colour=colour, points=thin(run.series(f"audit/{name}")), key=key)
        for name, colour, key in (
            ("staleness_leak", "s", "s: staleness in D"),
            ("discrepancy_leak", "d", "d: discrepancy in S"),
        )
    ]
    values = [value for line in lines for _, value in line.points]
    return over_steps(
        run,
        "Leaks over the run",
        "Fitted over a moving window of audited tokens of lag 1 or more.",
        lines,
        missing="Too few audited tokens of lag 1 or more, or too small differences, to fit the "
        "leaks.",
        y=Axis(label="", low=min([-0.1, *values]), high=max([1.1, *values])),
    )


def _by_route_and_true(run: Gathered) -> Markup:
    title = "log D against log S, by the route and true"
    if len(run.audited) < 10:
        return gap(title, "No sample of audited tokens was recorded.")
    by_route = [(pair.by_route.log_d, pair.by_route.log_s) for pair in run.audited]
    true = [(pair.true.log_d, pair.true.log_s) for pair in run.audited]
    mask, clip = (_last_f1(run, threshold) for threshold in ("mask", "clip"))
    about = f"{len(by_route):,} audited tokens of all lags on common axes. Agreement between the "
    about += f"route and the true old_logp (F1 at the end of the run): dropped tokens {mask}, "
    about += f"clipped tokens {clip}."
    return figure(title, about, _facets([(run.route, by_route), ("true", true)]), class_="full")


def _last_f1(run: Gathered, threshold: str) -> str:
    values = run.series(f"audit/{threshold}_f1")
    return _places(values[-1][1]) if values else "none"


def _facets(clouds: Sequence[tuple[str, Sequence[Point]]]) -> Markup:
    """Return one density plot of log D against log S for each name, all with the same axes."""
    x, y = density_axes([point for _, cloud in clouds for point in cloud])
    zero = Guides(x=(0,), y=(0,))
    facets = [
        (name, hex_plot(cloud, x, y, label=f"log D and log S: {name}", guides=zero))
        for name, cloud in clouds
    ]
    return render("facets.html", facets=facets)


def _after(run: Gathered) -> dict[str, Any]:
    """Return the values for the second part: the table and the plots of `unstale audit`."""
    routes = records(run.audit.get("routes"), MAX_ROUTES)
    tokens, steps, noise = (
        amount(number(run.audit.get(name))) for name in ("tokens", "steps", "noise")
    )
    reasons = mapping(run.audit.get("not_built")).items()
    return {
        "about": f"{tokens} action tokens of {steps} recorded batches, scored by each route. "
        f"Numerical noise, measured with different packing: {noise}.",
        "rows": [cells(row) for row in routes],
        "not_built": "; ".join(f"{name}: {why}"[:300] for name, why in reasons),
        "figures": [_clouds(run, routes), _errors_by_lag(routes), _agreements(routes)],
    }


def _clouds(run: Gathered, routes: Sequence[Row]) -> Markup:
    title = "log D against log S, by route"
    clouds = [("true", list(_points(run.audit.get("points"))))]
    clouds += [(_route_name(row), list(_points(row.get("points")))) for row in routes]
    if not any(cloud for _, cloud in clouds):
        return gap(title, "No points were recorded.")
    about = "The same tokens on common axes. Points on a line mean that the route does not "
    about += "separate the two ratios."
    return figure(title, about, _facets(clouds), class_="full")


def _route_name(row: Row) -> str:
    return str(row.get("route", NONE))[:80]


def _points(columns: Any) -> Iterator[tuple[float, float]]:
    pair = [mapping(columns).get(name) for name in ("log_d", "log_s")]
    if all(isinstance(column, list) for column in pair):
        for log_d, log_s in zip(*pair, strict=False):
            x, y = number(log_d), number(log_s)
            if x is not None and y is not None:
                yield x, y


def _errors_by_lag(routes: Sequence[Row]) -> Markup:
    title = "Error by lag"
    tracks: list[Track] = []
    lags: set[int] = set()
    for row in routes:
        errors = by_lag(
            (lag, mapping(figures).get("error"))
            for lag, figures in mapping(row.get("by_lag")).items()
        )
        lags |= errors.keys()
        marks = [
            Mark(error, f"lag-{min(lag, 5)}", f"lag {lag}: {amount(error)}")
            for lag, error in errors.items()
        ]
        tracks.append(Track(_route_name(row), marks))
    values = [mark.value for track in tracks for mark in track.marks]
    if not values:
        return gap(title, "No error by lag was recorded.")
    x = Axis(label="mean |prox - old_logp|", low=0, high=1.06 * max(values) or 1.0)
    shown = sorted(lag for lag in lags if lag <= MAX_LAG)
    keys = [(f"lag-{min(lag, 5)}", f"lag {lag}") for lag in shown]
    plot = track_plot(tracks, x, label=title)
    return figure(title, "Versions between sampling and training.", plot, keys=keys)


def _agreements(routes: Sequence[Row]) -> Markup:
    title = "Mask and clip agreement"
    tracks = []
    for row in routes:
        marks = []
        for threshold, colour in (("mask", "d"), ("clip", "s")):
            f1 = number(row.get(f"{threshold}_f1"))
            if f1 is not None:
                marks.append(Mark(f1, colour, f"{threshold} F1 {_places(f1)}"))
        tracks.append(Track(_route_name(row), marks))
    if not any(track.marks for track in tracks):
        return gap(title, "No token was dropped or clipped, by any route or by the true old_logp.")
    about = "F1 of the dropped and clipped tokens: the route compared with the true old_logp."
    keys = [("d", "dropped by the band on D"), ("s", "clipped by the bound on S")]
    x = Axis(label="F1", low=0, high=1, show=partial(percent, digits=0))
    return figure(title, about, track_plot(tracks, x, label=title), keys=keys)
