"""The report's section on the audit: what was measured inside training, and every route on the run's own tokens."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from unstale.durability.run_folder import Row
from unstale.observe.report.figures import figure, gap, reach, steps_axis
from unstale.observe.report.gather import MAX_LAG, Gathered, by_lag
from unstale.observe.report.markup import Markup, el
from unstale.observe.report.plots import (
    Axis,
    Guides,
    Mark,
    Series,
    hex_plot,
    legend,
    line_plot,
    thin,
    track_plot,
)
from unstale.observe.report.sections import section
from unstale.observe.report.words import NONE, amount, number, percent

MAX_ROUTES = 40
TITLE = "What the old logit really was"


class Column(NamedTuple):
    """Of the table of routes."""

    name: str
    about: str = ""
    brief: bool = True
    """Shown where there is little room, too."""


COLUMNS = (
    Column("route"),
    Column(
        "error",
        "mean |prox - old_logp| over the action tokens, ± standard error (sequences are clusters)",
    ),
    Column(
        "of current", "that error over the one of current_recompute on the same tokens", brief=False
    ),
    Column("s", "staleness leak: share of log S that the stand-in carries into log D"),
    Column("d", "discrepancy leak: share of log D that the stand-in carries into log S"),
    Column(
        "correlation", "of log D_hat with log S_hat; none when one of them is constant", brief=False
    ),
    Column(
        "mask F1",
        "tokens dropped by the run's discrepancy control, with the stand-in against with the truth",
    ),
    Column(
        "clip F1", "tokens clipped by the run's objective, with the stand-in against with the truth"
    ),
    Column("exact", "share of action tokens that the route calls exact"),
    Column("worst exact", "largest error of a token that the route calls exact", brief=False),
    Column(
        "seconds", "in the route's calls, and in the policy's own pass where the route reads it"
    ),
    Column("forward tokens", brief=False),
    Column("MB", "weights held beside the movable models, at most", brief=False),
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A route's row of the table, as text."""
    costs = row.get("costs")
    forward, held = (
        number(costs.get(name)) if isinstance(costs, Mapping) else None
        for name in ("forward_tokens", "memory_bytes")
    )
    return [
        str(row.get("route", NONE))[:80],
        _with_error(row, "logp_error_abs_mean", amount),
        _with_error(row, "error_ratio", _places),
        _with_error(row, "staleness_leak", _places),
        _with_error(row, "discrepancy_leak", _places),
        _places(number(row.get("log_d_log_s_corr"))),
        _places(number(row.get("mask_f1"))),
        _places(number(row.get("clip_f1"))),
        percent(number(row.get("exact_fraction")), 1),
        amount(number(row.get("claimed_error_max"))),
        amount(number(row.get("seconds"))),
        amount(forward),
        amount(None if held is None else held / 1e6),
    ]


def _places(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}".replace("-0.000", "0.000")


def _with_error(row: Mapping[str, Any], name: str, show: Any) -> str:
    value, se = number(row.get(name)), number(row.get(f"{name}_se"))
    return show(value) + (f" ± {show(se)}" if value is not None and se is not None else "")


def audit(run: Gathered) -> Markup:
    """Measured against full copies of the versions that sampled, not against the route's own word."""
    inside, offline = _inside(run), _offline(run)
    if not inside and not offline:
        missing = "Not measured. --audit.share measures it in training; --audit.record true allows `unstale audit`."
        return section("audit", TITLE, None, el("p", missing, class_="gap"))
    lead = (
        "Tokens scored again by full copies of the versions that sampled them. Where a stand-in is not the old logit, "
        "a share s of the staleness lands in D and a share d of the discrepancy lands in S: (0, 0) is exact, (0, 1) is "
        "rollout, (1, 0) is current_recompute."
    )
    return section("audit", TITLE, lead, *inside, *offline)


def _inside(run: Gathered) -> list[Markup]:
    """Of the run's own route, step by step."""
    if not run.series("audit/tokens"):
        return []
    return [
        el("div", _error_over_steps(run), _leaks_over_steps(run), class_="grid-2"),
        _said_and_true(run),
    ]


