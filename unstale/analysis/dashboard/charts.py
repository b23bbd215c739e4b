"""The plots of metrics on the page of a run, in groups. docs/metrics.md defines each metric."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from unstale.durability.run_folder import Row

Scale = Literal["share", "count", "value"]
"""The range of the y axis: `share` is 0% to 100%, `count` begins at 0, `value` fits the data."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot of metrics over the steps. `lines` maps the label of each line to its metric.

    `about` explains the metrics. `reading` describes a good and a bad curve.
    """

    title: str
    about: str
    unit: str
    lines: Mapping[str, str]
    scale: Scale = "count"
    reading: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A group of plots under one heading. `name` is its anchor in the page's address."""

    name: str
    title: str
    about: str
    charts: Sequence[Chart]


SECTIONS = (
    Section(
        "outcome",
        "Outcome",
        "Does the policy learn?",
        (
            Chart(
                "Success",
                "Share of solved tasks: of the training tasks of a step, and of held-out tasks.",
                "share",
                {"rollouts": "rollout/success_rate", "held out": "eval/success_rate"},
                "share",
                reading="Good: both rise. Bad: rollouts rise and held-out tasks do not, which "
                "is overfitting.",
            ),
            Chart(
                "Reward",
                "Mean and standard deviation of the finished episodes' rewards.",
                "reward",
                {"mean": "reward/mean", "deviation": "reward/std"},
                "value",
                reading="Good: the mean rises. Bad: the deviation falls to 0, so that no group "
                "has a signal.",
            ),
        ),
    ),
    Section(
        "signal",
        "Signal",
        "Is there something to learn from?",
        (
            Chart(
                "Groups that teach nothing",
                "Groups whose episodes all have the same reward, or the same advantage.",
                "share",
                {
                    "equal rewards": "reward/zero_std_group_share",
                    "equal advantages": "advantage/zero_spread_group_share",
                },
                "share",
                reading="Good: below half. Bad: above 80%, because the tasks are too easy or "
                "too hard.",
            ),
            Chart(
                "Episodes cut short",
                "Episodes that a limit of turns or tokens ended, or whose last reply it cut.",
                "share",
                {
                    "all": "completion/truncated_share",
                    "turns": "completion/max_turns_share",
                    "tokens": "completion/max_tokens_share",
                    "replies": "completion/cut_reply_share",
                },
                "share",
                reading="Good: near 0. Bad: rising with the length, so that long answers count "
                "as failures.",
            ),
            Chart(
                "Completion length",
                "Sampled tokens of an episode.",
                "tokens",
                {
                    "mean": "completion/tokens_mean",
                    "90th percentile": "completion/tokens_p90",
                    "max": "completion/tokens_max",
                },
                reading="Good: it changes slowly. Bad: a steady rise without more success, or a "
                "fall to a few tokens.",
            ),
            Chart(
                "Turns",
                "Replies of the policy in an episode.",
                "turns",
                {"mean": "rollout/turns_mean"},
                reading="Good: it changes slowly. Bad: it grows to the limit, because the agent "
                "goes in circles.",
            ),
            Chart(
                "Trained tokens",
                "Sampled tokens of the batch, and those with an advantage.",
                "tokens",
                {
                    "action tokens": "trainer/action_tokens",
                    "with gradient": "trainer/tokens_with_gradient",
                },
                reading="Good: most tokens have an advantage. Bad: the lower line falls, and "
                "steps teach little.",
            ),
            Chart(
                "Failed episodes",
                "Episodes of the batch's groups that failed.",
                "episodes",
                {"failed": "rollout/failed_episodes"},
                reading="Good: 0. Bad: any steady number; the events below name the errors.",
            ),
        ),
    ),
    Section(
        "health",
        "Training health",
        "Does the optimizer do what it should?",
        (
            Chart(
                "Loss",
                "All terms, mean over the optimizer steps.",
                "loss",
                {"loss": "objective/loss"},
                "value",
                reading="Good: it stays around a level. Bad: jumps that last; its size says "
                "nothing about success.",
            ),
            Chart(
                "Gradient norm",
                "Before clipping.",
                "norm",
                {"norm": "trainer/grad_norm"},
                reading="Good: a level without trend. Bad: spikes of ten times the level, or a "
                "fall to 0.",
            ),
            Chart(
                "Skipped optimizer steps",
                "Share of the optimizer steps that were not taken: a technique refused them.",
                "share",
                {"skipped": "trainer/skipped_step_share"},
                "share",
                reading="Good: 0, or a few. Bad: a large share, because the policy moves too far "
                "within a batch.",
            ),
            Chart(
                "Learning rate",
                "Of the last optimizer step.",
                "",
                {"rate": "trainer/lr"},
                reading="Good: it follows the schedule that was chosen. Bad: 0 before the end "
                "of the run.",
            ),
            Chart(
                "Entropy",
                "Mean entropy of the policy's next-token distribution.",
                "nats",
                {"entropy": "policy/entropy_mean"},
                reading="Good: a slow fall. Bad: a fall to 0 (collapse: no exploration is "
                "left), or a steady rise.",
            ),
            Chart(
                "KL from the sampling policy",
                "KL(mu, pi), estimates k1 and k3.",
                "nats per token",
                {"k1": "policy/kl_behavior_k1", "k3": "policy/kl_behavior_k3"},
                "value",
                reading="Good: near 0, as far as staleness allows. Bad: k3 grows from step to "
                "step.",
            ),
            Chart(
                "KL to the reference",
                "KL(pi, reference), estimates k1 and k3.",
                "nats per token",
                {"k1": "policy/kl_reference_k1", "k3": "policy/kl_reference_k3"},
                "value",
                reading="Good: it grows slowly and levels off. Bad: a sudden rise, before the "
                "rewards follow.",
            ),
            Chart(
                "Effective sample size",
                "Of the weights D, S and D x S, as a share of the number of tokens.",
                "share",
                {
                    "D": "correction/d_ess_share",
                    "S": "objective/s_ess_share",
                    "D x S": "policy/ds_ess_share",
                },
                "share",
                reading="Good: above 90%. Bad: a fall; few tokens then carry the whole "
                "gradient. D falls from numerics, S from staleness.",
            ),
        ),
    ),
    Section(
        "ratios",
        "Discrepancy D and staleness S",
        "log D = old_logp - behavior_logp, log S = logp - old_logp.",
        (
            Chart(
                "|log D| and |log S|",
                "Means over the tokens with gradient.",
                "nats",
                {
                    "|log D|": "correction/log_d_abs_mean",
                    "|log S|": "objective/log_s_abs_mean",
                },
                reading="Good: |log D| is constant and small. Bad: |log D| grows (numerics), or "
                "|log S| grows (too stale, or too large steps).",
            ),
            Chart(
                "99th percentiles",
                "Of |log D| and |log S|.",
                "nats",
                {
                    "|log D|": "correction/log_d_abs_p99",
                    "|log S|": "objective/log_s_abs_p99",
                },
                reading="Good: S within the clip limits. Bad: rare tokens with a size above 1.",
            ),
            Chart(
                "Kept by the correction",
                "Share of the tokens with gradient that the correction of D kept.",
                "share",
                {"kept": "correction/kept_share"},
                "share",
                reading="Good: above 99%. Bad: a fall, because engine and trainer disagree "
                "about more tokens.",
            ),
            Chart(
                "Clipped by the objective",
                "Share of the tokens with gradient where the trust region acts.",
                "share",
                {
                    "all": "objective/clip_share",
                    "S too low": "objective/clip_low_share",
                    "S too high": "objective/clip_high_share",
                },
                reading="Good: below 5%. Bad: above 20%: the data are too old or the learning "
                "rate too high.",
            ),
            Chart(
                "KL(mu, pi_old)",
                "Estimates k1 and k3 of the discrepancy.",
                "nats per token",
                {"k1": "correction/kl_k1", "k3": "correction/kl_k3"},
                "value",
                reading="Good: near 0. Bad: a rise, which a newer engine, another precision or "
                "a wrong version causes.",
            ),
            Chart(
                "KL(pi_old, pi)",
                "Estimates k1 and k3 of the staleness.",
                "nats per token",
                {"k1": "objective/kl_k1", "k3": "objective/kl_k3"},
                "value",
                reading="Good: small and level. Bad: a rise, which staleness or several "
                "optimizer steps per batch cause.",
            ),
            Chart(
                "Exact old log-probabilities",
                "Share of the tokens whose old_logp was computed with the version that sampled "
                "them.",
                "share",
                {"exact": "old_logps/exact_share"},
                "share",
                reading="Good: 100%. Bad: less, because D and S are mixed for the other tokens.",
            ),
        ),
    ),
    Section(
        "schedule",
        "Scheduler",
        "How old are the tokens, and who waits for whom?",
        (
            Chart(
                "Staleness",
                "Versions published between sampling and training.",
                "versions",
                {
                    "mean": "schedule/staleness_mean",
                    "max": "schedule/staleness_max",
                    "bound": "schedule/staleness_bound",
                },
                reading="Good: the mean is below the bound. Bad: at the bound always; the "
                "trainer is slower than generation.",
            ),
            Chart(
                "Queue and tickets",
                "Groups started and not yet trained on, those of them that are finished, and the "
                "tickets. A group holds a ticket until engines load the weights trained on it.",
                "groups",
                {
                    "in flight": "schedule/groups_in_flight",
                    "finished": "schedule/groups_waiting",
                    "tickets in use": "schedule/tickets_in_use",
                    "tickets": "schedule/tickets",
                },
                reading="Good: a few are finished when a batch is taken. Bad: none is (generation "
                "is too slow), or nearly all are (the trainer is too slow).",
            ),
            Chart(
                "Mixed versions",
                "Episodes with tokens of several versions, and tokens sampled over older caches.",
                "share",
                {
                    "episodes": "schedule/mixed_version_share",
                    "stale cache": "schedule/stale_kv_share",
                },
                "share",
                reading="Good: any share, if tokens keep their own version. Bad: many tokens "
                "over stale caches.",
            ),
            Chart(
                "Waiting",
                "Time that the trainer waited for a batch.",
                "s",
                {"wait": "schedule/wait_for_batch_s"},
                reading="Good: near 0. Bad: a large part of a step: generation is too slow.",
            ),
            Chart(
                "Time of a step",
                "By activity. Publications, checkpoints and evaluations can overlap with others.",
                "s",
                {
                    "training": "trainer/update_s",
                    "old_logp": "old_logps/prepare_s",
                    "publishing": "publish/duration_s",
                    "checkpoint": "checkpoint/duration_s",
                    "evaluation": "eval/duration_s",
                },
                reading="Good: training is the largest part. Bad: another part is, and grows.",
            ),
            Chart(
                "Time of episodes",
                "Summed over the episodes: waiting for replies, and for the environment.",
                "s",
                {
                    "generation": "rollout/generation_wait_s",
                    "tools": "rollout/tool_wait_s",
                },
                reading="Good: generation is the larger part. Bad: the tools are: run more "
                "episodes at once.",
            ),
        ),
    ),
    Section(
        "engines",
        "Engines",
        "How fast are the engines, and do they stay alive?",
        (
            Chart(
                "Throughput",
                "Sampled tokens of the engines, and trained tokens of the trainer.",
                "tokens per second",
                {
                    "engine": "engine/sampled_tokens_per_s",
                    "trainer": "trainer/tokens_per_s",
                },
                reading="Good: both are level. Bad: a fall of the engine's: longer contexts, "
                "smaller batches or a lost engine.",
            ),
            Chart(
                "Busy",
                "Share of the time with a request in progress.",
                "share",
                {"busy": "engine/busy_share"},
                "share",
                reading="Good: above 90%. Bad: less: too few episodes at once, slow tools, or "
                "tickets are missing.",
            ),
            Chart(
                "Rows in a pass",
                "Mean number of rows of a forward pass.",
                "rows",
                {"rows": "engine/batch_size_mean"},
                reading="Good: near the limit of the engine. Bad: a few rows, which waste the "
                "hardware.",
            ),
            Chart(
                "Prompt tokens",
                "Computed, taken from the cache, and computed again after a weight update.",
                "tokens",
                {
                    "computed": "engine/prefill_tokens",
                    "cached": "engine/cached_tokens",
                    "computed again": "engine/reprefill_tokens",
                },
                reading="Good: most are cached. Bad: many computed again, because each update "
                "empties the cache.",
            ),
            Chart(
                "Crashes and restarts",
                "Engine crashes and restarts since the previous step.",
                "engines",
                {"crashes": "engine/crashes", "restarts": "engine/restarts"},
                reading="Good: 0. Bad: repeated ones; the events name the causes.",
            ),
        ),
    ),
)
"""The groups of plots that have descriptions. The page shows all other metrics after them."""

