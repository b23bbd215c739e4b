"""The plots of the page of a run, in groups. docs/metrics.md defines each metric."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unstale.durability.run_folder import Row

Scale = Literal["share", "count", "value"]
"""`share` goes from 0 to 1 and is shown in percent, `count` begins at 0, `value` fits the data."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot of metrics over the steps. `lines` has the metric of each line by the line's name."""

    title: str
    about: str
    unit: str
    lines: Mapping[str, str]
    scale: Scale = "count"


@dataclass(frozen=True, slots=True)
class Section:
    """A group of plots. `name` is its anchor on the page."""

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
            ),
            Chart(
                "Reward",
                "Mean and standard deviation of the finished episodes' rewards.",
                "reward",
                {"mean": "reward/mean", "deviation": "reward/std"},
                "value",
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
            ),
            Chart(
                "Episodes cut short",
                "Episodes that ended at a limit of turns or tokens.",
                "share",
                {
                    "all": "completion/truncated_share",
                    "turns": "completion/max_turns_share",
                    "tokens": "completion/max_tokens_share",
                },
                "share",
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
            ),
            Chart(
                "Turns",
                "Replies of the policy in an episode.",
                "turns",
                {"mean": "rollout/turns_mean"},
            ),
            Chart(
                "Trained tokens",
                "Sampled tokens of the batch, and those with an advantage.",
                "tokens",
                {
                    "action tokens": "trainer/action_tokens",
                    "with gradient": "trainer/tokens_with_gradient",
                },
            ),
            Chart(
                "Failed episodes",
                "Episodes of the batch's groups that failed.",
                "episodes",
                {"failed": "rollout/failed_episodes"},
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
            ),
            Chart(
                "Gradient norm",
                "Before clipping.",
                "norm",
                {"norm": "trainer/grad_norm"},
            ),
            Chart(
                "Learning rate",
                "Of the last optimizer step.",
                "",
                {"rate": "trainer/lr"},
            ),
            Chart(
                "Entropy",
                "Mean entropy of the policy's next-token distribution.",
                "nats",
                {"entropy": "policy/entropy_mean"},
            ),
            Chart(
                "KL from the sampling policy",
                "KL(mu, pi), estimates k1 and k3.",
                "nats per token",
                {"k1": "policy/kl_behavior_k1", "k3": "policy/kl_behavior_k3"},
                "value",
            ),
            Chart(
                "KL to the reference",
                "KL(pi, reference), estimates k1 and k3.",
                "nats per token",
                {"k1": "policy/kl_reference_k1", "k3": "policy/kl_reference_k3"},
                "value",
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
            ),
            Chart(
                "99th percentiles",
                "Of |log D| and |log S|.",
                "nats",
                {
                    "|log D|": "correction/log_d_abs_p99",
                    "|log S|": "objective/log_s_abs_p99",
                },
            ),
            Chart(
                "Kept by the correction",
                "Share of the tokens with gradient that the correction of D kept.",
                "share",
                {"kept": "correction/kept_share"},
                "share",
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
            ),
            Chart(
                "KL(mu, pi_old)",
                "Estimates k1 and k3 of the discrepancy.",
                "nats per token",
                {"k1": "correction/kl_k1", "k3": "correction/kl_k3"},
                "value",
            ),
            Chart(
                "KL(pi_old, pi)",
                "Estimates k1 and k3 of the staleness.",
                "nats per token",
                {"k1": "objective/kl_k1", "k3": "objective/kl_k3"},
                "value",
            ),
            Chart(
                "Exact old log-probabilities",
                "Share of the tokens whose old_logp was computed with the version that sampled "
                "them.",
                "share",
                {"exact": "old_logps/exact_share"},
                "share",
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
            ),
            Chart(
                "Groups in flight",
                "Groups started and not yet trained on, and those of them that are finished.",
                "groups",
                {
                    "in flight": "schedule/groups_in_flight",
                    "finished": "schedule/groups_waiting",
                },
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
            ),
            Chart(
                "Waiting",
                "Time that the trainer waited for a batch.",
                "s",
                {"wait": "schedule/wait_for_batch_s"},
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
            ),
            Chart(
                "Time of episodes",
                "Summed over the episodes: waiting for replies, and for the environment.",
                "s",
                {
                    "generation": "rollout/generation_wait_s",
                    "tools": "rollout/tool_wait_s",
                },
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
            ),
            Chart(
                "Busy",
                "Share of the time with a request in progress.",
                "share",
                {"busy": "engine/busy_share"},
                "share",
            ),
            Chart(
                "Rows in a pass",
                "Mean number of rows of a forward pass.",
                "rows",
                {"rows": "engine/batch_size_mean"},
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
            ),
            Chart(
                "Crashes and restarts",
                "Of engines, since the previous row.",
                "engines",
                {"crashes": "engine/crashes", "restarts": "engine/restarts"},
            ),
        ),
    ),
)
"""The plots with their own words. Metrics that are in none of them are shown after them."""