def _error_over_steps(run: Gathered) -> Markup:
    title = "Decomposition error over the run"
    points = thin(run.series("audit/logp_error_abs_mean"))
    if not points:
        return gap(title, "No audited token had a truth.")
    tokens, seconds = (
        sum(value for _, value in run.series(f"audit/{name}")) for name in ("tokens", "duration_s")
    )
    held = max((value for _, value in run.series("audit/memory_bytes")), default=0.0)
    told = f"Mean |prox - old_logp| of a step's audited tokens: {tokens:,.0f} in all, for {amount(seconds)} s and "
    told += f"{amount(held / 1e6)} MB of copies."
    noise = thin(run.series("audit/logp_noise_rms"))
    lines = [Series(name="error", colour="trainer", points=points)]
    if noise:
        lines.append(Series(name="noise", colour="wait", points=noise))
    axis = Axis(
        label="", low=0, high=1.12 * max(value for line in lines for _, value in line.points) or 1.0
    )
    keys = legend(("trainer", run.route), ("wait", "the same tokens in another packing"))
    return figure(title, told, keys, line_plot(lines, steps_axis(run), axis, label=title))


def _leaks_over_steps(run: Gathered) -> Markup:
    title = "Leaks over the run"
    lines = [
        Series(name=name, colour=colour, points=thin(run.series(f"audit/{name}")))
        for name, colour in (("staleness_leak", "s"), ("discrepancy_leak", "d"))
    ]
    drawn = [line for line in lines if line.points]
    if not drawn:
        return gap(
            title,
            "Too few tokens of lag 1 and more were audited to fit them, or too little differs.",
        )
    values = [value for line in drawn for _, value in line.points]
    axis = Axis(label="", low=min(-0.1, *values), high=max(1.1, *values))
    told = "Fitted over a moving window of audited tokens of lag 1 and more."
    keys = legend(("s", "s: staleness in D"), ("d", "d: discrepancy in S"))
    return figure(title, told, keys, line_plot(drawn, steps_axis(run), axis, label=title))


def _said_and_true(run: Gathered) -> Markup:
    title = "The two factors, said and true"
    if len(run.audited) < 10:
        return gap(title, "No sample of audited tokens was recorded.")
    said = [(pair.said.log_d, pair.said.log_s) for pair in run.audited]
    true = [(pair.true.log_d, pair.true.log_s) for pair in run.audited]
    f1 = {what: [value for _, value in run.series(f"audit/{what}_f1")] for what in ("mask", "clip")}
    mask, clip = (_places(values[-1] if values else None) for values in f1.values())
    told = f"{len(said):,} audited tokens of all lags on common axes. Agreement of the thresholds taken with the route "
    told += f"and with the truth (F1, at the end of the run): dropped tokens {mask}, clipped tokens {clip}."
    return figure(
        title,
        told,
        el("div", _facets([(run.route, said), ("truth", true)]), class_="facets"),
        class_="full",
    )


