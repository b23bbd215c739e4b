"""Draw the plots of a report: learning, staleness, the two ratios, and speed.

The two ratios of a token are D = old_logp / behavior_logp and S = logp / old_logp (as
probabilities). The lag of a token is the number of versions published between sampling and
training.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from markupsafe import Markup

from unstale.config import ObjectiveConfig
from unstale.observe.report.gather import Gathered, histogram, lag_values, step_of
from unstale.observe.report.held_out import remarks
from unstale.observe.report.markup import figure, gap, render
from unstale.observe.report.plots import (
    FULL,
    SOME,
    Axis,
    Bar,
    Guides,
    Series,
    bar_plot,
    hex_plot,
    line_plot,
    smooth,
    stack_plot,
    thin,
)
from unstale.observe.report.words import amount, number, percent, stored_objective

SHOWN_LAGS = 6
FACETS = 4
MAX_COLUMNS = 240


def steps_axis(run: Gathered, shift: float = 0) -> Axis:
    """Return an axis from step 0 to the last optimizer step. `shift` is added to both ends."""
    return Axis(
        label="optimizer step",
        low=shift,
        high=max(run.steps, 1) + shift,
        show="{:g}".format,
        whole=True,
    )


def _share_axis(low: float = 0.0, high: float = 1.0) -> Axis:
    return Axis(label="", low=low, high=high, show=lambda share: f"{100 * share:.10g}%")


def _top(values: Iterable[float], least: float = 1e-9) -> float:
    return max([*values, least]) * 1.12


def over_steps(  # noqa: PLR0913
    run: Gathered,
    title: str,
    about: str,
    lines: Sequence[Series],
    *,
    missing: str,
    y: Axis | None = None,
) -> Markup:
    """Return a plot of lines over the optimizer steps, with title and explanation.

    If no line has points, the text `missing` takes its place. Without `y`, the vertical axis goes
    from 0 to just above the largest value.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return gap(title, missing)
    y = y or Axis(label="", low=0, high=_top(v for line in drawn for _, v in line.points))
    plot = line_plot(drawn, steps_axis(run), y, label=title)
    return figure(title, about, plot, keys=[(line.colour, line.key or line.name) for line in drawn])


def learning(run: Gathered) -> Markup:
    """Return the plot of held-out success and success in training over the steps."""
    title = "Learning curve"
    lines: list[Series] = []
    rollout = run.series("rollout/success_rate")
    points = thin(rollout)
    is_thinned = len(points) < len(rollout)
    if rollout:
        lines += [
            Series(
                name="rollout success",
                colour="engine faint",
                points=points,
                show=percent,
                key="rollouts" if is_thinned else "rollouts, each step",
            ),
            Series(
                name="mean of the last 5",
                colour="engine",
                points=thin(smooth(rollout)),
                show=percent,
                key="rollouts, mean of the last 5 steps",
            ),
        ]
    if run.evaluations:
        known = [each for each in run.evaluations if each.success is not None]
        intervals = [each.interval for each in known if each.interval]
        counted = len(intervals) == len(known)
        about = f"held out, {run.evaluations[-1].tasks} tasks, 95% interval"
        lines.append(
            Series(
                name="held-out",
                colour="good" if run.improved else "plain",
                points=[(float(each.step), each.success or 0.0) for each in known],
                intervals=intervals if counted else [],
                dots=True,
                show=partial(percent, digits=1),
                key=about if counted else "held out",
            )
        )
    lines += [
        Series(
            name="data changed",
            colour="trainer",
            points=[(float(step), 0.0), (float(step), 1.0)],
            show=lambda _: "",
        )
        for step in sorted({step_of(event) for event in run.data_changes})
    ]
    if not lines:
        return gap(title, "No success rate was recorded.")
    label = f"Success over {run.steps} optimizer steps"
    plot = line_plot(lines, steps_axis(run), _share_axis(), label=label, width=FULL)
    about = "Share of solved tasks. Rollouts are the training tasks of a step; held-out tasks are "
    about += "never trained on."
    about += "".join(f" {text}" for text in remarks(run.evaluations, run.data_changes))
    if is_thinned:
        about += f" Both lines of rollouts are averaged to {len(points)} points."
    keys = list(dict.fromkeys((line.colour, line.key or line.name) for line in lines))
    return figure(title, about, plot, keys=keys, class_="full")


