"""`baseline`: choose the baseline and the scale of the advantages of a group.

The advantage of an episode with reward r is (r - b) / s. m is the group's mean, n its size, and V
the expected reward of the task: the mean of a Beta distribution of earlier groups.

`mean`, `loo`: b is m, or with `loo` (leave one out) the mean of the other episodes.
`median`: b is the median. The advantages are multiplied by n / (the number of episodes
whose reward is not b). With `scale` = mad it is MC-GRPO, whose groups have one episode more, of
which one is the median and has no gradient.
`prior`: b = V. With groups of one episode and `scale` = batch it is the baseline of MSSR (built on
SPO, arXiv 2509.13232).
`shrink`: b = w m + (1 - w) V, w = D / (D + v), D = max(0, (m - V)^2 - v). v is the largest possible
variance of m, (reward_max - reward_min)^2 / (4 n). From V0.5, where a model predicts V. With
`leave_out`, m and n are those of the other episodes.
`probe`: b is the mean of g over the features of the other episodes of the group. g is a ridge
regression, fitted before each batch to the last episodes that were trained on: from the features of
an episode to the mean reward of the other episodes of its group. The features are the mean hidden
states of a layer over the last tokens of the prompt, and over those of all replies, and the mean,
standard deviation and maximum of the entropies of the replies' tokens. An episode without siblings
has the features of its prompt alone. In the first batch, b is that of `loo`. From POISE, which has
two episodes for each task.

s is 1 (`none`), the standard deviation of the group (`std`), the median of |r - median|, but at
least 0.1, plus 0.001 (`mad`), or the standard deviation of r - b over the batch, whose mean
is subtracted, too (`batch`).

With `forecast` = sampler, V is the forecast of `predicted_sampler` instead, as in V0.5. It also
exists for tasks that were never tried. V is learned from the environment's rewards, so `prior` and
`shrink` are refused beside techniques that change rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from unstale.config.checks import ConfigError, NonNegative, Positive, PositiveInt, Range, Section
from unstale.config.techniques import Entry, chosen
from unstale.records import Group, ScoredTrajectory, Trajectory
from unstale.research.techniques.probe import (
    Probe,
    ProbedBatch,
    means_of_others,
    select,
    without_replies,
)
from unstale.research.techniques.success import (
    ForecastOptions,
    ForecastUser,
    SuccessTracker,
    VisitOptions,
)
from unstale.techniques.hooks import (
    CreditContext,
    HiddenStates,
    Outcome,
    StatesQuery,
    StepPlan,
    StepSeen,
)

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig

Centre = Literal["mean", "loo", "median", "prior", "shrink", "probe"]
_PRIOR = ("prior", "shrink")
_LEARNED = (*_PRIOR, "probe")
"""Baselines with which a group of equal rewards can have nonzero advantages."""
_READ_BY = {
    "leave_out": ("shrink",),
    **dict.fromkeys(("depth", "tokens", "examples", "ridge"), ("probe",)),
    **dict.fromkeys(
        (
            "reward_min",
            "reward_max",
            "forecast",
            "prior",
            "decay",
            "keep",
            "discount_prior",
            "kl_target",
        ),
        _PRIOR,
    ),
}
MAD_FLOOR = 0.1
"""Lower limit of the median distance to the median. In most groups whose rewards have two values
this distance is 0.
"""
KEPT_AT_LEAST = 0.875
"""Smallest share of a task's earlier counts that is kept at a visit with `kl_target`, as in SPO."""
EPSILON = 1e-6
"""A constant added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig(Section, ForecastOptions, VisitOptions):
    """The baseline and the scale of the advantages of a group (MC-GRPO, MSSR, V0.5, POISE)."""

    selector: ClassVar[str] = "centre"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = _READ_BY

    centre: Centre = "shrink"
    """The baseline: what is subtracted from a reward."""
    scale: Literal["none", "std", "mad", "batch"] = "none"
    """The divisor of reward minus baseline. With `batch` the mean of the batch is subtracted first,
    but for `median` an advantage of 0 stays 0.
    """
    leave_out: bool = False
    """Only for `shrink`: leave the episode's own reward out of the group's mean m and size n."""
    reward_min: float = 0.0
    """Only for `prior` and `shrink`: the smallest reward of an episode."""
    reward_max: float = 1.0
    """Only for `prior` and `shrink`: the largest reward of an episode."""
    kl_target: NonNegative = 0.0
    """Only for `prior` and `shrink`: forget earlier results faster while the policy changes. At
    each visit to a task, the share 2^(-KL / kl_target) of its earlier counts of results is kept, at
    most `keep` and at least 0.875. KL is the mean per token (k3) of the last step. 0 always
    keeps `keep`. The paper SPO uses 0.06.
    """
    depth: Annotated[float, Range(above=0, high=1)] = 0.5
    """Only for `probe`: share of the model's layers after which hidden states are read."""
    tokens: PositiveInt = 10
    """Only for `probe`: number of tokens, at the end of the prompt and of each reply, whose hidden
    states are averaged.
    """
    examples: Annotated[int, Range(low=2)] = 512
    """Only for `probe`: number of last episodes to which the regression is fitted."""
    ridge: Positive = 30.0
    """Only for `probe`: the penalty of the regression's squared weights."""

    def check_combination(self) -> None:
        if self.reward_min >= self.reward_max:
            raise ConfigError(
                f"baseline.reward_max must be > baseline.reward_min, got {self.reward_max:g} and "
                f"{self.reward_min:g}"
            )
        if self.centre in _LEARNED and self.scale in ("std", "mad"):
            raise ConfigError(
                f"baseline.scale must be none or batch with baseline.centre = {self.centre}, got "
                f"{self.scale}: in a group with equal rewards the advantages would be divided by 0"
            )