def _facets(clouds: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> list[Markup]:
    """A density of (log D, log S) per name, on axes that hold all of them."""
    wide, high = (reach([abs(point[i]) for _, cloud in clouds for point in cloud]) for i in (0, 1))
    x, y = Axis(label="log D", low=-wide, high=wide), Axis(label="log S", low=-high, high=high)
    drawn = []
    for name, cloud in clouds:
        plot = hex_plot(
            cloud, x, y, label=f"log D and log S: {name}", guides=Guides(x=(0,), y=(0,))
        )
        drawn.append(el("div", el("h4", name), plot))
    return drawn


def _offline(run: Gathered) -> list[Markup]:
    """Every route of `unstale audit` on the same tokens."""
    if not run.audit:
        return []
    routes = _rows(run.audit.get("routes"))
    names = el("tr", [el("th", column.name, title=column.about or None) for column in COLUMNS])
    body = [el("tr", [el("td", cell) for cell in cells(row)]) for row in routes]
    told = (
        f"{amount(number(run.audit.get('tokens')))} action tokens of {amount(number(run.audit.get('steps')))} recorded "
        f"batches, replayed for each route. In another packing they differ by {amount(number(run.audit.get('noise')))}."
    )
    refused = run.audit.get("not_built")
    left_out = (
        [f"{name}: {why}"[:300] for name, why in refused.items()]
        if isinstance(refused, Mapping)
        else []
    )
    meaning = [el("li", f"{column.name}: {column.about}") for column in COLUMNS if column.about]
    table = el("div", el("table", el("thead", names), el("tbody", body)), class_="scroll results")
    return [
        figure(
            "Every route on these tokens", told, table,
            el("p", f"Not built: {'; '.join(left_out)}.", class_="gap") if left_out else None,
            el("details", el("summary", "What the columns say"), el("ul", meaning), class_="quiet"),
            class_="full",
        ),
        _clouds(run, routes),
        el("div", _errors_by_lag(routes), _agreements(routes), class_="grid-2"),
    ]  # fmt: skip


def _rows(value: Any) -> list[Row]:
    return (
        [row for row in value[:MAX_ROUTES] if isinstance(row, dict)]
        if isinstance(value, list)
        else []
    )


def _clouds(run: Gathered, routes: Sequence[Row]) -> Markup:
    title = "log D against log S, route by route"
    clouds = [
        (str(row.get("route", NONE))[:80], list(_points(row.get("points")))) for row in routes
    ]
    clouds = [("the truth", list(_points(run.audit.get("points")))), *clouds]
    if not any(cloud for _, cloud in clouds):
        return gap(title, "No points were recorded.")
    told = "The same tokens on common axes. A cloud on a line says that the factors are not apart at all."
    return figure(title, told, el("div", _facets(clouds), class_="facets"), class_="full")


def _points(columns: Any) -> Iterator[tuple[float, float]]:
    if not isinstance(columns, Mapping):
        return
    pair = [columns.get(name) for name in ("log_d", "log_s")]
    if all(isinstance(column, list) for column in pair):
        for log_d, log_s in zip(*pair, strict=False):
            x, y = number(log_d), number(log_s)
            if x is not None and y is not None:
                yield x, y


def _errors_by_lag(routes: Sequence[Row]) -> Markup:
    title = "Error by lag"
    tracks, lags = [], set[int]()
    for row in routes:
        held = row.get("by_lag")
        pairs = held.items() if isinstance(held, Mapping) else ()
        errors = by_lag((lag, of.get("error")) for lag, of in pairs if isinstance(of, Mapping))
        lags |= errors.keys()
        marks = [
            Mark(error, f"lag-{min(lag, 5)}", f"lag {lag}: {amount(error)}")
            for lag, error in errors.items()
        ]
        tracks.append((str(row.get("route", NONE))[:80], marks))
    values = [mark.value for _, marks in tracks for mark in marks]
    if not values:
        return gap(title, "No error by lag was recorded.")
    x = Axis(label="mean |prox - old_logp|", low=0, high=1.06 * max(values) or 1.0)
    shown = sorted(lag for lag in lags if lag <= MAX_LAG)
    keys = legend(*((f"lag-{min(lag, 5)}", f"lag {lag}") for lag in shown))
    return figure(
        title, "Versions between sampling and training.", keys, track_plot(tracks, x, label=title)
    )


def _agreements(routes: Sequence[Row]) -> Markup:
    title = "Mask and clip agreement"
    kinds, tracks = (("mask", "d"), ("clip", "s")), []
    for row in routes:
        found = ((what, colour, number(row.get(f"{what}_f1"))) for what, colour in kinds)
        marks = [
            Mark(value, colour, f"{what} F1 {_places(value)}")
            for what, colour, value in found
            if value is not None
        ]
        tracks.append((str(row.get("route", NONE))[:80], marks))
    if not any(marks for _, marks in tracks):
        return gap(title, "Neither threshold acted on a token, with any route or with the truth.")
    told = "F1 of the tokens that the run's thresholds act on, taken with the route against taken with the truth."
    keys = legend(("d", "dropped by the band on D"), ("s", "clipped by the bound on S"))
    x = Axis(label="F1", low=0, high=1, show=partial(percent, digits=0))
    return figure(title, told, keys, track_plot(tracks, x, label=title))
