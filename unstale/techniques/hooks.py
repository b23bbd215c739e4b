"""Techniques: changes to one part of training, chosen by name in the option `techniques`.

Each module of this package or of `unstale.research.techniques` that declares an `ENTRY` is one
technique, and can be imported without torch. A technique is an object with the methods of its slot:

    sampler      draw(tasks, context) -> Draw       chooses the task of the next group of episodes
    allocator    first(task), more(group) -> int    chooses the number of episodes of a group
    strategy     roots(group_size) -> int           chooses the number of episodes that begin a
                                                    group
                 forks(rounds, texts) -> forks      and how further ones begin, in rounds
                 decide(leaves, left, random)       forks and prunes episodes while they run
    limiter      turn_limit(number, task)           limits the turns of a group's episodes
                 episode_budget()                   limits their tokens, tool calls and segments
    reward       reward(groups, context)            changes the rewards of a batch's episodes
    filter       select(groups, context)            chooses the episodes of a batch to train on
                 select_scored(groups, ...)         does so when advantages are known
    estimator    estimate(groups, context)          computes advantages instead of the estimator of
                                                    `advantage.estimator`
                 read_states(groups, states)        receives hidden states of the policy before that
    recredit     recredit(groups, scored, context)  changes advantages, for instance per turn
    diagnostic   measure(groups, graded, context)   returns metrics of a batch, after reward terms
    shaper       shape(batch, signals) -> Shaped    changes the advantages of a prepared batch
    source       take(fresh, seed) -> batches       chooses stored groups that join a batch
                 offer(fresh, batch, lag)           receives a prepared batch, to store its groups
    ratio        log_ratio(logp, old_logp, batch)   computes the ratio of each token in the loss
    objective    surrogate(log_ratio, batch, ...)   computes the loss of each token
    distiller    rewarded(batch, teacher_logp, ...) adds log q - log p of a teacher to advantages
                 divergence(logp, teacher_logp)     computes the divergence of whole distributions
    controller   plan(seen) -> StepPlan             is called before each optimizer step

The rollout calls sampler, limiter, allocator and strategy; `Techniques.credit` calls reward,
filter, estimator, recredit and diagnostic when a batch's episodes have ended. The other slots are
called by the trainer: source and shaper before the loss, distiller, ratio and objective in it, and
controller before each optimizer step.

A technique with state also has `observe`, `state` and `restore`. Only `observe` may change its
state. It is called after a batch was trained on. The state and the record of the batches that were
trained on are saved in one transaction, so after a crash every group is observed exactly once.
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
    from unstale.envs import Message
    from unstale.records import Batch, Failure, Fork, Piece, Trajectory
    from unstale.techniques.distil import DistilConfig

GradientPart = Literal["full", "head"]
"""The parameters for which a gradient's norm is computed: all trained ones, or only the output
head.
"""


@dataclass(frozen=True, slots=True)
class CreditContext:
    """Information about a run for techniques that change rewards, episodes or advantages."""

    progress: float
    """Share of the run's optimizer steps that are done, 0 to 1."""
    version: int
    """The version of the weights at the start of the training on the batch."""
    identify: Callable[[Task], str]
    """A function that returns the identity of a task: the same string each time the task is drawn.
    """
    answer: Callable[[Trajectory], str] = lambda episode: ""
    """A function that returns the answer of an episode, or "" if it has none. For techniques that
    require `answers`.
    """
    texts: Texts | None = None
    """Functions for texts of episodes and tasks. None outside of a run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the batch, by full name such as `long_reply_penalty/share`. Techniques add
    theirs.
    """
    whole: bool = True
    """False if the groups are only the first ones of a batch (`trainer.stream`). They are passed
    again when the whole batch is finished.
    """


@runtime_checkable
class TurnLimiter(Protocol):
    """A technique that limits the turns of episodes."""

    def turn_limit(self, number: int, task: str) -> TurnLimit | None:
        """Return the limit of turns for the episodes of a group. None sets no limit besides
        `rollout.max_turns`.

        `number` is the number of the group in its run, `task` the identity of its task. The method
        is called on the event loop before the group begins. The result must depend only on the
        arguments and the state.
        """
        ...