_UNITS = {
    "_s": "s",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_share": "share",
    "_rate": "share",
}

_OF_ROW = ("step", "time_s", "version", "eval/version")
_BY_LAG = "/lag_"

MAX_LINES = 8
"""Largest number of lines in one plot of rewards, lags or engines."""

_DIAGNOSTICS = (
    Chart(
        "Reliability and coverage",
        "Episodes that the environment ended, and groups with a success (rollout_figures).",
        "share",
        {
            "reliability": "rollout_figures/reliability_share",
            "coverage": "rollout_figures/coverage_share",
        },
        "share",
        reading="Good: both rise. Bad: coverage falls while success rises: fewer tasks are solved.",
    ),
    Chart(
        "Cost of a success",
        "Sampled tokens for each successful episode (rollout_figures).",
        "tokens",
        {"tokens": "rollout_figures/tokens_per_success"},
        reading="Good: it falls. Bad: it rises while success stays.",
    ),
    Chart(
        "Balance of a group",
        "Change of the probability of right first replies by a step of size 1: of those that were "
        "sampled, and the largest loss of the others (balance).",
        "",
        {"sampled": "balance/sampled_change", "largest loss": "balance/unsampled_loss_max"},
        "value",
        reading="Good: the first is positive. Bad: the second is of its size.",
    ),
    Chart(
        "Reward and corrected score",
        "Means of the trained reward and of the score that counts, of the same episodes (proxy).",
        "",
        {"reward": "proxy/reward_mean", "score": "proxy/score_mean"},
        "value",
        reading="Good: both rise. Bad: the reward rises alone; the policy learns the reward only.",
    ),
    Chart(
        "Pairs that teach only the reward",
        "Pairs of siblings with different rewards: with scores in the reverse order, and with "
        "equal scores (proxy).",
        "share",
        {"reversed": "proxy/reversed_share", "equal": "proxy/equal_score_share"},
        "share",
        reading="Good: near 0. Bad: a rise.",
    ),
)
"""Plots for techniques that measure training without changing it."""