class Baseline:
    """An estimator of advantages that compares the episodes of a group."""

    def __init__(self, options: BaselineConfig) -> None:
        self.options = options

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        """Return trajectories with advantages. Raises ValueError for a reward that is NaN."""
        import torch

        from unstale.algorithms.advantages import whiten

        owners = [group for group in groups if group.trajectories]
        values = [self._of_group(group, context) for group in owners]
        if self.options.scale == "batch" and values:
            differences = torch.cat(values)
            whole = whiten(differences)
            if self.options.centre == "median":  # the mean of a batch of these is not 0
                whole = torch.where(differences == 0, 0.0, whole)
            values = list(whole.split([len(each) for each in values]))
        return [
            ScoredTrajectory(conversation, (value,))
            for group, each in zip(owners, values, strict=True)
            for item, value in zip(group.trajectories, each.tolist(), strict=True)
            for conversation in item.conversations
        ]

    def _of_group(self, group: Group, context: CreditContext) -> Tensor:
        return advantages(_rewards(group, group.trajectories), self.options)


class PriorBaseline(Baseline, ForecastUser):
    """An estimator of advantages whose baseline also uses a task's rewards in earlier groups."""

    def __init__(self, options: BaselineConfig) -> None:
        super().__init__(options)
        self._spread = options.reward_max - options.reward_min
        self._tracker = SuccessTracker(
            "baseline",
            prior=options.prior,
            decay=options.decay,
            keep=options.keep,
            discount_prior=options.discount_prior,
        )

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        errors = []
        for group in groups:
            self._require_range([each.reward for each in group.finished])
            if group.trajectories:
                value = self.value(context.identify(group.task))
                errors.append(abs(float(_rewards(group, group.trajectories).mean()) - value))
        if errors:
            context.metrics["baseline/prior_abs_error_mean"] = sum(errors) / len(errors)
        return super().estimate(groups, context)

    def value(self, task: str) -> float:
        """Return V, the expected reward of a task, estimated from earlier groups."""
        share = self.expected(task, self.options, self._tracker)
        return self.options.reward_min + self._spread * share

    def _of_group(self, group: Group, context: CreditContext) -> Tensor:
        value = self.value(context.identify(group.task))
        return advantages(_rewards(group, group.trajectories), self.options, value=value)

    def _require_range(self, rewards: Sequence[float]) -> None:
        low, high = self.options.reward_min, self.options.reward_max
        for reward in rewards:
            if not low <= reward <= high:
                raise ConfigError(
                    "the technique baseline needs rewards between baseline.reward_min and "
                    f"baseline.reward_max, {low:g} and {high:g}, got {reward:g}. Set them to the "
                    "smallest and the largest reward"
                )

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        low = self.options.reward_min
        shares = (tuple((r - low) / self._spread for r in each.rewards) for each in outcomes)
        self._tracker.observe(
            [replace(each, rewards=share) for each, share in zip(outcomes, shares, strict=True)]
        )

    def state(self) -> Mapping[str, Any]:
        span = [self.options.reward_min, self.options.reward_max]
        return {**self._tracker.state(), "range": span}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the expected rewards of tasks, limited to the current range of rewards.

        Raises ConfigError for the checkpoint of a run with `centre` = probe.
        """
        if "probe" in state:
            raise ConfigError(
                f"baseline.centre cannot change from probe to {self.options.centre} in a resumed "
                "run: the checkpoint has no earlier rewards of tasks"
            )
        self._tracker.restore(state)
        now = [self.options.reward_min, self.options.reward_max]
        low, high = state.get("range", now)

        def in_range(share: float) -> float:
            reward = low + (high - low) * share
            return min(max((reward - self.options.reward_min) / self._spread, 0.0), 1.0)

        if [low, high] != now:
            self._tracker.map_means(in_range)


class ProbeBaseline(Baseline):
    """An estimator whose baseline is a linear function of an episode's hidden states.

    The function is fitted to the hidden states and rewards of other episodes.
    """

    def __init__(self, options: BaselineConfig) -> None:
        super().__init__(options)
        self.query = StatesQuery(options.depth, options.tokens)
        self._probe = Probe(ridge=options.ridge, size=options.examples)
        self._batch: ProbedBatch | None = None
        self._examples: tuple[HiddenStates, Tensor] | None = None
        """Features and targets of the current batch, which `observe` adds to the regression. None
        without them.
        """

    def read_states(self, groups: Sequence[Group], states: HiddenStates) -> None:
        rows: dict[int, int] = {}
        for group in groups:
            for each in group.finished:
                rows[each.episode] = len(rows)
        predicted = alone = None
        if len(self._probe):
            predicted = self._probe.predict(states)
            alone = self._probe.predict(without_replies(states))
        self._batch = ProbedBatch(rows, states, predicted, alone)
        self._examples = None

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        """Return trajectories with advantages.

        Raises ValueError for a reward that is NaN, and for episodes whose hidden states were not
        read.
        """
        import torch

        batch = self._read_batch()
        context.metrics["baseline/forward_tokens"] = float(batch.states.forward_tokens)
        rows = []
        targets = []
        errors = []
        for group in groups:
            if len(group.finished) < 2:
                continue
            rewards = _rewards(group, group.finished)
            others = means_of_others(rewards)
            rows.append(batch.rows_of(group))
            targets.append(others)
            distances = torch.stack([rewards - batch.baseline(group, rewards), rewards - others])
            errors.append(distances.square())
        if rows:
            self._examples = (select(batch.states, torch.cat(rows)), torch.cat(targets))
            probe, loo = torch.cat(errors, 1).mean(1).tolist()
            context.metrics["baseline/probe_squared_error_mean"] = probe
            context.metrics["baseline/loo_squared_error_mean"] = loo
        return super().estimate(groups, context)

    def _of_group(self, group: Group, context: CreditContext) -> Tensor:
        baseline = self._read_batch().baseline(group, _rewards(group, group.finished))
        value = baseline[: len(group.trajectories)]
        return advantages(_rewards(group, group.trajectories), self.options, value=value)

    def _read_batch(self) -> ProbedBatch:
        if self._batch is None:
            raise ValueError("the hidden states of the batch were not read")
        return self._batch

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        if self._examples:
            self._probe.add(*self._examples)
        self._batch = self._examples = None

    def state(self) -> Mapping[str, Any]:
        return self._probe.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if "probe" not in state:
            raise ConfigError(
                "baseline.centre cannot change to probe in a resumed run: the checkpoint has no "
                "hidden states"
            )
        self._probe.restore(state)


class MovingPriorBaseline(PriorBaseline):
    """A `PriorBaseline` that forgets faster while the policy moves, by the KL of each step."""

    def __init__(self, options: BaselineConfig) -> None:
        super().__init__(options)
        self._kl = 0.0
        """Mean KL per token of the last training step."""

    def plan(self, seen: StepSeen) -> StepPlan:
        self._kl = seen.kl if math.isfinite(seen.kl) else 0.0
        return StepPlan(metrics={"baseline/kept_share": self._kept()})

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._tracker.keep = self._kept()
        super().observe(outcomes)

    def _kept(self) -> float:
        options = self.options
        return min(options.keep, max(KEPT_AT_LEAST, 2 ** (-self._kl / options.kl_target)))


def make_baseline(options: BaselineConfig) -> Baseline:
    """Return the estimator for these options.

    It has state only if its baseline uses earlier batches.
    """
    if options.centre == "probe":
        return ProbeBaseline(options)
    if options.centre in _PRIOR:
        return MovingPriorBaseline(options) if options.kl_target else PriorBaseline(options)
    return Baseline(options)


def advantages(rewards: Tensor, options: BaselineConfig, *, value: Tensor | float = 0.0) -> Tensor:
    """Return the advantages `[..., n]` of groups of n episodes.

    With `scale` = batch the result is reward minus baseline, and the caller divides it. `value` is
    the expected reward V of each group, `[...]`, or for `probe` the baseline of each episode,
    `[..., n]`.
    """
    import torch

    size = rewards.shape[-1]
    centred = rewards - _baseline(rewards, options, torch.as_tensor(value, dtype=rewards.dtype))
    if options.scale == "std":
        spread = rewards.std(-1, keepdim=True) if size > 1 else torch.zeros(1)
        centred = centred / (spread + EPSILON)
    elif options.scale == "mad":
        distance = (rewards - _median(rewards)).abs()
        centred = centred / (_median(distance).clamp(min=MAD_FLOOR) + 1e-3)
    if options.centre == "median":
        differ = (centred != 0).sum(-1, keepdim=True)
        centred = centred * size / differ.clamp(min=1)
    if options.centre in _LEARNED:
        return centred
    # Rounding errors in groups with equal rewards must not become advantages.
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    return centred.masked_fill(equal, 0.0)


def _baseline(rewards: Tensor, options: BaselineConfig, value: Tensor) -> Tensor:
    size, mean = rewards.shape[-1], rewards.mean(-1, keepdim=True)
    match options.centre:
        case "mean":
            return mean
        case "loo":
            return (size * mean - rewards) / max(size - 1, 1)
        case "median":
            return _median(rewards)
        case "probe":
            return value
        case "prior":
            return value[..., None]
        case "shrink" if options.leave_out and size == 1:
            return value[..., None]
        case "shrink" if options.leave_out:
            others = (size * mean - rewards) / (size - 1)
            return shrink(others, value[..., None], _variance(options, size - 1))
        case "shrink":
            return shrink(mean, value[..., None], _variance(options, size))


def _variance(options: BaselineConfig, size: int) -> float:
    return (options.reward_max - options.reward_min) ** 2 / (4 * size)


def shrink(mean: Tensor, value: Tensor, variance: float) -> Tensor:
    """Return the mean of rewards, moved towards the expected reward `value`.

    The result is w mean + (1 - w) value, w = D / (D + variance), D = max(0, (mean - value)^2 -
    variance).
    """
    distance = ((mean - value).square() - variance).clamp(min=0)
    weight = distance / (distance + variance)
    return weight * mean + (1 - weight) * value


def _median(values: Tensor) -> Tensor:
    """Return the median over the last dimension, `[..., 1]`.

    With two middle values, it is their mean.
    """
    return values.quantile(0.5, dim=-1, keepdim=True)


def _rewards(group: Group, episodes: Sequence[Trajectory]) -> Tensor:
    import torch

    rewards = torch.tensor([each.reward for each in episodes], dtype=torch.float64)
    if not rewards.isfinite().all():
        raise ValueError(f"the group of {group.task.key} has the rewards {rewards.tolist()}")
    return rewards


def _describe(options: BaselineConfig) -> str:
    centre = {
        "mean": "the group's mean",
        "loo": "the mean of the other episodes",
        "median": "the group's median",
        "prior": "V, the mean of a Beta distribution of the task's earlier rewards",
        "shrink": "the group's mean, moved towards V, the mean of a Beta distribution of the "
        "task's earlier rewards" + ", without the own reward" * options.leave_out,
        "probe": "what a regression predicts from hidden states of the group's other episodes",
    }[options.centre]
    scale = {
        "none": "",
        "std": ", divided by the group's standard deviation",
        "mad": ", divided by the median distance to the median (at least "
        f"{MAD_FLOOR:g}) plus 0.001",
        "batch": ", normalised over the batch",
    }[options.scale]
    is_median = options.centre == "median"
    factor = ", times n / (episodes that differ from it)" if is_median else ""
    cost = "; one more forward pass per batch" if options.centre == "probe" else ""
    return f"advantages are the reward minus {centre}{scale}{factor}{cost}"


def _check(options: BaselineConfig, config: RunConfig) -> None:
    options.check_sampler("baseline", config)
    size, centre = config.schedule.group_size, options.centre
    if centre in _PRIOR:
        if not config.selection.pool:
            raise ConfigError(
                f"baseline.centre = {centre} needs selection.pool > 0, got 0: it learns from "
                "earlier visits of a task. Set --selection.pool to the number of tasks"
            )
        _refuse_other_rewards(centre, config)
    elif size < 2:
        raise ConfigError(
            f"baseline.centre = {centre} needs schedule.group_size >= 2, got {size}. Set "
            "baseline.centre prior"
        )
    if centre == "median":
        _require_odd(config)
    if centre == "probe" and config.cluster.trainers:
        raise ConfigError(
            "baseline.centre = probe needs cluster.trainers = 0, got "
            f"{config.cluster.trainers}: ranks do not return hidden states. Set baseline.centre loo"
        )


def _refuse_other_rewards(centre: Centre, config: RunConfig) -> None:
    names = {each.name for each in chosen(config.techniques) if "reward" in each.changes}
    truncated: Any = config.technique_options.get("truncated")
    masks = truncated is not None and truncated.rule == "mask"
    others = " and ".join(sorted(names - {"truncated"} if masks else names))
    if others:
        raise ConfigError(
            f"baseline.centre = {centre} needs the environment's rewards, of which it learns the "
            f"mean, but techniques has {others}, which changes rewards. Set "
            f"--baseline.centre loo, or remove {others}"
        )
    if masks:
        raise ConfigError(
            f"baseline.centre = {centre} learns the mean reward of all episodes of a task, but "
            "truncated.rule = mask leaves some of them out of the group. Set "
            "--baseline.centre loo, or remove truncated"
        )


def _require_odd(config: RunConfig) -> None:
    size = config.schedule.group_size
    if size % 2 == 0:
        raise ConfigError(
            f"baseline.centre = median needs an odd schedule.group_size, got {size}: the median "
            f"must be the reward of one episode. Set --schedule.group_size {size + 1}"
        )
    selection: Any = config.technique_options.get("episode_filter")
    if selection is None or selection.rule == "variance":  # which acts after the advantages
        return
    if selection.n % 2 == 0:
        larger = f" --schedule.group_size {size + 2}" if selection.n + 1 == size else ""
        raise ConfigError(
            f"baseline.centre = median needs an odd episode_filter.n, got {selection.n}: the "
            "median must be the reward of one episode. Set --episode_filter.n "
            f"{selection.n + 1}{larger}"
        )
    if selection.last not in (0, selection.n):
        raise ConfigError(
            f"baseline.centre = median needs episode_filter.last = 0 or {selection.n} "
            f"(episode_filter.n), got {selection.last}: on the way, every second number of "
            "episodes is even. Set --episode_filter.last 0"
        )


_MEASURED = """
The share of trained episodes whose advantage has the wrong sign (reward minus its expectation has
the right one), 200,000 groups. With G + 1 episodes, the one nearest to the baseline is not trained
on. So most of the gain is from the additional episode. The median itself helps where rewards are
far from normal. In groups of even size it gains little.