@runtime_checkable
class EpisodeBudgeter(Protocol):
    """A technique that runs episodes in segments, and limits their tokens and tool calls."""

    max_concurrent_episodes: int
    """Largest number of episodes that run at the same time. Further episodes wait."""

    def episode_budget(self) -> EpisodeBudget:
        """Return the limits of each episode of a group.

        The method is called on the event loop before the group begins. The result must depend only
        on the state.
        """
        ...


@runtime_checkable
class RewardTerm(Protocol):
    """A technique that changes the rewards of episodes."""

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        """Return the groups of a batch with changed rewards of their trajectories.

        The number and order of groups and trajectories must not change. `reward/mean` and other
        metrics of the batch still show the environment's rewards.
        """
        ...


@runtime_checkable
class Filter(Protocol):
    """A technique that chooses the episodes to train on."""

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        """Return the groups of a batch, with some trajectories moved to `Group.unused`.

        The number and order of the groups must not change. A group may lose all its trajectories.
        Trajectories that are not moved may get other rewards.
        """
        ...


@runtime_checkable
class AdvantageFilter(Protocol):
    """A technique that chooses the episodes to train on after advantages are computed."""

    def select_scored(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> Sequence[Group]:
        """Return the groups of a batch, with some trajectories moved to `Group.unused`.

        `scored` has the trajectories of the batch with their advantages, which do not change. At
        least one trajectory must remain. The number and order of the groups must not change.
        """
        ...


@runtime_checkable
class Estimator(Protocol):
    """A technique that computes the advantages. It replaces `advantage.estimator`."""

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        """Return the trajectories of a batch and their further conversations, with advantages, in
        order.

        Trajectories in `Group.unused` get no advantage, but may be used in the baseline of others.
        """
        ...


@dataclass(frozen=True, slots=True)
class StatesQuery:
    """A request for hidden states of the policy."""

    depth: float
    """Share of the policy's layers after which hidden states are read, above 0 and at most 1."""
    tokens: int
    """Number of tokens, at the end of the prompt and of each reply, over which hidden states are
    averaged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Hidden states of n episodes under the current policy, float32 on the CPU.

    They are read in the main conversation of each episode. A row is NaN if the episode has no such
    tokens.
    """

    prompt: Tensor
    """Mean hidden state over the last tokens of the prompt, `[n, H]`."""
    reply: Tensor
    """Mean hidden state over the last tokens of all replies, `[n, H]`."""
    entropy: Tensor
    """Mean, standard deviation and maximum of the entropies of all sampled tokens, in nats,
    `[n, 3]`.
    """
    forward_tokens: int = 0
    """Number of tokens in the forward passes that computed the states."""


@runtime_checkable
class StatesReader(Protocol):
    """A technique that uses hidden states of the policy, which `query` describes."""

    query: StatesQuery

    def read_states(self, groups: Sequence[Group], states: HiddenStates) -> None:
        """Receive the hidden states of the finished episodes of a batch, in the order of `groups`.

        The method is called in the trainer's thread, before the advantages of the batch are
        computed. It must not change what `state()` returns.
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
        """Return the trajectories with new advantages. Their number and order must not change."""
        ...


@dataclass(frozen=True, slots=True)
class DrawContext:
    """Information about the group for which a sampler draws a task."""

    number: int
    """The number of the group in its run, from 0."""
    step: int
    """The step that will train on the group if groups are trained on in the order of their start,
    from 1.
    """
    random: Random
    """Random numbers that depend only on the run's seed and `number`."""
    groups_per_step: int = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampler's choice for a group: its task, and the limits of its episodes."""

    task: str
    """The identity of the drawn task, as in `Outcome.task`."""
    size: int = 0
    """The number of episodes of the group; 0 means `schedule.group_size`."""
    reply_tokens: int = 0
    """Largest number of tokens of a reply; 0 means `engine.max_completion_tokens`."""


@runtime_checkable
class TaskSampler(Protocol):
    """A technique that chooses the task of the next group."""

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        """Return the choice of one of `tasks` for the next group.

        `tasks` are identities of at most `selection.candidates` tasks of the pool, drawn at random
        without replacement. None of them has a group in flight, unless all tasks of the pool have.
        The result must depend only on the arguments and the state. The event loop waits for the
        call.
        """
        ...


@runtime_checkable
class TextReader(Protocol):
    """A technique that uses the texts of tasks."""

    def read(self, texts: Mapping[str, str]) -> None:
        """Receive the text of every task of the pool, by the task's identity, before the first
        draw.
        """
        ...


@runtime_checkable
class VectorReader(Protocol):
    """A technique that may use vectors of texts, from hidden states of the policy."""

    def read_vectors(self, encode: Callable[[Sequence[str], StatesQuery], Tensor]) -> None:
        """Receive a function that returns vectors `[n, H]` float32 of n texts. It is slow.

        The method is called after `read`.
        """
        ...


@runtime_checkable
class Forecaster(Protocol):
    """A sampler that forecasts success rates of tasks from their texts."""

    def forecast_of(self, task: str) -> float:
        """Return the forecast success rate, 0 to 1, of the task of the pool with the identity
        `task`.

        The forecast uses only groups that were trained on. The method may be called from several
        threads.
        """
        ...


@runtime_checkable
class ForecastReader(Protocol):
    """A technique that can use the forecasts of the run's sampler."""

    def use_forecasts(self, forecaster: Forecaster) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupSoFar:
    """A group whose episodes have all ended. An allocator may enlarge it."""

    task: str
    """The identity of the task, as in `Outcome.task`."""
    rewards: tuple[float, ...]
    """The rewards of the finished episodes, in the order of their start. There is at least one."""
    started: int
    """The number of episodes that were started, including failed ones."""
    first: int
    """The number of episodes with which the group began, and which a strategy added."""


@runtime_checkable
class Allocator(Protocol):
    """A technique that chooses the number of episodes of each group."""

    def first(self, task: str) -> int:
        """Return the number of episodes with which a group on this task begins.

        0 means `schedule.group_size`. The number replaces `Draw.size`.
        """
        ...

    def more(self, group: GroupSoFar) -> int:
        """Return the number of episodes to add to a group whose episodes have all ended.

        With 0 the group ends. Otherwise the method is called again when the added episodes have
        ended.
        """
        ...


DROPPED = -1.0
"""Factor of the weight of an episode that was pruned with certainty. It is not a real factor: no
weight can replace an episode that had no chance to survive.
"""


@dataclass(frozen=True, slots=True)
class LookPlan:
    """The places in each reply at which a strategy decides how episodes continue."""

    first: int
    """Number of tokens of a reply before its first place of decision, at least 1."""
    every: int = 0
    """Number of tokens between two places of decision in a reply. The end of the reply is a place
    of decision, too. 0: a reply has only one, after `first` tokens or at the end of a shorter
    reply.
    """


@dataclass(frozen=True, slots=True)
class Leaf:
    """An episode that waits at a place of decision, or has ended."""

    index: int
    """The number of the episode in its group, in the order of their start."""
    episode: int
    pieces: tuple[Piece, ...]
    """The episode up to its place of decision, including what it shares with parents, as they
    sampled it.
    """
    fork: Fork | None = None
    weight: float = 1.0
    """Weight of a waiting episode: 1 / the probability of its survival so far; 0
    if it was pruned.
    """
    going: bool = False
    """True if the episode waits within a reply, False if it waits at the end of one."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Decisions:
    """A strategy's decisions about the episodes of a group."""

    survival: Mapping[int, float] = field(default_factory=dict)
    """Probability of survival of an episode, by its index in the group. Those not
    listed survive.
    """
    forks: Sequence[Fork] = ()
    """Forks to start. They start even if their parent is pruned in the same round."""
    fresh: int = 0
    """Number of new episodes to start from the prompt."""


@runtime_checkable
class Brancher(Protocol):
    """A strategy that forks and prunes episodes while they run."""

    look_plan: LookPlan

    def roots(self, group_size: int) -> int: ...

    def decide(self, leaves: Sequence[Leaf], left: int, random: Random) -> Decisions:
        """Return how the episodes of a group continue. All have ended or wait at a place of
        decision.

        At most `left` episodes may be started. `leaves` are in the order of their start. The method
        is called on the event loop whenever all episodes have reached their next place. When all
        have ended, it is called until it starts no more.
        """
        ...


class Texts(Protocol):
    """Functions for texts of episodes and tasks. A note is a text at the end of an episode's
    prompt.
    """

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens of an episode."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text within a reply."""
        ...

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens of an episode, with all control tokens."""
        ...

    def encode_whole(self, text: str, after: str) -> tuple[int, ...]:
        """Return the tokens of a text of `whole` that follows the text `after`."""
        ...

    def parse(self, tokens: Sequence[int]) -> Message:
        """Return the tokens of a reply as a message."""
        ...

    def written(self, text: Trajectory) -> str:
        """Return what the policy wrote about an episode in `text`, without its reasoning."""
        ...

    def prompt(self, instructions: str, **texts: str) -> str:
        """Return a note that asks the policy to write a text, with instructions and named texts.

        Of each text, only the end is used if needed, so that half of the context is left for the
        reply.
        """
        ...

    def words(self, episode: Trajectory) -> str:
        """Return the text of an episode's task, or its prompt if the task has no text."""
        ...

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a reply."""
        ...

    def end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return these tokens of a reply with an end token, unless they have one."""
        ...

    def room(self, episode: Trajectory, at: int) -> int:
        """Return how many tokens can follow in a reply from token `at` of an episode on.

        One token of the reply's limit is kept free, for the policy to sample.
        """
        ...

    def solution(self, task: Task, field: str) -> tuple[int, ...]:
        """Return the tokens of a reply that solves a task, without its end token.

        `field` names the field of the task's data with the solution. If it is empty, the first
        reply of the task set's demonstration is used. Raises `ConfigError` if there is no solution.
        """
        ...

    async def correction(self, episode: Trajectory) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of tokens before an episode's first wrong reply or step, and right
        tokens for it.

        None if nothing can be corrected.
        """
        ...


@runtime_checkable
class Strategy(Protocol):
    """A technique that adds episodes to a group in rounds, by the results of earlier rounds."""

    def roots(self, group_size: int) -> int:
        """Return the number of episodes with which a group begins, at least 1.

        `group_size` is `schedule.group_size`, or the number that an allocator chose.
        """
        ...

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork | None]:
        """Return the starts of the episodes of the next round. None is a start from the prompt.

        `rounds` has the results of all earlier rounds, in order. The first are those of the
        episodes that began the group. All have ended. An empty result ends the group. The result
        must depend only on the arguments and the state. For a resumed group, the method is called
        again for each round.
        """
        ...


@runtime_checkable
class AsksOthers(Protocol):
    """A strategy whose forks may depend on other models, or on the user's code.

    The journal records each round before its episodes begin, and a resumed run reads it there.
    """

    asks_others: bool
    """False if the technique's options turn these requests off."""

    def prepare(self, texts: Texts) -> None:
        """Load the other models, before the first group begins.

        Raises `ConfigError` if one cannot be used.
        """
        ...


@runtime_checkable
class TaskNamer(Protocol):
    """A strategy that stores texts of a task, and finds them when the task is drawn again."""

    def name_tasks(self, identify: Callable[[Task], str]) -> None:
        """Receive a function that identifies tasks. It is called before the first group begins.

        `identify` returns the same string each time the same task is drawn.
        """
        ...


@runtime_checkable
class SolutionReader(Protocol):
    """A strategy that uses solutions of tasks."""

    solution_field: str
    """The field of the task's data with the solution. Empty: the task set's
    demonstration is used.
    """


class GradientNorms(Protocol):
    """A function that computes gradient norms of the log-probabilities of sequences."""

    def __call__(self, sequences: Sequence[int], part: GradientPart) -> Tensor:
        """Return the norms `[n]`, float64, for the sequences of the batch with these indices.

        A sequence's log-probability is summed over its sampled tokens, under the current policy.
        Each norm needs a forward and a backward pass; with the part `head`, the backward pass omits
        the layers.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Values of a batch from which shapers compute advantages. Tensors are `[T]`, without
    gradients.

    A tensor is empty if no chosen technique requires it.
    """

    old_logp: Tensor
    logp: Tensor
    """Log-probability of each token under the current policy."""
    reference_logp: Tensor
    """Log-probability of each token under the policy from which the run started."""
    entropy: Tensor
    """Entropy of the current policy's distribution at each sampled token, in nats."""
    gradient_norms: GradientNorms
    progress: float
    """Share of the run's optimizer steps that are done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """The advantages that a shaper computed for a batch, `[T]`, and a mask of
    tokens to train on.
    """

    advantage: Tensor
    keep: Tensor
    """False for tokens that get no gradient. They still count in the divisor of the loss."""


@runtime_checkable
class Shaper(Protocol):
    """A technique that changes the advantages of a prepared batch, token by token."""

    def shape(self, batch: Batch, signals: Signals) -> Shaped: ...


@runtime_checkable
class Ratio(Protocol):
    """A technique that replaces the ratio of each token in the objective."""

    def log_ratio(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
        """Return the logarithm of each token's ratio, `[T]`.

        `batch` has some sequences of a minibatch. The gradient by the token's own `logp` must be 1.
        The result is 0 for tokens that were not sampled.
        """
        ...


@runtime_checkable
class Objective(Protocol):
    """A technique that replaces the loss of each token."""

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        """Return the loss of each token.

        `log_ratio` `[T]` is the logarithm of the token's ratio. `batch` has some sequences of a
        minibatch. `options` are those of the section `objective`.
        """
        ...


@runtime_checkable
class Distiller(Protocol):
    """A technique that adds a divergence from a teacher to the loss of each token."""

    options: DistilConfig

    def rewarded(self, batch: Batch, teacher_logp: Tensor, logp: Tensor) -> Batch:
        """Return the sequences of a training pass with new advantages.

        `teacher_logp` and `logp` `[T]` are log-probabilities under teacher and policy in this pass.
        `teacher_logp` is empty if the loss uses `divergence` instead.
        """
        ...

    def divergence(self, logp: Tensor, teacher_logp: Tensor) -> Tensor:
        """Return the divergence `[R]`, with a gradient, of log-probabilities `[R, V]`."""
        ...


@runtime_checkable
class Diagnostic(Protocol):
    """A technique that adds metrics and changes nothing else."""

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        """Return metrics of the groups of a batch, by full name: no prefix is added.

        The method is called before filters act. `groups` have the environment's rewards. `graded`
        are the same groups with the rewards after all reward techniques.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Values that are known before an optimizer step changes the weights."""

    log_weight: Tensor
    """The logarithm of pi / mu for each sequence, `[n]` in float64: the sum over its sampled
    tokens. pi is the current policy, mu the engine's policy that sampled the sequence.
    """
    grad_norm: float
    """The norm of the gradient before clipping."""
    gradient_noise: float = math.nan
    """An estimate of the total variance of the gradient, from two halves of the step's groups. NaN
    if no technique requires `halves`, and for a step with fewer than two groups.
    """
    kl: float = math.nan
    """KL(pi_old || pi) per sampled token, in nats (k3). pi_old is the policy of `old_logp`."""
    kl_of_batch: float = math.nan
    """KL(pi_old || pi) as in `kl`, but only over tokens that are one batch old. It measures how far
    the previous batch changed the policy. NaN without such tokens.
    """


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A controller's decision about an optimizer step."""

    lr_factor: float = 1.0
    """Factor by which the learning rate is multiplied in this step."""
    skip: bool = False
    """True if the step must not change the weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the batch to log, by full name such as `ess_lr/effective_share`: no prefix is
    added.
    """


@runtime_checkable
class StepController(Protocol):
    """A technique that changes the learning rate of an optimizer step, or skips the step."""

    def plan(self, seen: StepSeen) -> StepPlan: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a group that was trained on."""

    task: str
    """The identity of the task: the same string each time the task is drawn."""
    num_batches: int
    """Number of batches on which the weights that sampled the group's newest tokens were trained.

    It equals the version number of these weights, unless a resumed run has skipped numbers.
    """
    lag: int
    """Number of batches between the weights that sampled the group's newest tokens and the weights
    from which the step started.
    """
    rewards: tuple[float, ...]
    """The rewards of the finished episodes. Forked and pruned episodes are left out."""
    failures: int
    tokens: int
    """Number of sampled tokens of the group's finished episodes, further conversations included."""
    added: int = 0
    """Number of entries at the end of `rewards` that belong to episodes which an allocator added.
    """
    success_turns: tuple[int, ...] = ()
    """The number of turns of each successful episode."""
    turn_limit: int = 0
    """The limit of turns of the group's episodes. 0 if only `rollout.max_turns` limited them."""
    cut_off: int = 0
    """Number of finished episodes that a limit of turns, calls or tokens ended."""
    budget: EpisodeBudget = NO_BUDGET
    """The limits of each episode of the group."""


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A group of a batch that is trained on for the first time."""

    group: Group
    task: str
    """The identity of the task: the same string each time the task is drawn."""


@runtime_checkable
class Source(Protocol):
    """A technique that adds stored groups to the fresh groups of a batch."""

    max_age: int
    """Largest age of an added token, in versions. The training loop checks it."""

    def take(self, fresh: Sequence[FreshGroup], *, seed: int) -> Sequence[Batch]:
        """Return batches of stored groups that join the fresh groups.

        Their sampled tokens have the provenance REPLAYED, and `Batch.stored` their old
        log-probabilities. The result depends only on the state, the fresh groups and `seed`.
        """
        ...

    def offer(self, fresh: Sequence[FreshGroup], batch: Batch, lag: Tensor) -> None:
        """Receive a batch before it is trained on, and prepare what `observe` stores of it.

        The method is called in the trainer's thread, because copying takes long. `batch.stored` has
        the old log-probabilities of all tokens. `lag` `[T]` is the age of each sampled token, in
        versions. The batch also contains replayed sequences.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """A technique with state that changes during a run and is saved in checkpoints."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Update the state from the results of the groups of a batch that was trained on."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Techniques:
    """The techniques that a run uses, in the order of the option `techniques`."""

    def __init__(
        self, parts: Mapping[str, object] | None = None, *, needs: frozenset[Need] = frozenset()
    ) -> None:
        self.parts = dict(parts or {})
        self.needs = needs
        """The inputs that the techniques in `parts` require, such as the entropy of every token."""
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
        strategies = Strategy | Brancher
        self.strategy = next((each for each in values if isinstance(each, strategies)), None)
        self.allocator = next((each for each in values if isinstance(each, Allocator)), None)
        self.shapers = [each for each in values if isinstance(each, Shaper)]
        self.ratio = next((each for each in values if isinstance(each, Ratio)), None)
        self.objective = next((each for each in values if isinstance(each, Objective)), None)
        self.distiller = next((each for each in values if isinstance(each, Distiller)), None)
        self.controllers = [each for each in values if isinstance(each, StepController)]
        self.sources = [each for each in values if isinstance(each, Source)]
        self._fresh: Sequence[FreshGroup] = ()
        """The fresh groups of the batch in training, which sources receive."""

    @classmethod
    def of(cls, config: RunConfig) -> Techniques:
        """Create the techniques that a configuration chooses.

        Raises `ConfigError` for a technique with state if there are training ranks
        (`cluster.trainers`).
        """
        entries = chosen(config.techniques)
        options = completed_options(config)
        parts = {entry.name: entry.makes(options[entry.name]) for entry in entries}
        needs = frozenset[Need]().union(*(entry.requires for entry in entries))
        made = cls(parts, needs=needs)
        for part in parts.values():
            if isinstance(part, ForecastReader) and isinstance(made.sampler, Forecaster):
                part.use_forecasts(made.sampler)
        if config.cluster.trainers and made.stateful:
            raise ConfigError(
                f"the techniques {', '.join(made.stateful)} need cluster.trainers = 0, got "
                f"{config.cluster.trainers}: ranks do not save their state"
            )
        return made

    @property
    def stateful(self) -> dict[str, Observer]:
        """The techniques with state, by the name under which checkpoints save their state."""
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

        `compute` returns the hidden states of the sequences of a batch. With `replay_experts` its
        forward passes use the experts that the engine recorded.
        """
        finished = [each.led() for group in groups for each in group.finished]
        scored = [ScoredTrajectory(each, (0.0,)) for each in finished]
        batch = collate(scored, replay_experts=replay_experts)
        for reader in self.states_readers:
            reader.read_states(groups, compute(batch, reader.query))

    def credit(  # noqa: PLR0913 - three of them are functions
        self,
        groups: Sequence[Group],
        *,
        progress: float,
        version: int,
        estimate: Callable[[Sequence[Group]], list[ScoredTrajectory]],
        identify: Callable[[Task], str],
        answer: Callable[[Trajectory], str] = lambda episode: "",
        texts: Texts | None = None,
        whole: bool = True,
    ) -> tuple[list[ScoredTrajectory], Mapping[str, float]]:
        """Return the trajectories of a batch to train on, with advantages, and the techniques'
        metrics.

        Reward terms act first, then diagnostics, filters, the estimator, recredits, and filters by
        advantage. `estimate` is the configured estimator, which an estimator technique replaces. If
        filters leave no trajectory of the batch, all its trajectories are returned with advantage
        0. The other arguments are those of `CreditContext`.
        """
        context = CreditContext(progress, version, identify, answer, texts, whole=whole)
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
        """Return the combined decision of all controllers about an optimizer step.

        Their factors are multiplied. The step is skipped if at least one controller skips it.
        """
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
        """Largest age of a replayed token, in versions. 0 if no technique replays groups."""
        return max((source.max_age for source in self.sources), default=0)

    def replayed(
        self, groups: Sequence[Group], seed: int, *, identify: Callable[[Task], str]
    ) -> Sequence[Batch]:
        """Return batches of stored groups that join the fresh `groups` of a batch.

        `seed` determines random choices among stored groups.
        """
        self._fresh = [FreshGroup(group, identify(group.task)) for group in groups]
        return [batch for source in self.sources for batch in source.take(self._fresh, seed=seed)]

    def prepared(self, batch: Batch, lag: Tensor) -> None:
        """Pass a batch to the sources before it is trained on.

        `batch.stored` must have all old log-probabilities. The batch's fresh groups are those of
        the last call of `replayed`. `lag` `[T]` is the age of each sampled token, in versions.
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
        """Pass the results of a batch that was trained on to the techniques with state.

        `num_batches` is the number of batches that were trained on before this one. `lag` converts
        a tensor of versions into their ages in batches. `identify` returns a task's identity.
        """
        self._fresh = ()
        observers = self.stateful.values()
        if not observers:
            return
        outcomes = [_outcome(group, num_batches, identify(group.task), lag=lag) for group in groups]
        for observer in observers:
            observer.observe(outcomes)


def _describe_selection(before: Sequence[Group], after: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of filters: shares of the finished episodes that are trained on.

    There is one share for all episodes, one for successes and one for failures. A share of no
    episodes is NaN.
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
    """Return the scored trajectories whose episodes are still in `Group.trajectories`."""
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
    # A forked episode depends on its parent, and ran only part of its turns.
    roots = [each for each in trajectories if each.fork is None and each.stop != "pruned"]
    versions = [version for one in conversations for version in one.versions]
    age = int(lag(torch.tensor(max(versions)))) if versions else 0
    return Outcome(
        task=task,
        num_batches=num_batches - age,
        lag=age,
        rewards=tuple(each.reward for each in roots),
        failures=len(group.failures),
        tokens=sum(each.num_sampled_in_all for each in trajectories),
        added=sum(each.episode in group.added for each in roots),
        success_turns=tuple(each.num_turns for each in roots if each.success),
        turn_limit=group.turn_limit.turns if group.turn_limit else 0,
        cut_off=sum(each.stop in CUT_OFF for each in roots),
        budget=group.budget,
    )


NO_TECHNIQUES = Techniques()
"""The techniques of a run that chooses none."""
