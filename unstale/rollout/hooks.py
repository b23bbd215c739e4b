"""Calls of techniques (optional training methods) and advantage estimator in a run's steps."""

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
    """The calls of a run's techniques (optional training methods) by the training loop."""

    techniques: Techniques
    selection: Selection
    estimate: Callable[[Sequence[Group]], list[ScoredTrajectory]]
    """The advantage estimator that the run's options choose."""
    identify: Callable[[Task], str]
    """A function that returns a task's identity, which all repetitions of the task share."""
    answer: Callable[[Trajectory], str]
    """A function that returns the answer of an episode, empty if the task set reads none."""
    lag: Callable[[Tensor], Tensor]
    """A function that maps the weight versions of tokens `[T]` to the tokens' ages, as numbers of
    trained batches.
    """
    resize: Callable[[int, int], None]
    """A function `(group, size)` that writes the new number of episodes of a group to the
    journal.
    """
    hidden_states: Callable[[Batch, StatesQuery], HiddenStates] | None
    """A function that computes hidden states of the policy. None with several trainer ranks, where
    techniques that need hidden states are refused.
    """
    texts: Texts
    """What strategies do with texts."""
    seed: int
    replay_experts: bool
    """True if the forward passes for hidden states use the experts that were recorded during
    sampling.
    """
    group_size: int = 1
    """Largest number of episodes of a group whose episodes are forked while they run."""
    record_round: Callable[[int, Mapping[str, Any]], None] = lambda group, decisions: None
    """A function that writes a round of decisions about the episodes of a group to the journal."""
    give_lessons: Callable[[Batch, Sequence[Group]], Batch] | None = None
    """A function that adds each sequence's lesson to a batch: its teacher, and text that only the
    teacher reads. None if the run has no such teacher.
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
        """Return the starts of the next round's episodes, or of those that are missing in a round.

        A resumed group may have a part of a round: the journal has it as episodes.
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
        """Return the batch as the trainer receives it, with additions by techniques and lessons."""
        return self.give_lessons(batch, groups) if self.give_lessons else batch

    def replayed(self, groups: Sequence[Group], step: int) -> Sequence[Batch]:
        if not self.techniques.sources:
            return ()
        seed = derive_seed(self.seed, "replay", step)
        return self.techniques.replayed(groups, seed, identify=self.identify)

    def trained(self, groups: Sequence[Group], step: int) -> None:
        self.selection.ended(groups)
        self.techniques.consumed(groups, step - 1, lag=self.lag, identify=self.identify)
