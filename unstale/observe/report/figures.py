"""Draw the figures of a report on learning, staleness, the two ratios and throughput."""

import math
from collections.abc import Sequence
from functools import partial

from unstale.observe.report.gather import Gathered, histogram, lag_values, step_of
from unstale.observe.report.markup import Markup, el
from unstale.observe.report.plots import (
    FULL,
    SOME,
    Axis,
    Bar,
    BarAxis,
    Guides,
    Series,
    bar_plot,
    hex_plot,
    legend,
    line_plot,
    smooth,
    stack_plot,
    thin,
)
from unstale.observe.report.sections import section
from unstale.observe.report.words import amount, factor_names, number, percent

SHOWN_LAGS = 6
FACETS = 4


def figure(title: str, about: str, *content: Markup | None, class_: str = "") -> Markup:
    """Render a card with a title, an explanation and its content."""
    head = el("figcaption", el("h3", title), el("p", about))
    return el("figure", head, content, class_=f"card {class_}".strip())


def gap(title: str, missing: str) -> Markup:
    """Render a card with the reason why there is no plot."""
    return el(
        "figure",
        el("figcaption", el("h3", title)),
        el("p", missing, class_="gap"),
        class_="card empty",
    )


def steps_axis(run: Gathered, first: float = 0) -> Axis:
    """Return an axis of the optimizer steps of a run."""
    return Axis(
        label="optimizer step",
        low=first,
        high=max(run.steps, first + 1),
        show=lambda v: f"{v:g}",
        whole=True,
    )


def _share_axis(low: float = 0.0, high: float = 1.0) -> Axis:
    digits = 0 if high - low > 0.08 else 1
    return Axis(label="", low=low, high=high, show=lambda v: f"{100 * v:.{digits}f}%")


def _top(values: Sequence[float], least: float = 1e-9) -> float:
    return max([*values, least]) * 1.12


def learning(run: Gathered) -> Markup:
    """Render held-out and rollout success over the steps."""
    rollout = thin(run.series("rollout/success_rate"))
    lines: list[Series] = []
    keys: list[tuple[str, str]] = []
    if rollout:
        lines += [
            Series(
                name="rollout success", colour="engine", points=rollout, faint=True, show=percent
            ),
            Series(
                name="mean of the last 5", colour="engine", points=smooth(rollout), show=percent
            ),
        ]
        keys += [
            ("engine faint", "rollouts, each step"),
            ("engine", "rollouts, mean of the last 5 steps"),
        ]
    if run.evaluations:
        evaluations = [
            (float(evaluation.step), evaluation.success) for evaluation in run.evaluations
        ]
        between = (
            [evaluation.interval for evaluation in run.evaluations]
            if all(evaluation.tasks for evaluation in run.evaluations)
            else []
        )
        about = (
            f"held out, {run.evaluations[-1].tasks} tasks, 95% interval" if between else "held out"
        )
        lines.append(
            Series(
                name="held-out",
                colour="good",
                points=evaluations,
                intervals=between,
                dots=True,
                show=partial(percent, digits=1),
            )
        )
        keys.append(("good", about))
    title = "Learning curve"
    if not lines:
        return section(
            "learning",
            "Did it learn?",
            None,
            gap(title, "No success rate was recorded."),
        )
    label = f"Success over {run.steps} optimizer steps"
    plot = line_plot(lines, steps_axis(run), _share_axis(), label=label, width=FULL)
    about = "Share of solved tasks. Rollouts are the training tasks of a step; held-out tasks are "
    about += "never trained on."
    card = figure(title, about, legend(*keys), plot, class_="full")
    return section("learning", "Did it learn?", None, card)


def staleness(run: Gathered) -> Markup:
    """Render the staleness of the trained tokens, in total and per step."""
    lags: dict[int, float] = {}
    for row in run.rows:
        for lag, count in histogram(row).items():
            lags[lag] = lags.get(lag, 0) + max(count, 0)
    total = sum(lags.values())
    title = "How stale was the data?"
    if not total:
        missing = "No staleness histogram was recorded."
        return section(
            "stale",
            title,
            None,
            gap("Staleness histogram", missing),
            gap("Staleness over steps", missing),
        )
    bound = run.bound
    last = max(int(min(bound or 0, 20)), *lags)
    bars = [
        Bar(
            f"{lag}",
            lags.get(lag, 0) / total,
            f"lag-{min(lag, 5)}",
            percent(lags.get(lag, 0) / total),
        )
        for lag in range(last + 1)
    ]
    axis = _share_axis(0, min(1.25, 1.2 * max(bar.value for bar in bars)))
    about = "Action tokens by lag: versions published between sampling and training."
    warning = None
    if bound is not None and max(lags) > bound:
        text = f"Tokens of lag {max(lags)} were trained on, beyond the bound of {bound:g}."
        warning = el("p", text, class_="warning")
    elif bound is not None:
        about += f" No token exceeds the bound of {bound:g}."
    plot = bar_plot(
        bars,
        axis,
        BarAxis(label="lag", bound=bound, width=SOME),
        label="Share of action tokens by lag",
    )
    shown = min(last, SHOWN_LAGS - 1)
    columns = [
        (float(step_of(row)), _shares(histogram(row), shown)) for row in run.rows if histogram(row)
    ]
    names = [
        f"lag {lag}" if lag < shown or shown == last else f"lag {lag} and more"
        for lag in range(shown + 1)
    ]
    keys = legend(*((f"lag-{lag}", name) for lag, name in enumerate(names)))
    over = stack_plot(
        _every(columns, 240),
        Axis(
            label="optimizer step",
            low=0.5,
            high=run.steps + 0.5,
            show=lambda v: f"{v:g}",
            whole=True,
        ),
        names=names,
        label="Share of action tokens by lag, per step",
    )
    return section(
        "stale",
        title,
        f"Action tokens were {_weighted(lags):.2f} versions old on average.",
        el(
            "div",
            figure("Staleness histogram", about, plot, warning),
            figure(
                "Staleness over steps", "The same shares, step by step.", keys, over, class_="wider"
            ),
            class_="grid-1-2",
        ),
    )