_BY_ENGINE = (
    ("busy_share", "Busy, by engine", "Share of the time with a request in progress.", "share"),
    (
        "cached_share",
        "Cache hits, by engine",
        "Share of the prompt tokens taken from the prefix cache.",
        "share",
    ),
    (
        "sampled_tokens_per_s",
        "Throughput, by engine",
        "Sampled tokens of each engine.",
        "tokens per second",
    ),
    ("running", "Load, by engine", "Requests in progress at the end of a step.", "requests"),
)
"""Plots of the metrics `engine_<n>/NAME`, each with a line for every engine: NAME, title,
explanation, unit.
"""

_ENGINE = re.compile(r"engine_([0-9]{1,4})/(.+)")
_REWARD = re.compile(r"reward/(.+)_mean")


def sections(names: Iterable[str]) -> list[Row]:
    """Return the groups of plots for the metrics `names` of a run, as objects for JSON.

    The result is cached, so the caller must not change it.
    """
    return _sections(tuple(names))


@lru_cache(maxsize=64)
def _sections(names: tuple[str, ...]) -> list[Row]:
    """Return the groups of plots for the metrics `names`. Groups without plots are left out.

    Metrics that differ only by lag (staleness) or only by engine share one plot. Rewards and
    figures of the environment have their own groups. All other metrics come last, in one group for
    each component (the part of the name before `/`).
    """
    left = dict.fromkeys(sorted(set(names) - set(_OF_ROW)))
    found = {
        section.name: _section(
            section.name, section.title, section.about, _recorded(section.charts, left)
        )
        for section in SECTIONS
    }
    for section in found.values():
        _drop_shown(section["charts"], left)
    found["ratios"]["charts"] += _by_lag(left)
    found["engines"]["charts"] += _by_engine(left)
    diagnostics = _recorded(_DIAGNOSTICS, left)
    _drop_shown(diagnostics, left)
    rewards = _by_reward(left)
    of_rewards = [name for name in left if name.startswith("reward/")]
    rewards += _single(of_rewards, left)
    of_env = [name for name in left if name.startswith("env/")]
    environment = _single(of_env, left)
    components: dict[str, list[str]] = {}
    for name in left:
        components.setdefault(name.partition("/")[0], []).append(name)
    ordered = [
        found["outcome"],
        found["signal"],
        _section("rewards", "Rewards", "The named rewards of an episode, by channel.", rewards),
        found["health"],
        found["ratios"],
        found["schedule"],
        found["engines"],
        _section("diagnostics", "Diagnostics", "Measured by techniques.", diagnostics),
        _section(
            "environment",
            "Environment",
            "Numbers that the environment reports, mean over episodes.",
            environment,
        ),
        *(
            _section(
                f"other-{component}",
                component,
                "Other metrics of this component.",
                _single(members, {}),
            )
            for component, members in components.items()
        ),
    ]
    return [each for each in ordered if each["charts"]]