_CURVES = (
    ("Reward", "Mean reward of the finished episodes.", {"mean": "reward/mean"}),
    (
        "Groups without an advantage",
        "Share of the groups whose episodes all have the same advantage: they teach nothing.",
        {"share": "advantage/zero_spread_group_share"},
    ),
    (
        "Completion length",
        "Sampled tokens of an episode.",
        {
            "mean": "completion/tokens_mean",
            "90th percentile": "completion/tokens_p90",
            "max": "completion/tokens_max",
        },
    ),
    (
        "Entropy",
        "Mean entropy of the policy's next-token distribution, in nats.",
        {"entropy": "policy/entropy_mean"},
    ),
    (
        "KL divergence",
        "Estimate k3, in nats per token: from the policy that sampled to the current one, and from "
        "the current one to the reference policy, if there is one.",
        {"sampling": "policy/kl_behavior_k3", "reference": "policy/kl_reference_k3"},
    ),
    ("Loss", "All terms, mean over the optimizer steps.", {"loss": "objective/loss"}),
    ("Gradient norm", "Before clipping.", {"norm": "trainer/grad_norm"}),
    ("Learning rate", "Of the last optimizer step.", {"rate": "trainer/lr"}),
)
"""For each plot of `curves`: title, explanation, and the metric of each line by the line's name."""

_OF_DIAGNOSTICS = (
    (
        "Reliability and coverage",
        "Episodes that the environment ended, and tasks with a success (gfcr).",
        {"reliability": "gfcr/reliability_share", "coverage": "gfcr/coverage_share"},
    ),
    (
        "Cost of a success",
        "Sampled tokens for each successful episode (gfcr).",
        {"tokens": "gfcr/tokens_per_success"},
    ),
    (
        "Balance of a group",
        "Change of the probability of right first replies by a step of size 1: of those that were "
        "sampled, and the largest loss of the others (balance).",
        {"sampled": "balance/sampled_change", "largest loss": "balance/unsampled_loss_max"},
    ),
    (
        "Reward and corrected score",
        "Means of the trained reward and of the score that counts, of the same episodes (proxy). "
        "If the reward rises and the score does not, the policy learns the reward alone.",
        {"reward": "proxy/reward_mean", "score": "proxy/score_mean"},
    ),
    (
        "Pairs that teach only the reward",
        "Of the pairs of siblings with different rewards: those with scores in the reverse order, "
        "and those with equal scores (proxy).",
        {"reversed": "proxy/reversed_share", "equal": "proxy/equal_score_share"},
    ),
)
"""Like `_CURVES`, for techniques that only measure. A plot is shown if it was recorded."""


def curves(run: Gathered) -> list[Markup]:
    """Return the plots of figures that every trainer reports, such as loss and reward."""
    plots = []
    chosen = [
        each for each in _OF_DIAGNOSTICS if any(run.series(name) for name in each[2].values())
    ]
    for title, about, metrics in (*_CURVES, *chosen):
        lines = [
            Series(name=name, colour=colour, points=thin(run.series(metric)))
            for (name, metric), colour in zip(
                metrics.items(), ("engine", "trainer", "s"), strict=False
            )
        ]
        values = [value for line in lines for _, value in line.points]
        missing = f"{' and '.join(metrics.values())}: not recorded."
        y = _fitted_axis(values) if values else None
        plots.append(over_steps(run, title, about, lines, missing=missing, y=y))
    return plots


def _fitted_axis(values: Sequence[float]) -> Axis:
    """Return an axis that contains the values and 0. If all are 0, it goes up to 1."""
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else 1.0
    space = 0.08 * (high - low)
    return Axis(label="", low=low - space * (low < 0), high=high + space * (high > 0))


def total_lags(run: Gathered) -> dict[int, float]:
    """Return how many sampled tokens were trained on at each lag, over all steps."""
    lags: Counter[int] = Counter()
    for row in run.rows:
        lags.update(histogram(row))
    return dict(lags)


def staleness_histogram(run: Gathered, lags: dict[int, float]) -> Markup:
    """Return the bar plot of the share of trained tokens at each lag."""
    title = "Staleness histogram"
    total = sum(lags.values())
    if not total:
        return gap(title, "No staleness histogram was recorded.")
    bound = run.bound
    shares = {lag: lags.get(lag, 0) / total for lag in range(_last_lag(run, lags) + 1)}
    bars = [
        Bar(str(lag), share, f"lag-{min(lag, 5)}", percent(share)) for lag, share in shares.items()
    ]
    about = "Action tokens by lag: versions published between sampling and training."
    warning = Markup()
    if bound is not None and max(lags) > bound:
        text = f"Tokens of lag {max(lags)} were trained on, beyond the bound of {bound:g}."
        warning = Markup('<p class="warning">{}</p>').format(text)
    elif bound is not None:
        about += f" No token exceeds the bound of {bound:g}."
    axis = _share_axis(0, min(1.25, 1.2 * max(shares.values())))
    label = "Share of action tokens by lag"
    plot = bar_plot(bars, axis, label=label, bound=bound, width=SOME)
    return figure(title, about, plot, warning)