_UNITS = {
    "_s": "s",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_share": "share",
    "_rate": "share",
}
"""Unit of a metric by the end of its name (docs/metrics.md)."""

_OF_ROW = ("step", "time_s", "version", "eval/version")
_BY_LAG = "/lag_"


def sections(names: Iterable[str]) -> list[Row]:
    """Return the groups of plots for the metrics that a run has, as JSON.

    Metrics by lag become one plot each. Rewards and figures of the environment have their own
    groups. All other metrics come last, one group for each component.
    """
    left = dict.fromkeys(sorted(set(names) - set(_OF_ROW)))
    found: list[Row] = []
    for section in SECTIONS:
        charts = []
        for chart in section.charts:
            lines = {line: name for line, name in chart.lines.items() if name in left}
            if lines:
                charts.append(_as_json(chart, lines))
        found.append(_section(section.name, section.title, section.about, charts))
    shown = (line for each in found for chart in each["charts"] for line in chart["lines"])
    for line in list(shown):
        left.pop(line["metric"], None)
    found[3]["charts"] += _by_lag(left)
    of_rewards = [name for name in left if name.startswith("reward/")]
    of_env = [name for name in left if name.startswith("env/")]
    about = "The named rewards of an episode, and other figures of its rewards."
    found.insert(2, _section("rewards", "Rewards", about, _single(of_rewards, left)))
    about = "Numbers that the environment reports, mean over episodes."
    found.append(_section("environment", "Environment", about, _single(of_env, left)))
    components: dict[str, list[str]] = {}
    for name in left:
        components.setdefault(name.partition("/")[0], []).append(name)
    for component, members in components.items():
        about = "Other metrics of this component."
        found.append(_section(f"other-{component}", component, about, _single(members, {})))
    return [each for each in found if each["charts"]]


def _section(name: str, title: str, about: str, charts: list[Row]) -> Row:
    return {"name": name, "title": title, "about": about, "charts": charts}


def _as_json(chart: Chart, lines: Mapping[str, str]) -> Row:
    return {
        "title": chart.title,
        "about": chart.about,
        "unit": chart.unit,
        "scale": chart.scale,
        "lines": [{"name": line, "metric": name} for line, name in lines.items()],
    }


def _by_lag(left: dict[str, None]) -> list[Row]:
    """Return a plot for each metric that is recorded by lag, and remove its names from `left`."""
    lags: dict[str, dict[int, str]] = {}
    for name in left:
        metric, _, lag = name.partition(_BY_LAG)
        if lag.isascii() and lag.isdigit() and len(lag) <= 4:
            lags.setdefault(metric, {})[int(lag)] = name
    charts = []
    for metric, by_lag in lags.items():
        for name in by_lag.values():
            left.pop(name, None)
        lines = {f"lag {lag}": by_lag[lag] for lag in sorted(by_lag)[:8]}
        chart = Chart(f"{metric} by lag", "For tokens of each staleness.", unit_of(metric), lines)
        charts.append(_as_json(chart, lines))
    return charts


def _single(names: Sequence[str], left: dict[str, None]) -> list[Row]:
    """Return a plot for each name, and remove the names from `left`."""
    charts = []
    for name in names:
        left.pop(name, None)
        short = name.partition("/")[2] or name
        unit = unit_of(name)
        chart = Chart(name, "", unit, {short: name}, "share" if unit == "share" else "value")
        charts.append(_as_json(chart, chart.lines))
    return charts


def unit_of(name: str) -> str:
    """Return the unit that the end of a metric's name says, or an empty string.

    >>> unit_of("engine/busy_share"), unit_of("reward/mean")
    ('share', '')
    """
    if name.endswith("_per_s"):
        return "per second"
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