def _recorded(charts: Sequence[Chart], names: Mapping[str, None]) -> list[Row]:
    """Return those of `charts` that show a metric in `names`, without the lines of other
    metrics.
    """
    found = []
    for chart in charts:
        lines = {line: name for line, name in chart.lines.items() if name in names}
        if lines:
            found.append(_as_json(chart, lines))
    return found


def _drop_shown(charts: Sequence[Row], left: dict[str, None]) -> None:
    for chart in charts:
        for line in chart["lines"]:
            left.pop(line["metric"], None)


def _section(name: str, title: str, about: str, charts: list[Row]) -> Row:
    return {"name": name, "title": title, "about": about, "charts": charts}


def _as_json(chart: Chart, lines: Mapping[str, str]) -> Row:
    return {
        "title": chart.title,
        "about": chart.about,
        "unit": chart.unit,
        "scale": chart.scale,
        "reading": chart.reading,
        "lines": [{"name": line, "metric": name} for line, name in lines.items()],
    }


def _by_lag(left: dict[str, None]) -> list[Row]:
    """Return a plot for each metric that is recorded by lag (staleness), with a line for each of
    its first `MAX_LINES` lags. Remove the metric's names from `left`.
    """
    lags: dict[str, dict[int, str]] = {}
    for name in left:
        metric, _, lag = name.partition(_BY_LAG)
        if lag.isascii() and lag.isdigit() and len(lag) <= 4:
            lags.setdefault(metric, {})[int(lag)] = name
    charts = []
    for metric, by_lag in lags.items():
        for name in by_lag.values():
            left.pop(name, None)
        lines = {f"lag {lag}": by_lag[lag] for lag in sorted(by_lag)[:MAX_LINES]}
        chart = Chart(f"{metric} by lag", "For tokens of each staleness.", unit_of(metric), lines)
        charts.append(_as_json(chart, lines))
    return charts