def _weighted(lags: dict[int, float]) -> float:
    return sum(lag * count for lag, count in lags.items()) / sum(lags.values())


def _shares(lags: dict[int, float], last: int) -> list[float]:
    total = sum(lags.values()) or 1.0
    shares = [0.0] * (last + 1)
    for lag, count in lags.items():
        shares[min(lag, last)] += max(count, 0) / total
    return shares


def _every(
    columns: Sequence[tuple[float, list[float]]], limit: int
) -> list[tuple[float, list[float]]]:
    stride = math.ceil(len(columns) / limit) if columns else 1
    return list(columns[::stride])


def two_factors(run: Gathered) -> Markup:
    """Render log D and log S by lag, against each other and over the steps."""
    title = "Discrepancy and staleness" if run.exact else "Discrepancy and staleness, mixed"
    return section(
        "factors",
        title,
        " ".join(factor_names(run.route, exact=run.exact)),
        el("div", _by_lag(run, "d"), _by_lag(run, "s"), class_="grid-2"),
        _clouds(run),
        el("div", _over_steps(run), _acted_on(run), class_="grid-2"),
    )


def _by_lag(run: Gathered, factor: str) -> Markup:
    title = f"|log {factor.upper()}| by lag"
    component = {"d": "correction", "s": "objective"}[factor]
    means = average_lag(run, f"{component}/log_{factor}_abs_mean/lag_")
    source = "mean over all tokens with an advantage"
    if not means:
        sizes: dict[int, list[float]] = {}
        for point in run.points:
            size = abs(point.log_d if factor == "d" else point.log_s)
            sizes.setdefault(point.lag, []).append(size)
        means = {lag: sum(values) / len(values) for lag, values in sorted(sizes.items())}
        source = f"mean over {len(run.points):,} sampled tokens"
    if not means:
        return gap(title, "No values by lag were recorded.")
    bars = [Bar(f"{lag}", value, factor, amount(value)) for lag, value in list(means.items())[:12]]
    axis = Axis(label="", low=0, high=_top(list(means.values()), 1e-6))
    label = f"Mean absolute log {factor.upper()} by lag: " + ", ".join(
        f"lag {b.name} {b.written}" for b in bars
    )
    return figure(
        title,
        f"The {source}. The two plots have different scales.",
        bar_plot(bars, axis, BarAxis(label="lag"), label=label),
    )


def average_lag(run: Gathered, prefix: str) -> dict[int, float]:
    """Return the mean of a metric over the run, by lag.

    Steps are weighted by their number of tokens of that lag, where it is known.
    """
    sums: dict[int, tuple[float, float]] = {}
    for row in run.rows:
        tokens = histogram(row)
        for lag, value in lag_values(row, prefix).items():
            weight = tokens.get(lag, 0.0) if tokens else 1.0
            total, weights = sums.get(lag, (0.0, 0.0))
            sums[lag] = total + weight * value, weights + weight
    return {lag: total / weights for lag, (total, weights) in sorted(sums.items()) if weights > 0}


def _clouds(run: Gathered) -> Markup:
    title = "log D against log S, token by token"
    if len(run.points) < 10:
        return gap(title, "No sample of tokens was recorded.")
    reach_d, reach_s = map(reach, _columns(run))
    x = Axis(label="log D", low=-reach_d, high=reach_d)
    y = Axis(label="log S", low=-reach_s, high=reach_s)
    band = [number(run.setting(f"correction.{end}")) for end in ("low", "high")]
    drops = run.setting("correction.control") in ("mask", "mask_weight")
    clip = [number(run.setting(f"objective.clip_{end}")) for end in ("low", "high")]
    vertical = (
        [math.log(value) for value in band if value is not None and value > 0] if drops else []
    )
    clips = str(run.setting("objective.kind")) in ("ppo_clip", "dual_clip", "gspo", "cispo")
    low, high = clip
    horizontal = (
        [math.log(1 - low), math.log(1 + high)]
        if clips and low is not None and high is not None and low < 1
        else []
    )
    lags = sorted({point.lag for point in run.points})
    drawn = []
    for position, lag in enumerate(lags[:FACETS]):
        last = position == FACETS - 1 and len(lags) > FACETS
        points = [(p.log_d, p.log_s) for p in run.points if p.lag == lag or (last and p.lag > lag)]
        name = f"lag {lag}{' and more' if last else ''}"
        plot = hex_plot(
            points,
            x,
            y,
            label=f"log D and log S of {name}",
            guides=Guides(x=vertical, y=horizontal),
        )
        drawn.append(el("div", el("h4", f"{name} · {len(points):,} tokens"), plot))
    outside = sum(abs(p.log_d) > reach_d or abs(p.log_s) > reach_s for p in run.points)
    about = f"{len(run.points):,} sampled tokens; darker is more, on a log scale. "
    about += _thresholds(vertical, horizontal, x, y)
    if run.points_seen > len(run.points):
        about += f" (A uniform sample of {run.points_seen:,}.)"
    if outside:
        about += f" {outside} are outside the axes."
    return figure(title, about, el("div", drawn, class_="facets"), class_="full")


