"""Techniques: changes to one part of training, chosen by name in the option `techniques`.

Each module of this package or of `unstale.research.techniques` that declares an `ENTRY` is one
technique, and can be imported without torch. A technique is an object with the methods of its slot:

    sampler      draw(tasks, context) -> Draw       the task of the next group of episodes
    allocator    first(task), more(group) -> int    the number of episodes of a group
    limiter      turn_limit(number, task)           how many turns the episodes of a group may have
                 episode_budget()                   or their tokens, tool calls and segments
    reward       reward(groups, context)            the rewards of a batch's episodes
    filter       select(groups, context)            which episodes of a batch are trained on,
                 select_scored(groups, ...)         or the same, when they have advantages
    estimator    estimate(groups, context)          their advantages; replaces `advantage.estimator`
                 read_states(groups, states)        before, if it uses hidden states of the policy
    recredit     recredit(groups, scored, context)  an advantage for each of their turns
    diagnostic   measure(groups, graded, context)   figures of a batch, after reward terms
    shaper       shape(batch, signals) -> Shaped    when a batch is prepared
    source       take(fresh, seed) -> batches       which stored groups join a batch
                 offer(fresh, batch, lag)           when the batch is prepared
    ratio        log_ratio(logp, old_logp, batch)   the ratio of each token, in the loss
    objective    surrogate(log_ratio, batch, ...)   the loss of each token
    controller   plan(seen) -> StepPlan             before each optimizer step

A technique with state also has `observe`, `state` and `restore`. Its state may change in `observe`
alone, which is called when a batch was trained on. Consumption and checkpoint are one transaction,
so after a crash every group is observed exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from unstale.config.checks import ConfigError
from unstale.config.techniques import Need, chosen, completed_options
from unstale.records import (
    CUT_OFF,
    NO_BUDGET,
    EpisodeBudget,
    Group,
    ScoredTrajectory,
    Task,
    TurnLimit,
    collate,
)

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.algorithms.objectives import Surrogate
    from unstale.config import ObjectiveConfig, RunConfig
    from unstale.records import Batch

GradientPart = Literal["full", "head"]
"""The parameters of which a gradient's norm is taken: all trained ones, or the output head alone.
"""


@dataclass(frozen=True, slots=True)
class CreditContext:
    """Figures of a run that filters, estimators and recredits may use."""

    progress: float
    """Share of the run's optimizer steps that are done, 0 to 1."""
    version: int
    """The version from which the batch is trained."""
    identify: Callable[[Task], str]
    """A function that returns a task's identity, as in `Outcome.task`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures for the metrics of the batch, by full name. Techniques add theirs."""
    whole: bool = True
    """False for the first groups of a batch whose others are not finished yet (`trainer.stream`).
    They come again with the whole batch.
    """


@runtime_checkable
class TurnLimiter(Protocol):
    """A technique that limits the turns of episodes."""

    def turn_limit(self, number: int, task: str) -> TurnLimit | None:
        """Return the limit of the episodes of a group. None sets no further limit.

        `number` is the number of the group in its run, `task` the identity of its task. It is
        called before the group begins, on the event loop. The result must depend on the arguments
        and the state alone.
        """
        ...


@runtime_checkable
class EpisodeBudgeter(Protocol):
    """A technique that runs episodes in segments, and limits their tokens and tool calls."""

    max_concurrent_episodes: int
    """Number of episodes that run at the same time. The others wait."""

    def episode_budget(self) -> EpisodeBudget:
        """Return what each episode of a group may use. It is called before the group begins, on
        the event loop. The result must depend on the state alone.
        """
        ...


@runtime_checkable
class RewardTerm(Protocol):
    """A technique that changes the rewards of episodes."""

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        """Return the groups of a batch, whose trajectories have other rewards.

        Groups and trajectories keep their number and order. `reward/mean` and other metrics of the
        batch are those of the environment's rewards.
        """
        ...


@runtime_checkable
class Filter(Protocol):
    """A technique that chooses the episodes to train on."""

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        """Return the groups of a batch, with some trajectories moved to `Group.unused`.

        Number and order of the groups must stay. A group may have no trajectory left. Those that
        stay may get other rewards.
        """
        ...