def _last_lag(run: Gathered, lags: dict[int, float]) -> int:
    return max(int(min(run.bound or 0, 20)), *lags)


def staleness_over_steps(run: Gathered, lags: dict[int, float]) -> Markup:
    """Return the plot of the share of trained tokens at each lag, for each step."""
    title = "Staleness over steps"
    if not sum(lags.values()):
        return gap(title, "No staleness histogram was recorded.")
    last = _last_lag(run, lags)
    shown = min(last, SHOWN_LAGS - 1)
    names = [f"lag {lag}" for lag in range(shown + 1)]
    if shown < last:
        names[-1] += " and more"
    rows = [(step_of(row), histogram(row)) for row in run.rows if histogram(row)]
    width = math.ceil(len(rows) / MAX_COLUMNS)
    columns = []
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        total: Counter[int] = Counter()
        for _, counts in part:
            total.update(counts)
        columns.append((part[0][0], part[-1][0], _shares(total, shown)))
    plot = stack_plot(
        columns,
        steps_axis(run, shift=0.5),
        names=names,
        label="Share of action tokens by lag, per step",
    )
    keys = [(f"lag-{lag}", name) for lag, name in enumerate(names)]
    each = "step by step" if width == 1 else f"for {width} steps each"
    about = f"The same shares, {each}."
    return figure(title, about, plot, keys=keys, class_="wider")


def _shares(lags: Mapping[int, float], last: int) -> list[float]:
    total = sum(lags.values()) or 1.0
    shares = [0.0] * (last + 1)
    for lag, count in lags.items():
        shares[min(lag, last)] += count / total
    return shares


def size_by_lag(run: Gathered, ratio: str) -> Markup:
    """Return the bar plot of mean |log D| or mean |log S| at each lag. `ratio` is D or S."""
    title = f"|log {ratio}| by lag"
    component = {"D": "correction", "S": "objective"}[ratio]
    means = average_lag(run, f"{component}/log_{ratio.lower()}_abs_mean/lag_")
    if not means:
        return gap(title, "No values by lag were recorded.")
    bars = [
        Bar(f"{lag}", value, ratio.lower(), amount(value))
        for lag, value in list(means.items())[:12]
    ]
    axis = Axis(label="", low=0, high=_top(means.values(), 1e-6))
    values = ", ".join(f"lag {bar.name} {bar.written}" for bar in bars)
    plot = bar_plot(bars, axis, label=f"Mean absolute log {ratio} by lag: {values}")
    about = "The mean over all tokens with an advantage. The two plots have different scales."
    return figure(title, about, plot)


def average_lag(run: Gathered, prefix: str) -> dict[int, float]:
    """Return the mean over all steps of the metrics named `prefix` + lag, for each lag.

    A step is weighted by the tokens in its mean. Runs from before these were recorded are weighted
    by all action tokens of that lag, and steps without any numbers have weight 1.
    """
    sums: dict[int, tuple[float, float]] = {}
    counted = prefix.replace("_abs_mean/", "_tokens/")
    for row in run.rows:
        measured, tokens = lag_values(row, counted), histogram(row)
        for lag, value in lag_values(row, prefix).items():
            weight = measured.get(lag, tokens.get(lag, 0.0) if tokens else 1.0)
            total, weights = sums.get(lag, (0.0, 0.0))
            sums[lag] = total + weight * value, weights + weight
    return {lag: total / weights for lag, (total, weights) in sorted(sums.items()) if weights > 0}


def clouds(run: Gathered) -> Markup:
    """Return density plots of log D against log S of the recorded tokens, one plot per lag."""
    title = "log D against log S, token by token"
    if len(run.points) < 10:
        return gap(title, "There is no sample of tokens.")
    x, y = density_axes([(point.log_d, point.log_s) for point in run.points])
    objective = stored_objective(run.setting)
    units = {
        "D": run.setting("correction.unit"),
        "S": objective.ratio_unit if objective else "token",
    }
    whole = {ratio: unit for ratio, unit in units.items() if unit in ("turn", "sequence")}
    guides = Guides(
        x=() if "D" in whole else _band(run),
        y=() if "S" in whole or objective is None else _clip(objective),
    )
    lags = sorted({point.lag for point in run.points})
    facets = []
    for position, lag in enumerate(lags[:FACETS]):
        rest = position == FACETS - 1 and len(lags) > FACETS
        points = [(p.log_d, p.log_s) for p in run.points if p.lag == lag or (rest and p.lag > lag)]
        name = f"lag {lag}{' and more' if rest else ''}"
        plot = hex_plot(points, x, y, label=f"log D and log S of {name}", guides=guides)
        facets.append((f"{name} · {len(points):,} tokens", plot))
    about = f"{len(run.points):,} sampled tokens; darker is more, on a log scale. "
    about += _thresholds(guides, x, y)
    for ratio, unit in whole.items():
        about += f" The bounds of {ratio} are those of a whole {unit}, so no line shows them."
    if run.points_seen > len(run.points):
        about += f" (A uniform sample of {run.points_seen:,}.)"
    outside = sum(abs(p.log_d) > x.high or abs(p.log_s) > y.high for p in run.points)
    if outside:
        about += f" {outside} are outside the axes."
    return figure(title, about, render("facets.html", facets=facets), class_="full")