def _columns(run: Gathered) -> tuple[list[float], list[float]]:
    return [abs(point.log_d) for point in run.points], [abs(point.log_s) for point in run.points]


def reach(sizes: list[float]) -> float:
    """Return the half-width of a symmetric axis that contains 99.5% of the points."""
    ordered = sorted(sizes)
    return max(1.15 * ordered[min(len(ordered) - 1, int(0.995 * len(ordered)))], 1e-4)


def _thresholds(vertical: Sequence[float], horizontal: Sequence[float], x: Axis, y: Axis) -> str:
    sentences = []
    for name, values, axis in (
        ("dropped outside the band on log D", vertical, x),
        ("clipped outside the band on log S", horizontal, y),
    ):
        if values:
            inside = any(axis.low < value < axis.high for value in values)
            ends = " to ".join(f"{value:.3g}" for value in values)
            place = "dashed" if inside else "outside these axes"
            sentences.append(f"Tokens are {name}, {ends} ({place}).")
    return " ".join(sentences)


def _over_steps(run: Gathered) -> Markup:
    title = "|log D| and |log S| over the run"
    d, s = (
        thin(run.series(name)) for name in ("correction/log_d_abs_mean", "objective/log_s_abs_mean")
    )
    if not d and not s:
        return gap(title, "Neither log D nor log S was recorded.")
    lines = [
        Series(name="|log D|", colour="d", points=d),
        Series(name="|log S|", colour="s", points=s),
    ]
    axis = Axis(label="", low=0, high=_top([value for _, value in [*d, *s]], 1e-6))
    keys = legend(("d", "mean |log D|"), ("s", "mean |log S|"))
    drawn = [line for line in lines if line.points]
    return figure(
        title,
        "Means over the tokens of a step with an advantage.",
        keys,
        line_plot(drawn, steps_axis(run), axis, label=title),
    )


def _acted_on(run: Gathered) -> Markup:
    title = "Dropped and clipped tokens"
    kept, clipped = (
        thin(run.series(name)) for name in ("correction/kept_share", "objective/clip_share")
    )
    if not kept and not clipped:
        return gap(title, "Neither the kept nor the clipped share was recorded.")
    dropped = [(step, max(0.0, 1 - share)) for step, share in kept]
    lines = [
        Series(name="dropped", colour="d", points=dropped, show=partial(percent, digits=2)),
        Series(name="clipped", colour="s", points=clipped, show=partial(percent, digits=2)),
    ]
    axis = _share_axis(0, min(1.0, _top([value for _, value in [*dropped, *clipped]], 0.004)))
    mean = (
        f"kept {percent(sum(v for _, v in kept) / len(kept), 2)} of all"
        if kept
        else "kept: not recorded"
    )
    keys = legend(("d", f"dropped ({mean})"), ("s", "clipped"))
    about = "Shares of a step's tokens with an advantage: dropped by the correction, and clipped "
    about += "by the objective."
    drawn = [line for line in lines if line.points]
    return figure(title, about, keys, line_plot(drawn, steps_axis(run), axis, label=title))


def throughput(run: Gathered) -> Markup:
    """Render the tokens per second of engine and trainer."""
    title = "Throughput"
    engine, trainer = (thin(run.series(f"{side}/tokens_per_s")) for side in ("engine", "trainer"))
    if not engine and not trainer:
        return gap(title, "No throughput was recorded.")
    lines = [
        Series(name="engine", colour="engine", points=engine, show=lambda v: f"{v:,.0f} tok/s"),
        Series(name="trainer", colour="trainer", points=trainer, show=lambda v: f"{v:,.0f} tok/s"),
    ]
    axis = Axis(label="", low=0, high=_top([value for _, value in [*engine, *trainer]]))
    about = "Tokens per second. Engine: sampled tokens over the time of a step. Trainer: trained "
    about += "tokens over its working time."
    keys = legend(("engine", "engine"), ("trainer", "trainer"))
    drawn = [line for line in lines if line.points]
    return figure(title, about, keys, line_plot(drawn, steps_axis(run), axis, label=title))
