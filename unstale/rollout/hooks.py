"""The calls of techniques (optional training methods) and of the advantage estimator in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unstale.records import Fork, Placed, Provenance
from unstale.rollout.rounds import Rounds
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import AsksOthers, Brancher, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import (
        Batch,
        Failure,
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
    recorded: dict[int, list[Sequence[Fork | None]]] = field(default_factory=dict)
    """The recorded rounds of each running group whose strategy asks other models: the starts of
    episodes.
    """

    @property
    def max_replay_age(self) -> int:
        """Largest age of a replayed token, in versions. 0 if the run trains on each group once."""
        return self.techniques.max_replay_age

    @property
    def reads_states(self) -> bool:
        """True if a technique reads hidden states of the policy."""
        return bool(self.techniques.states_readers and self.hidden_states)

    async def more(
        self, request: GroupRequest, results: Sequence[Trajectory | Failure]
    ) -> Sequence[Fork | None]:
        """Return which episodes to add to a group whose episodes have all ended.

        There is one element for each added episode: where it is forked from an earlier one, or None
        if it has its own beginning. A new size of the group is recorded in the journal.
        """
        strategy = self.techniques.strategy
        begun = request.sizes[0] if request.sizes else len(results)
        if isinstance(strategy, Strategy):
            starts, begun = await self._next_round(strategy, request, results, begun)
            if starts:
                return starts
        elif strategy is not None:
            return ()
        count = self.selection.more(request, results, begun)
        if count:
            self.resize(request.number, len(results) + count)
        return [None] * count

    def rounds(self, request: GroupRequest) -> Rounds | None:
        """Return an object that decides about a group's episodes while they run.

        None if nothing does.
        """
        strategy = self.techniques.strategy
        if not isinstance(strategy, Brancher):
            return None
        return Rounds(strategy, request, self.group_size, self.record_round)

    async def _next_round(
        self,
        strategy: Strategy,
        request: GroupRequest,
        results: Sequence[Trajectory | Failure],
        roots: int,
    ) -> tuple[Sequence[Fork | None], int]:
        """Return the start of each episode of the next round that has not been run yet, and the
        number of episodes of all rounds before.

        `roots` is the number of episodes in the first round. After a resume, a round may be
        incomplete.
        """
        rounds = [results[:roots]]
        done = roots
        while True:
            starts = await self._starts(strategy, request, rounds)
            if not starts:
                self.recorded.pop(request.number, None)
            if not starts or done + len(starts) > len(results):
                return starts[len(results) - done :], done
            rounds.append(results[done : done + len(starts)])
            done += len(starts)

    async def _starts(
        self,
        strategy: Strategy,
        request: GroupRequest,
        rounds: Sequence[Sequence[Trajectory | Failure]],
    ) -> Sequence[Fork | None]:
        """Return the starts of the round after `rounds`.

        If the strategy asks other models, the journal records them first, because the answers may
        differ when these are asked again.
        """
        if not (isinstance(strategy, AsksOthers) and strategy.asks_others):
            return await strategy.forks(rounds, self.texts)
        known = self.recorded.setdefault(request.number, [*map(_starts_of, request.rounds)])
        if len(known) < len(rounds):
            starts = await strategy.forks(rounds, self.texts)
            row = {"round": len(known), "starts": [*map(_start_row, starts)]}
            self.record_round(request.number, row)
            known.append(starts)
        return known[len(rounds) - 1]

    def read_states(self, groups: Sequence[Group]) -> None:
        """Compute hidden states of a batch's episodes, which techniques use in `credit`.

        Called in the trainer's thread.
        """
        assert self.hidden_states, "reads_states says whether there are any"
        self.techniques.read_states(groups, self.hidden_states, replay_experts=self.replay_experts)

    def credit(
        self, groups: Sequence[Group], *, progress: float, version: int, whole: bool
    ) -> tuple[list[ScoredTrajectory], Mapping[str, float]]:
        """Return the trajectories to train on with their advantages, and metrics.

        `progress` is the share of the run's steps that are done, 0 to 1. `version` is the version
        of the weights before the step. `whole` is False if `groups` are only a part of the batch.
        """
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
        """Return the batch as the trainer receives it: with lessons (`give_lessons`), if the run
        has them.
        """
        return self.give_lessons(batch, groups) if self.give_lessons else batch

    def replayed(self, groups: Sequence[Group], step: int) -> Sequence[Batch]:
        """Return batches of earlier, stored groups that the step trains on besides `groups`."""
        if not self.techniques.sources:
            return ()
        seed = derive_seed(self.seed, "replay", step)
        return self.techniques.replayed(groups, seed, identify=self.identify)

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """Update the state of techniques after a step has trained on `groups`."""
        self.selection.ended(groups)
        self.techniques.consumed(groups, step - 1, lag=self.lag, identify=self.identify)


def _start_row(fork: Fork | None) -> dict[str, Any] | None:
    """Return the start of an episode as a JSON record. Raises ValueError if its text has an
    environment's answers.
    """
    if fork is None:
        return None
    text = []
    for piece in fork.text:
        if not isinstance(piece, Placed) or piece.edit is not None:
            raise ValueError("a recorded start has placed text only, in its own context")
        text.append([piece.tokens, piece.provenance.name, piece.version, piece.source_logp])
    return {
        "parent": fork.parent,
        "at": fork.at,
        "text": text,
        "note": fork.note,
        "writes": fork.writes,
    }


def _starts_of(row: Mapping[str, Any]) -> list[Fork | None]:
    """Return the starts in a record of the journal."""
    return [each and _start_of(each) for each in row["starts"]]


def _start_of(row: Mapping[str, Any]) -> Fork:
    text = [
        Placed(tuple(tokens), Provenance[name], version, source and tuple(source))
        for tokens, name, version, source in row["text"]
    ]
    return Fork(row["parent"], row["at"], tuple(text), row["note"], row["writes"])
