"""`bus`: some episodes of a group begin with what other runs wrote for the same task.

A group begins with episodes of its own. Then at most `number` episodes follow whose reply begins
with the text of another run's episode that solved the task. Such text is FOREIGN: its
log-probability under the policy that wrote it is not known. The policy ends the reply, and this
run's environment gives the reward. The reward in the other run is not used. The advantage is the
reward minus the mean reward of the group. Foreign text is trained on where its advantage is above
0.

The texts come from a directory `folder` that several runs share. Each run writes the texts of its
successes with one reply there, and encodes the others' with its own tokenizer. From SAPO (swarm
sampling). Or they are the successes of an earlier run `load` with the same policy and tasks, with
all their turns, whose observations the environment must repeat. With `when` = failed, texts of
`load` are used only in groups without a success. From DART, which keeps successes collected in
advance for tasks that always fail, beside those of the run (technique `replay`, which stores only
episodes without foreign text). An allocator's number of episodes includes those with foreign
text. A technique's limit of turns does not hold for them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from threading import Lock
from typing import TYPE_CHECKING, Literal

from unstale.config.checks import ConfigError, Count, Section
from unstale.config.techniques import Entry, refuse_slots, require_value
from unstale.records import (
    ContextPiece,
    Failure,
    Fork,
    Group,
    Piece,
    Placed,
    Provenance,
    ScoredTrajectory,
    Task,
    Trajectory,
    is_reply,
    replies,
)
from unstale.research.techniques.hints import check_number, complete_number, credited
from unstale.research.techniques.shared_texts import SharedTexts, check_node
from unstale.research.techniques.success import SuccessThreshold
from unstale.research.techniques.tree import check_sequences
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import CreditContext, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

REFUSED = {
    "distiller": "whose teacher scores sampled tokens only",
    "estimator": "which computes the advantages, too",
    "ratio": "which is computed over whole sequences",
    "recredit": "which compares turns, and foreign text begins some of them",
}
"""Slots whose techniques cannot be used with foreign text, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusConfig(Section, SuccessThreshold):
    """Episodes that begin with what other runs wrote for the same task (SAPO, DART)."""

    folder: str = ""
    """A directory that several runs share, in which each run writes its successes. Empty: none."""
    node: str = ""
    """Only with `folder`: a name of this run in the directory. No other run may have it."""
    load: str = ""
    """Folder of an earlier run with the same policy and tasks, whose successes are used. Empty:
    none.
    """
    number: Count = 0
    """Largest number of episodes of a group with foreign text; 0 is half of `schedule.group_size`.
    """
    when: Literal["always", "failed"] = "always"
    """Groups that get episodes with foreign text: all, or those without a success."""

    def check_combination(self) -> None:
        check_node("bus", self.folder, self.node)


Text = tuple[ContextPiece | Placed, ...]


class Bus:
    """A technique that begins some replies of a group with texts of other runs."""

    def __init__(self, options: BusConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self._identify: Callable[[Task], str] = lambda task: task.key
        self._loaded: dict[str, list[tuple[tuple[int, ...], Text]]] | None = None
        """Prompt and text of each success of the run `load`, by task. None before they are read."""
        self._reading = Lock()
        self._shared = SharedTexts(options.folder, options.node)

    def name_tasks(self, identify: Callable[[Task], str]) -> None:
        self._identify = identify

    def roots(self, group_size: int) -> int:
        return max(1, group_size - self._options.number)

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork]:
        finished = [each for each in rounds[0] if isinstance(each, Trajectory)]
        trunk = next((each for each in finished if not each.branches), None)
        if trunk is None or len(rounds) > 1:
            return ()
        task = self._identify(trunk.task)
        found = await asyncio.to_thread(self._exchange, task, finished, texts)
        if self._options.when == "failed" and any(map(self._solved, finished)):
            return ()
        start = replies(trunk.pieces)[0][0]
        prompt = tuple(trunk.tokens[:start])
        found += await asyncio.to_thread(self._of_earlier_run, task, prompt)
        random = Random(derive_seed(trunk.seed, "bus"))
        chosen = random.sample(found, min(len(found), self._options.number))
        return [Fork(trunk.episode, start, text) for text in chosen]

    def _solved(self, episode: Trajectory) -> bool:
        return episode.reward >= self._options.success_at

    def _exchange(self, task: str, finished: Sequence[Trajectory], texts: Texts) -> list[Text]:
        """Write the successes of a group to the folder, and return the texts of other runs."""
        own = {
            each.episode: texts.text([token for _, said in replies(each.pieces) for token in said])
            for each in finished
            if self._solved(each) and not each.fork and each.num_turns == 1
        }
        found = (texts.encode(text) for text in self._shared.exchange(task, own))
        return [(Placed(tuple(tokens), Provenance.FOREIGN),) for tokens in found if tokens]

    def _of_earlier_run(self, task: str, prompt: tuple[int, ...]) -> list[Text]:
        if not self._options.load:
            return []
        with self._reading:
            if self._loaded is None:
                self._loaded = self._read(Path(self._options.load))
        found = self._loaded.get(task, [])
        if found and found[0][0] != prompt:
            raise ConfigError(
                f"bus.load {self._options.load} has another prompt for the task {task}: it must "
                "be a run with the same tasks, chat template and tokenizer"
            )
        return [text for _, text in found]

    def _read(self, run: Path) -> dict[str, list[tuple[tuple[int, ...], Text]]]:
        """Return the prompts and texts of a run's successes, by task."""
        from unstale.durability.journal import Journal, JournalError

        found = defaultdict(list)
        try:
            with Journal.read(run) as journal:
                for stored in journal.trajectories():
                    episode = stored.trajectory
                    if self._solved(episode) and not episode.branches and not episode.fork:
                        start, text = foreign(episode.pieces)
                        if text:
                            found[self._identify(episode.task)].append((start, text))
        except (OSError, JournalError) as error:
            raise ConfigError(f"bus.load {run}: {error}") from error
        return dict(found)

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        scored: list[ScoredTrajectory] = []
        begun: list[Trajectory] = []
        number = 0
        for group in groups:
            mean = fmean(each.reward for each in group.finished) if group.finished else 0.0
            for each in group.trajectories:
                advantage = each.reward - mean
                scored += credited(each, advantage)
            number += len(group.trajectories)
            begun += [each for each in group.trajectories if each.fork]
        context.metrics["bus/episode_share"] = len(begun) / max(1, number)
        context.metrics["bus/success_share"] = fmean(map(self._solved, begun)) if begun else 0.0
        context.metrics["bus/lost"] = self._shared.lost
        return scored


