"""Compute figures for the advice from a run's metrics and its audit: lengths, errors and times."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from unstale.analysis.advice.samples import Lengths
from unstale.config import OldLogpsConfig, RunConfig
from unstale.durability.run_folder import Row
from unstale.observe.words import number, records


def read_lengths(rows: Sequence[Row]) -> Lengths:
    """Return the mean numbers of tokens of sequences and turns. `rows` are the metrics of steps."""
    tokens = _mean(rows, "completion/tokens_mean", weight="rollout/episodes")
    turns = _mean(rows, "rollout/turns_mean", weight="rollout/episodes")
    return Lengths(tokens or 1.0, (tokens or 1.0) / max(1.0, turns or 1.0))


def of_metrics(rows: Sequence[Row]) -> dict[str, float]:
    if not rows:
        return {}
    tokens = [number(row.get("trainer/action_tokens")) or 0.0 for row in rows]
    stalest = [
        age for row in rows if (age := number(row.get("schedule/staleness_max"))) is not None
    ]
    return known(
        steps=float(len(rows)),
        tokens=sum(tokens),
        staleness_mean=_mean(rows, "schedule/staleness_mean", weight="trainer/action_tokens"),
        staleness_max=max(stalest, default=None),
        kept_share=_mean(rows, "correction/kept_share"),
        clip_share=_mean(rows, "objective/clip_share"),
        exact_share=_mean(rows, "old_logps/exact_share"),
    )


def of_learning(rows: Sequence[Row]) -> dict[str, float]:
    """Return figures that show symptoms of bad training: means over the second half of the steps.

    `rows` are the metrics of steps. `entropy_left` is the entropy in the last quarter divided by
    that in the first quarter.
    """
    late = rows[len(rows) // 2 :]
    quarter = max(1, len(rows) // 4)
    begun, left = (_mean(part, "policy/entropy_mean") for part in (rows[:quarter], rows[-quarter:]))
    figures = known(
        equal_rewards_share=_mean(late, "reward/zero_std_group_share", weight="rollout/episodes"),
        cut_off_share=_mean(late, "completion/truncated_share", weight="rollout/episodes"),
        reward_share=_mean(late, "reward/mean", weight="rollout/episodes"),
        ratio_ess_share=_mean(late, "policy/ds_ess_share"),
        replay_clip_share=_mean(late, "replay/clip_share"),
        signal_share=_mean(late, "outer_step/signal_share"),
    )
    if begun and left is not None and len(rows) > 1:
        figures["entropy_left"] = left / begun
    return figures


def of_moments(rows: Sequence[Row]) -> dict[str, float]:
    """Return the standard deviations of log D, log S and their sum, estimated from KL metrics.

    Log D is old_logp - behavior_logp, and log S is logp - old_logp. The metrics must come from a
    run with exact `old_logp`. The KL estimator k3 is about E[r^2] / 2 for small log ratios r. The
    result is empty if a metric is missing.
    """
    names = ("correction/kl_k3", "objective/kl_k3", "policy/kl_behavior_k3")
    means = [_mean(rows, name) for name in names]
    if None in means:
        return {}
    of_d, of_s, of_ratio = (2 * max(0.0, mean) for mean in means if mean is not None)
    figures = {"log_d_sd": math.sqrt(of_d), "log_s_sd": math.sqrt(of_s)}
    figures["log_ratio_sd"] = math.sqrt(of_ratio)
    if of_d + of_s > 0:
        figures["d_variance_share"] = of_d / (of_d + of_s)
    return figures


def of_audit(rows: Sequence[Row], replayed: Row, old: OldLogpsConfig) -> dict[str, float]:
    """Return the errors of the run's `old_logp` that an audit measured. Empty without an audit.

    The audit during training is used, from the metrics of steps `rows`. Without one, that of
    `unstale audit` is used: `replayed` is the content of `audit.json`, and `old` selects the run's
    route (its way to get `old_logp`) in it.
    """
    by_figure = {
        "staleness_leak": "staleness_leak",
        "discrepancy_leak": "discrepancy_leak",
        "mask_f1": "mask_f1",
        "clip_f1": "clip_f1",
    }
    audited = [row for row in rows if number(row.get("audit/tokens"))]
    if audited:
        newest = {
            name: next(_values(reversed(audited), f"audit/{metric}"), None)
            for name, metric in by_figure.items()
        }
        return known(
            audit_tokens=sum(_values(audited, "audit/tokens")),
            audit_error=_mean(audited, "audit/logp_error_abs_mean", weight="audit/tokens"),
            audit_noise=max(_values(audited, "audit/logp_noise_rms"), default=None),
            **newest,
        )
    for row in records(replayed.get("routes"), 100):
        if str(row.get("route")).partition(" ")[0] == old.route:  # its own options come first
            return known(
                audit_tokens=number(replayed.get("tokens")),
                audit_error=number(row.get("logp_error_abs_mean")),
                audit_noise=number(replayed.get("noise")),
                **{name: number(row.get(metric)) for name, metric in by_figure.items()},
            )
    return {}


def of_costs(
    config: RunConfig, rows: Sequence[Row], versions_per_episode: float | None
) -> dict[str, float]:
    """Return the times of a step in seconds, as medians over steps, and the largest memory that
    computing `old_logp` took, in MB.

    Also predict `scoring_s`, the time to compute exact `old_logp` of a batch. For an episode
    sampled by n versions, this is about (n + 1) / 2 forward passes. A forward pass is assumed to
    take a third of a forward and backward pass.
    """
    steps = [
        later - earlier for earlier, later in pairwise(_values(rows, "time_s")) if later > earlier
    ]
    prepare = list(_values(rows, "old_logps/prepare_s"))
    closing = list(_values(rows, "old_logps/closing_s"))
    update = list(_values(rows, "trainer/update_s"))
    waits = list(_values(rows, "schedule/wait_for_batch_s"))
    figures = known(
        step_s=median(steps) if steps else None,
        update_s=median(update) if update else None,
        wait_s=median(waits) if waits else None,
        versions_per_episode=versions_per_episode,
    )
    if prepare:
        figures["route_s"] = median(prepare) + (median(closing) if closing else 0.0)
    kept = [
        sum(number(row.get(f"old_logps/{name}")) or 0.0 for name in ("memory_bytes", "model_bytes"))
        for row in rows
    ]
    if max(kept, default=0.0):
        figures["route_mb"] = max(kept) / 1e6
    stalest = max(_values(rows, "schedule/staleness_max"), default=None)
    if stalest is not None:
        figures["live_versions"] = stalest + 1
    if "step_s" in figures and "route_s" in figures:
        figures["route_share"] = min(1.0, figures["route_s"] / figures["step_s"])
    if config.old_logps.route in ("snapshot_old", "interrupt_sync") and prepare:
        figures["scoring_s"] = figures["route_s"]
    elif update:
        passes = ((versions_per_episode or 1.0) + 1) / 2
        figures["scoring_s"] = passes * median(update) / 3
    return figures


def _values(rows: "Sequence[Row] | Iterator[Row]", name: str) -> Iterator[float]:
    return (value for row in rows if (value := number(row.get(name))) is not None)


def _mean(
    rows: Sequence[Row], name: str, weight: str = "trainer/tokens_with_gradient"
) -> float | None:
    """Return the mean of metric `name` over steps, weighted by the metric `weight`. None if no step
    has it.
    """
    pairs = [
        (value, number(row.get(weight)) or 0.0)
        for row in rows
        if (value := number(row.get(name))) is not None
    ]
    total = sum(tokens for _, tokens in pairs)
    if not total:
        return sum(value for value, _ in pairs) / len(pairs) if pairs else None
    return sum(value * tokens for value, tokens in pairs) / total


def known(**figures: float | None) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