@runtime_checkable
class AdvantageFilter(Protocol):
    """A technique that chooses the episodes to train on by their advantages."""

    def select_scored(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> Sequence[Group]:
        """Return the groups of a batch, with some trajectories moved to `Group.unused`.

        At least one trajectory must stay. Those that stay keep their advantages. Number and order
        of the groups must stay.
        """
        ...


@runtime_checkable
class Estimator(Protocol):
    """A technique that computes the advantages. It replaces `advantage.estimator`."""

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        """Return the trajectories of a batch and their branches with advantages, in order.

        `Group.unused` gets none, but may be compared with.
        """
        ...


@dataclass(frozen=True, slots=True)
class StatesQuery:
    """The hidden states that a technique uses."""

    depth: float
    """Share of the policy's layers after which they are read, above 0 and at most 1."""
    tokens: int
    """Number of last tokens of the prompt, and of each reply, over which the means are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Hidden states of n episodes under the current policy, float32 on the CPU.

    They are those of an episode's main conversation. Rows of a tensor are NaN for an episode
    without such tokens.
    """

    prompt: Tensor
    """The mean over the last tokens of the prompt, `[n, H]`."""
    reply: Tensor
    """The mean over the last tokens of all replies, `[n, H]`."""
    entropy: Tensor
    """Mean, standard deviation and maximum of the entropies of all sampled tokens, in nats,
    `[n, 3]`.
    """
    forward_tokens: int = 0
    """Number of tokens in the forward passes that computed them."""


@runtime_checkable
class StatesReader(Protocol):
    """A technique that uses hidden states of the policy."""

    query: StatesQuery

    def read_states(self, groups: Sequence[Group], states: HiddenStates) -> None:
        """Receive the hidden states of the finished episodes of a batch, in the order of `groups`.

        It is called in the trainer's thread, before the advantages of the batch are computed. No
        state may change.
        """
        ...


@runtime_checkable
class Recredit(Protocol):
    """A technique that changes the advantages of a batch, for instance turn by turn."""

    def recredit(
        self,
        groups: Sequence[Group],
        scored: Sequence[ScoredTrajectory],
        context: CreditContext,
    ) -> list[ScoredTrajectory]:
        """Return the trajectories with new advantages. Their number and order must stay."""
        ...


@dataclass(frozen=True, slots=True)
class DrawContext:
    """The group for which a sampler draws a task."""

    number: int
    """The number of the group in its run, from 0."""
    step: int
    """The step that trains on the group if groups are taken in the order of their start, from 1."""
    random: Random
    """Random numbers that depend on the run's seed and `number` alone."""
    groups_per_step: int = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """The answer of a sampler."""

    task: str
    """The identity of the drawn task, as in `Outcome.task`."""
    size: int = 0
    """The number of episodes; 0 is `schedule.group_size`."""
    reply_tokens: int = 0
    """Largest number of tokens of their replies; 0 is `engine.max_completion_tokens`."""


@runtime_checkable
class TaskSampler(Protocol):
    """A technique that chooses the next task."""

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        """Return one of `tasks`. The result must depend on the arguments and the state alone.

        `tasks` are at most `selection.candidates` tasks of the pool, drawn at random without
        replacement. None of them is in flight, unless all are. The event loop waits for the call.
        """
        ...


@runtime_checkable
class TextReader(Protocol):
    """A technique that uses the texts of tasks."""

    def read(self, texts: Mapping[str, str]) -> None:
        """Receive the text of every task of the pool, by identity, before the first draw."""
        ...


@dataclass(frozen=True, slots=True)
class GroupSoFar:
    """A group whose episodes have all ended. An allocator may enlarge it."""

    task: str
    """The identity of the task, as in `Outcome.task`."""
    rewards: tuple[float, ...]
    """The rewards of the finished episodes, in the order of their start. There is at least one."""
    started: int
    """The number of episodes so far, those that failed included."""
    first: int
    """The number of episodes with which the group began."""


@runtime_checkable
class Allocator(Protocol):
    """A technique that chooses the number of episodes of each group."""

    def first(self, task: str) -> int:
        """Return the number of episodes with which a group on this task begins.

        0 is `schedule.group_size`. It takes the place of `Draw.size`.
        """
        ...

    def more(self, group: GroupSoFar) -> int:
        """Return the number of further episodes; 0 ends the group.

        It is called again when they have ended.
        """
        ...


class GradientNorms(Protocol):
    """A function that computes the norm of the gradient of each sequence's log-probability."""

    def __call__(self, sequences: Sequence[int], part: GradientPart) -> Tensor:
        """Return the norms `[n]` in float64 of some sequences of the batch, by index.

        The log-probability is summed over the sampled tokens, under the current policy. It takes a
        forward and a backward pass per sequence; `head` needs no backward pass through the layers.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Figures of a batch from which shapers compute advantages. Tensors are `[T]`, no gradient.

    A tensor is empty if no chosen technique needs it.
    """

    old_logp: Tensor
    logp: Tensor
    """Log-probability of each token under the current policy."""
    reference_logp: Tensor
    """Log-probability of each token under the policy from which the run started."""
    entropy: Tensor
    """Entropy of the current policy where it chose each sampled token, in nats."""
    gradient_norms: GradientNorms
    progress: float
    """Share of the run's optimizer steps that are done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """The result of a shaper, `[T]`."""

    advantage: Tensor
    keep: Tensor
    """False for tokens that get no gradient. They still count in the divisor of the loss."""


@runtime_checkable
class Shaper(Protocol):
    """A technique that changes the advantages of a batch."""

    def shape(self, batch: Batch, signals: Signals) -> Shaped: ...


@runtime_checkable
class Ratio(Protocol):
    """A technique that replaces the ratio of each token in the objective."""

    def log_ratio(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
        """Return the logarithm of each token's ratio, `[T]`, from some sequences of a minibatch.

        Its gradient is 1 for the token's own `logp`. It is 0 for tokens that were not sampled.
        """
        ...


@runtime_checkable
class Objective(Protocol):
    """A technique that replaces the loss of each token."""

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        """Return the loss of each token from the logarithm of its ratio, `[T]`.

        `batch` has some sequences of a minibatch, `options` are those of `objective`.
        """
        ...


@runtime_checkable
class Diagnostic(Protocol):
    """A technique that changes nothing, and adds metrics."""

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        """Return metrics of the groups of a batch by full name. Filters act after this.

        `groups` have the environment's rewards. `graded` are the same groups after reward terms.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Figures of one optimizer step, before the weights change."""

    log_weight: Tensor
    """The logarithm of pi / mu for each sequence, `[n]` in float64: the sum over its sampled
    tokens. pi is the current policy, mu the engine's policy that sampled the sequence.
    """
    grad_norm: float
    """The norm of the gradient before it is clipped."""
    gradient_noise: float = math.nan
    """An estimate of the gradient's total variance, from two halves of the step's groups. NaN if no
    technique needs `halves`, and for a step with fewer than two groups.
    """
    kl: float = math.nan
    """KL(pi_old || pi) per sampled token, in nats (k3). pi_old is the policy of `old_logp`."""
    kl_of_batch: float = math.nan
    """The same over the tokens that lag by one batch: the change by the batch before. NaN without
    such tokens.
    """


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The answer of a controller."""

    lr_factor: float = 1.0
    """Factor of the learning rate."""
    skip: bool = False
    """True if the weights must not change in this step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures for the metrics of the batch, by full name."""


@runtime_checkable
class StepController(Protocol):
    """A technique that changes the size of an optimizer step."""

    def plan(self, seen: StepSeen) -> StepPlan: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a group that was trained on."""

    task: str
    """The identity of the task. It is the same each time the task comes again."""
    num_batches: int
    """The number of batches that the newest weights that sampled a token were trained on.

    It is the version number unless a resumed run has skipped some.
    """
    lag: int
    """The number of batches between these weights and the ones that were trained from."""
    rewards: tuple[float, ...]
    failures: int
    tokens: int
    """Number of sampled tokens of the group's finished episodes, with those of branches."""
    added: int = 0
    """Number of the last rewards that are of episodes which an allocator added."""
    success_turns: tuple[int, ...] = ()
    """The number of turns of each success."""
    turn_limit: int = 0
    """The limit of turns of the group; 0 if only `rollout.max_turns` limited them."""
    cut_off: int = 0
    """Number of finished episodes that a limit of turns, calls or tokens ended."""
    budget: EpisodeBudget = NO_BUDGET
    """The limits of each episode of the group."""


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A group of a batch that no earlier step was trained on."""

    group: Group
    task: str
    """The identity of the task. It is the same each time the task comes again."""


@runtime_checkable
class Source(Protocol):
    """A technique that adds groups to the fresh ones of a batch. It never replaces fresh ones."""

    max_age: int
    """Largest age in versions of an added token. The training loop asserts it."""

    def take(self, fresh: Sequence[FreshGroup], *, seed: int) -> Sequence[Batch]:
        """Return batches that join the fresh groups. Their sampled tokens have the provenance
        REPLAYED, and `stored` has their old log-probabilities.

        The result depends on the state, the fresh groups and `seed` alone.
        """
        ...

    def offer(self, fresh: Sequence[FreshGroup], batch: Batch, lag: Tensor) -> None:
        """Receive a batch that will be trained on, and prepare what `observe` stores of it.

        It is called in the trainer's thread, because to copy parts of a batch takes long.
        `batch.stored` has the old log-probabilities of all tokens. `lag` `[T]` is the age of each
        sampled token, in versions. Replayed sequences are in the batch, too.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """A technique with state."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the groups of a batch that was trained on."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Techniques:
    """The chosen techniques of a run, in the order written."""

    def __init__(
        self, parts: Mapping[str, object] | None = None, *, needs: frozenset[Need] = frozenset()
    ) -> None:
        self.parts = dict(parts or {})
        self.needs = needs
        """The conditions of the techniques in `parts`, such as the entropy of every token."""
        values = list(self.parts.values())
        self.diagnostics = [each for each in values if isinstance(each, Diagnostic)]
        self.limiter = next((each for each in values if isinstance(each, TurnLimiter)), None)
        self.budgeter = next((each for each in values if isinstance(each, EpisodeBudgeter)), None)
        self.rewards = [each for each in values if isinstance(each, RewardTerm)]
        self.filters = [each for each in values if isinstance(each, Filter)]
        self.advantage_filters = [each for each in values if isinstance(each, AdvantageFilter)]
        self.estimator = next((each for each in values if isinstance(each, Estimator)), None)
        self.states_readers = [each for each in values if isinstance(each, StatesReader)]
        self.recredits = [each for each in values if isinstance(each, Recredit)]
        self.sampler = next((each for each in values if isinstance(each, TaskSampler)), None)
        self.allocator = next((each for each in values if isinstance(each, Allocator)), None)
        self.shapers = [each for each in values if isinstance(each, Shaper)]
        self.ratio = next((each for each in values if isinstance(each, Ratio)), None)
        self.objective = next((each for each in values if isinstance(each, Objective)), None)
        self.controllers = [each for each in values if isinstance(each, StepController)]
        self.sources = [each for each in values if isinstance(each, Source)]
        self._fresh: Sequence[FreshGroup] = ()
        """The fresh groups of the batch that is trained on, for the sources."""

    @classmethod
    def of(cls, config: RunConfig) -> Techniques:
        """Create the techniques that a configuration chooses.

        Raises `ConfigError` if one of them has state and the trainer has ranks.
        """
        entries = chosen(config.techniques)
        options = completed_options(config)
        parts = {entry.name: entry.makes(options[entry.name]) for entry in entries}
        needs = frozenset[Need]().union(*(entry.requires for entry in entries))
        made = cls(parts, needs=needs)
        if config.cluster.trainers and made.stateful:
            raise ConfigError(
                f"the techniques {', '.join(made.stateful)} need cluster.trainers = 0, got "
                f"{config.cluster.trainers}: ranks do not save their state"
            )
        return made

    @property
    def stateful(self) -> dict[str, Observer]:
        """The techniques with state, by the name of their part of a checkpoint."""
        return {
            f"technique/{name}": part
            for name, part in self.parts.items()
            if isinstance(part, Observer)
        }

    def read_states(
        self,
        groups: Sequence[Group],
        compute: Callable[[Batch, StatesQuery], HiddenStates],
        *,
        replay_experts: bool = False,
    ) -> None:
        """Pass hidden states of a batch's finished episodes to the techniques that use them.

        `compute` returns those of a batch's sequences. With `replay_experts` the passes replay the
        recorded experts.
        """
        finished = [each.led() for group in groups for each in group.finished]
        scored = [ScoredTrajectory(each, (0.0,)) for each in finished]
        batch = collate(scored, replay_experts=replay_experts)
        for reader in self.states_readers:
            reader.read_states(groups, compute(batch, reader.query))

    def credit(  # noqa: PLR0913 - two of them are functions
        self,
        groups: Sequence[Group],
        *,
        progress: float,
        version: int,
        estimate: Callable[[Sequence[Group]], list[ScoredTrajectory]],
        identify: Callable[[Task], str],
        whole: bool = True,
    ) -> tuple[list[ScoredTrajectory], Mapping[str, float]]:
        """Return the trajectories of a batch to train on, with advantages, and metrics.

        Reward terms act first, then diagnostics, filters, the estimator, recredits, and filters by
        advantage. `estimate` is the configured estimator, which an estimator technique replaces.
        Where filters leave nothing of a whole batch, all its trajectories get advantage 0.
        `whole` is False for a part of a batch.
        """
        context = CreditContext(progress, version, identify, whole=whole)
        selected = groups
        for term in self.rewards:
            selected = term.reward(selected, context)
        for diagnostic in self.diagnostics:
            context.metrics.update(diagnostic.measure(groups, selected, context))
        for each in self.filters:
            selected = each.select(selected, context)
        if self.filters and not any(group.trajectories for group in selected):
            context.metrics.update(_describe_selection(groups, selected))
            return _without_advantage(groups), context.metrics
        if self.estimator is None:
            scored = estimate(selected)
        else:
            scored = self.estimator.estimate(selected, context)
        for recredit in self.recredits:
            scored = recredit.recredit(selected, scored, context)
        for chooser in self.advantage_filters:
            selected = chooser.select_scored(selected, scored, context)
            scored = _of_trajectories(selected, scored)
        if self.filters or self.advantage_filters:
            context.metrics.update(_describe_selection(groups, selected))
        return scored, context.metrics

    def plan(self, seen: StepSeen) -> StepPlan:
        """Combine the controllers: factors multiply, and one skip is enough."""
        factor, skip = 1.0, False
        metrics: dict[str, float] = {}
        for controller in self.controllers:
            plan = controller.plan(seen)
            factor *= plan.lr_factor
            skip = skip or plan.skip
            metrics |= plan.metrics
        return StepPlan(factor, skip, metrics)

    @property
    def max_replay_age(self) -> int:
        """Largest age in versions of a replayed token. 0 without a source."""
        return max((source.max_age for source in self.sources), default=0)

    def replayed(
        self, groups: Sequence[Group], seed: int, *, identify: Callable[[Task], str]
    ) -> Sequence[Batch]:
        """Return batches of stored groups that join the fresh `groups` of a batch."""
        self._fresh = [FreshGroup(group, identify(group.task)) for group in groups]
        return [batch for source in self.sources for batch in source.take(self._fresh, seed=seed)]

    def prepared(self, batch: Batch, lag: Tensor) -> None:
        """Receive a batch before it is trained on, with all old log-probabilities in `stored`.

        Its fresh groups are those for which `replayed` was called last. `lag` `[T]` is the age of
        each sampled token, in versions.
        """
        for source in self.sources:
            source.offer(self._fresh, batch, lag)

    def consumed(
        self,
        groups: Sequence[Group],
        num_batches: int,
        *,
        lag: Callable[[Tensor], Tensor],
        identify: Callable[[Task], str],
    ) -> None:
        """Pass the results of a batch to the techniques with state.

        `num_batches` is the number of batches before. `lag` returns the age of versions in batches.
        `identify` returns a task's identity.
        """
        self._fresh = ()
        observers = self.stateful.values()
        if not observers:
            return
        outcomes = [_outcome(group, num_batches, identify(group.task), lag=lag) for group in groups]
        for observer in observers:
            observer.observe(outcomes)


def _describe_selection(before: Sequence[Group], after: Sequence[Group]) -> dict[str, float]:
    """Return the share of finished episodes that is trained on, also by success.

    A share of no episodes is NaN.
    """
    finished = [each.success for group in before for each in group.trajectories]
    trained = [each.success for group in after for each in group.trajectories]
    return {
        "filter/trained_share": _share(len(trained), len(finished)),
        "filter/trained_success_share": _share(sum(trained), sum(finished)),
        "filter/trained_failure_share": _share(trained.count(False), finished.count(False)),
    }


def _of_trajectories(
    groups: Sequence[Group], scored: Sequence[ScoredTrajectory]
) -> list[ScoredTrajectory]:
    """Return those of the scored trajectories that the groups train on, with their branches."""
    kept = {
        conversation.episode
        for group in groups
        for each in group.trajectories
        for conversation in each.conversations
    }
    return [each for each in scored if each.trajectory.episode in kept]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _without_advantage(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    return [
        ScoredTrajectory(conversation, (0.0,))
        for group in groups
        for each in group.trajectories
        for conversation in each.conversations
    ]


def _outcome(
    group: Group, num_batches: int, task: str, *, lag: Callable[[Tensor], Tensor]
) -> Outcome:
    import torch

    trajectories = group.finished
    conversations = [one for each in trajectories for one in each.conversations]
    versions = [version for one in conversations for version in one.versions]
    age = int(lag(torch.tensor(max(versions)))) if versions else 0
    return Outcome(
        task=task,
        num_batches=num_batches - age,
        lag=age,
        rewards=tuple(each.reward for each in trajectories),
        failures=len(group.failures),
        tokens=sum(each.num_sampled_in_all for each in trajectories),
        added=len(group.added),
        success_turns=tuple(each.num_turns for each in trajectories if each.success),
        turn_limit=group.turn_limit.turns if group.turn_limit else 0,
        cut_off=sum(each.stop in CUT_OFF for each in trajectories),
        budget=group.budget,
    )


NO_TECHNIQUES = Techniques()
"""The techniques of a run that chooses none."""