def _by_reward(left: dict[str, None]) -> list[Row]:
    """Return one plot of the means of all named rewards, in a list. Remove the plotted names from
    `left`.
    """
    own = ("reward/mean", "reward/std")
    lines = {
        match[1]: name for name in left if name not in own and (match := _REWARD.fullmatch(name))
    }
    lines = dict(list(lines.items())[:MAX_LINES])
    for name in lines.values():
        left.pop(name)
    chart = Chart(
        "Rewards by channel",
        "Mean of each named reward, before the task set combines them.",
        "reward",
        lines,
        "value",
        reading="Good: all rise. Bad: one rises while another falls, as with a bonus that pays "
        "more than the task.",
    )
    return [_as_json(chart, lines)] if lines else []


def _by_engine(left: dict[str, None]) -> list[Row]:
    """Return plots with a line for each of the first `MAX_LINES` engines.

    All metrics of engines are removed from `left`, also those without a plot, because the page has
    a table of engines.
    """
    engines: dict[str, dict[int, str]] = {}
    for name in list(left):
        if match := _ENGINE.fullmatch(name):
            engines.setdefault(match[2], {})[int(match[1])] = name
            left.pop(name)
    charts = []
    for metric, title, about, unit in _BY_ENGINE:
        names = engines.get(metric, {})
        lines = {f"engine {number}": names[number] for number in sorted(names)[:MAX_LINES]}
        reading = "Good: the lines are close. Bad: one is far below the others."
        chart = Chart(
            title, about, unit, lines, "share" if unit == "share" else "count", reading=reading
        )
        if lines and (len(lines) > 1 or metric in ("cached_share", "running")):
            charts.append(_as_json(chart, lines))
    return charts


def _single(names: Sequence[str], left: dict[str, None]) -> list[Row]:
    charts = []
    for name in names:
        left.pop(name, None)
        short = name.partition("/")[2] or name
        unit = unit_of(name)
        chart = Chart(name, "", unit, {short: name}, "share" if unit == "share" else "value")
        charts.append(_as_json(chart, chart.lines))
    return charts


def unit_of(name: str) -> str:
    """Return the unit of a metric, from the end of its name. "" if the name does not show a unit.

    >>> unit_of("engine/busy_share"), unit_of("reward/mean")
    ('share', '')
    """
    if name.endswith("_per_s"):
        return "per second"
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