| rewards | trained G | mean of G | mean of G + 1 | `median` of G + 1 |
|---|---|---|---|---|
| normal | 2 | 0.249 | 0.125 | 0.125 |
| normal | 3 (even group) | 0.195 | 0.111 | 0.187 |
| normal | 4 | 0.166 | 0.099 | 0.110 |
| Student's t, 2 degrees of freedom | 4 | 0.211 | 0.138 | 0.109 |
| 0 or 1 with p 0.3, plus normal noise of 0.1 | 4 | 0.125 | - | 0.181 |

The squared error of the baseline of 4 rewards -1 and 1 (both with probability 1/2) is 0.25 for the
mean. For `shrink` it is 0.070, 0.098, 0.231 and 0.412 where V is wrong by 0, 0.2, 0.5 and 1: a loss
where the prior is bad. See `baseline/prior_abs_error_mean`.

A bandit of 32 tasks with 8 arms, 16 episodes a step, learning rate 4, 20 seeds: the squared error
of a task's gradient, times the episodes it has, is 0.077 with groups of 2 and `loo`, 0.054 with
groups of 4 and `loo`, 0.036 with groups of 4 and `shrink` (0.042 with `leave_out`), and 0.038 with
groups of 1 and `prior`. The success after 100 steps is nearly the same: 0.69, 0.68, 0.68 (0.69) and
0.71, with a standard error of 0.016.