def density_axes(points: Sequence[tuple[float, float]]) -> tuple[Axis, Axis]:
    """Return axes of log D and log S, symmetric about 0, that contain 99.5% of the points."""
    axes = []
    for name, values in zip(("log D", "log S"), zip(*points, strict=True), strict=True):
        sizes = sorted(map(abs, values))
        reach = max(1.15 * sizes[min(len(sizes) - 1, int(0.995 * len(sizes)))], 1e-4)
        axes.append(Axis(label=name, low=-reach, high=reach))
    return axes[0], axes[1]


def _band(run: Gathered) -> list[float]:
    """Return the limits of the log discrepancy outside of which the correction drops a token."""
    if run.setting("correction.control") not in ("mask", "mask_weight"):
        return []
    ends = [number(run.setting(f"correction.{end}")) for end in ("low", "high")]
    return [math.log(end) for end in ends if end is not None and end > 0]


def _clip(objective: ObjectiveConfig) -> list[float]:
    """Return the limits of the log staleness ratio outside of which the objective clips a token."""
    ends = ((each.low, each.high) for each in objective.bounds()[:1])
    return [math.log(end) for low, high in ends if low > 0 for end in (low, high)]


def _thresholds(guides: Guides, x: Axis, y: Axis) -> str:
    sentences = []
    for name, values, axis in (
        ("dropped outside the band on log D", guides.x, x),
        ("clipped outside the band on log S", guides.y, y),
    ):
        if values:
            inside = any(axis.low < value < axis.high for value in values)
            ends = " to ".join(f"{value:.3g}" for value in values)
            place = "dashed" if inside else "outside these axes"
            sentences.append(f"Tokens are {name}, {ends} ({place}).")
    return " ".join(sentences)


def sizes_over_steps(run: Gathered) -> Markup:
    """Return the plot of mean |log D| and mean |log S| over the steps."""
    lines = [
        Series(
            name=f"|log {ratio}|",
            colour=ratio.lower(),
            points=thin(run.series(metric)),
            key=f"mean |log {ratio}|",
        )
        for ratio, metric in (
            ("D", "correction/log_d_abs_mean"),
            ("S", "objective/log_s_abs_mean"),
        )
    ]
    return over_steps(
        run,
        "|log D| and |log S| over the run",
        "Means over the tokens of a step with an advantage.",
        lines,
        missing="Neither log D nor log S was recorded.",
    )


def dropped_and_clipped(run: Gathered) -> Markup:
    """Return the plot of the shares of dropped and clipped tokens over the steps."""
    kept = thin(run.series("correction/kept_share"))
    dropped = [(step, max(0.0, 1 - share)) for step, share in kept]
    clipped = thin(run.series("objective/clip_share"))
    mean = sum(share for _, share in kept) / len(kept) if kept else None
    facts = "kept: not recorded" if mean is None else f"kept {percent(mean, 2)} of all"
    exactly = partial(percent, digits=2)
    lines = [
        Series(name="dropped", colour="d", points=dropped, show=exactly, key=f"dropped ({facts})"),
        Series(name="clipped", colour="s", points=clipped, show=exactly),
    ]
    return over_steps(
        run,
        "Dropped and clipped tokens",
        "Shares of a step's tokens with an advantage: dropped by the correction, and clipped by "
        "the objective.",
        lines,
        missing="Neither the kept nor the clipped share was recorded.",
        y=_share_axis(0, min(1.0, _top((v for _, v in [*dropped, *clipped]), 0.004))),
    )


def throughput(run: Gathered) -> Markup:
    """Return the plot of the tokens per second of engine and trainer over the steps."""
    lines = [
        Series(
            name=side,
            colour=side,
            points=thin(run.series(metric)),
            show="{:,.0f} tok/s".format,
        )
        for side, metric in (
            ("engine", "engine/sampled_tokens_per_s"),
            ("trainer", "trainer/tokens_per_s"),
        )
    ]
    return over_steps(
        run,
        "Throughput",
        "Tokens per second. Engine: sampled tokens over the time of a step. Trainer: trained "
        "tokens over its working time.",
        lines,
        missing="No throughput was recorded.",
    )