def foreign(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], Text]:
    """Return the prompt of an episode, and the rest of it as foreign text.

    The last token is left out, because the policy ends the last reply itself.
    """
    prompt: tuple[int, ...] = ()
    text: list[ContextPiece | Placed] = []
    for piece in pieces:
        if not is_reply(piece):
            if text:
                assert isinstance(piece, ContextPiece), "all others are replies"
                text.append(piece)
            else:
                prompt += piece.tokens
        elif text and isinstance(text[-1], Placed):
            text[-1] = replace(text[-1], tokens=text[-1].tokens + piece.tokens)
        else:
            text.append(Placed(piece.tokens, Provenance.FOREIGN))
    if not text or not isinstance(text[-1], Placed) or len(text[-1].tokens) < 2:
        return prompt, ()
    text[-1] = replace(text[-1], tokens=text[-1].tokens[:-1])
    return prompt, tuple(text)


def _check(options: BusConfig, config: RunConfig) -> None:
    if not (options.folder or options.load):
        raise ConfigError(
            "the technique bus needs bus.folder or bus.load, which name where foreign texts are"
        )
    check_number("bus", options.number, config)
    reason = "otherwise foreign text has no loss: its source is unknown"
    require_value("bus", "objective.placed", config.objective.placed, ["anchor"], reason)
    refuse_slots("bus", REFUSED, config)
    if config.deterministic:
        raise ConfigError(
            "deterministic must be false with the technique bus: other runs decide what is read, "
            "so a resumed run may read other texts"
        )
    check_sequences(config, "bus")


def _describe(options: BusConfig) -> str:
    where = " and ".join(filter(None, (options.folder, options.load)))
    which = "a group without a success" if options.when == "failed" else "a group"
    return (
        f"at most {options.number} episodes of {which} begin with texts of other runs ({where}); "
        "this run's environment rewards them, and they are trained on where they helped, which is "
        "imitation"
    )


_MEASURED = """
A combination lock: 8 positions with 4 words each, reward 1 only if all are right. Three nodes of 8
episodes per step, 4 of them with texts of other nodes; one node begins with the first 6 positions
right, the others know nothing. 150 steps, 3 seeds (`tests/techniques/test_bus.py`), the probability
of opening the lock at the end: 0.00 for a node that knows nothing and has no bus, over 0.9 with it.
It has not been measured on the desks.
"""

ENTRY = Entry(
    name="bus",
    slot="strategy",
    rows=(11, 15),
    makes=Bus,
    options=BusConfig,
    changes=frozenset({"count", "advantage", "objective"}),
    describe=_describe,
    requires=frozenset({"siblings", "rewards"}),
    check=_check,
    complete=complete_number,
    use="Tasks always fail here, and other runs, or an earlier one, solved them.",
    measured=_MEASURED,
    exactness="Sampled tokens after foreign text are in their own context, so their D and S are "
    "exact. Foreign text is in no ratio: its loss is weighted imitation (docs/placed.md), and "
    "texts are kept because they succeeded. So the gradient is biased towards what others write. "
    "A task whose loaded answers are not repeated counts as failed. Successes only, a directory "
    "instead of a network, and one reply are our own reading.",
    evidence="abstract",
)
