"""The calls of techniques (optional training methods) and of the advantage estimator in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unstale.rollout.rounds import Rounds
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import Brancher, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import (
        Batch,
        Failure,
        Fork,
        Group,
        GroupRequest,
        ScoredTrajectory,
        Task,
        Trajectory,
    )
    from unstale.rollout.selection import Selection
    from unstale.techniques.hooks import HiddenStates, StatesQuery, Strategy, Techniques, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """The functions through which the training loop calls a run's techniques."""

    techniques: Techniques
    selection: Selection
    estimate: Callable[[Sequence[Group]], list[ScoredTrajectory]]
    """The run's advantage estimator. It returns each trajectory with its advantages."""
    identify: Callable[[Task], str]
    """A function that returns a task's identity: a text that is equal for repetitions of the
    task.
    """
    answer: Callable[[Trajectory], str]
    """A function that returns the answer in an episode's last reply. Empty if the task set defines
    none.
    """
    lag: Callable[[Tensor], Tensor]
    """A function from the weight versions of tokens, `[T]`, to the number of batches trained
    since.
    """
    resize: Callable[[int, int], None]
    """A function `(group, size)` that records in the journal that this group now has `size`
    episodes.
    """
    hidden_states: Callable[[Batch, StatesQuery], HiddenStates] | None
    """A function that computes hidden states of the policy. None with several trainer ranks:
    techniques that need hidden states are then refused.
    """
    texts: Texts
    """The object with which strategies encode, decode and write texts."""
    seed: int
    replay_experts: bool
    """True if forward passes for hidden states route tokens to the experts recorded during
    sampling.
    """
    group_size: int = 1
    """Largest number of episodes of a group, including those that are forked while others run."""
    record_round: Callable[[int, Mapping[str, Any]], None] = lambda group, decisions: None
    """A function `(group, decisions)` that writes one round of fork and prune decisions to the
    journal.
    """
    give_lessons: Callable[[Batch, Sequence[Group]], Batch] | None = None
    """A function that adds a lesson to each sequence of a batch, for distillation. A lesson is the
    index of the teacher and a text that only the teacher reads. None if the run has no lessons.
    """

    @property
    def max_replay_age(self) -> int:
        return self.techniques.max_replay_age

    @property
    def reads_states(self) -> bool:
        return bool(self.techniques.states_readers and self.hidden_states)

    async def more(
        self, request: GroupRequest, results: Sequence[Trajectory | Failure]
    ) -> Sequence[Fork | None]:
        strategy = self.techniques.strategy
        if isinstance(strategy, Strategy):
            if starts := await self._next_round(strategy, results, request.sizes[0]):
                return starts
        elif strategy is not None:
            return ()
        count = self.selection.more(request, results)
        if count:
            self.resize(request.number, len(results) + count)
        return [None] * count

    def rounds(self, request: GroupRequest) -> Rounds | None:
        strategy = self.techniques.strategy
        if not isinstance(strategy, Brancher):
            return None
        return Rounds(strategy, request, self.group_size, self.record_round)

    async def _next_round(
        self, strategy: Strategy, results: Sequence[Trajectory | Failure], roots: int
    ) -> Sequence[Fork | None]:
        """Return the start of each episode of the next round that has not been run yet.

        `roots` is the number of episodes in the first round. After a resume, a round may be
        incomplete.
        """
        rounds = [results[:roots]]
        done = roots
        while True:
            starts = await strategy.forks(rounds, self.texts)
            if not starts or done + len(starts) > len(results):
                return starts[len(results) - done :]
            rounds.append(results[done : done + len(starts)])
            done += len(starts)

    def read_states(self, groups: Sequence[Group]) -> None:
        assert self.hidden_states, "reads_states says whether there are any"
        self.techniques.read_states(groups, self.hidden_states, replay_experts=self.replay_experts)

    def credit(
        self, groups: Sequence[Group], *, progress: float, version: int, whole: bool
    ) -> tuple[list[ScoredTrajectory], Mapping[str, float]]:
        return self.techniques.credit(
            groups,
            progress=progress,
            version=version,
            estimate=self.estimate,
            identify=self.identify,
            answer=self.answer,
            texts=self.texts,
            whole=whole,
        )

    def prepared(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """Return the batch as the trainer receives it. `give_lessons`, if any, adds to it."""
        return self.give_lessons(batch, groups) if self.give_lessons else batch

    def replayed(self, groups: Sequence[Group], step: int) -> Sequence[Batch]:
        if not self.techniques.sources:
            return ()
        seed = derive_seed(self.seed, "replay", step)
        return self.techniques.replayed(groups, seed, identify=self.identify)

    def trained(self, groups: Sequence[Group], step: int) -> None:
        self.selection.ended(groups)
        self.techniques.consumed(groups, step - 1, lag=self.lag, identify=self.identify)