For `probe`, a bandit of 16 tasks with 8 arms whose features are noisy linear maps of the policy's
logits, 8 pairs a step, 20 seeds: the squared error of a task's gradient in steps 5 to 16 is 0.022,
and 0.042 with `loo`. If episodes have the features of other tasks, it is 0.035 and 0.047. With the
features of the episode itself, the gradient of the right logit is 17 standard errors too small;
with those of its sibling, it is within 0.5. What the hidden states of real models tell is not
measured: compare `baseline/probe_squared_error_mean` and `baseline/loo_squared_error_mean`.

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="baseline",
    slot="estimator",
    rows=(10, 18, 35, 53),
    makes=make_baseline,
    options=BaselineConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: options.scale != "batch" and options.centre != "probe",
    use="Groups are small: `shrink` for 2 to 4 episodes, `prior` for one, if tasks come again "
    "(`selection.pool`). "
    "`probe` for pairs, if tasks do not come again: it costs a forward pass. "
    "`median` if single rewards are far from the others. Rewards of 0 and 1 gain nothing by it.",
    measured=_MEASURED,
    exactness="With `scale` = none, `loo`, `prior`, `probe`, and `shrink` with `leave_out` do not "
    "change the mean of the gradient, because b does not depend on the episode's own reward. The "
    "others bias it, as the group's mean does. D and S do not change. The floor of 0.1, "
    "`leave_out`, the decay per batch, the KL of the last step in `kl_target`, the Beta "
    "distribution as the prior of V0.5, and of POISE the depth, the weights of the features, "
    "groups of more than two, `loo` in the first batch and all replies instead of the first are "
    "our own reading.",
    evidence="notes",
    fixed={
        "centre": "the checkpoint has the state of that baseline",
        "depth": "the checkpoint has hidden states of this layer",
        "tokens": "the checkpoint has means over as many tokens",
    },
    check=_check,
)
