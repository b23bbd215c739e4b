"""`bus`: some episodes of a group begin with what other runs wrote for the same task.

A group begins with episodes of its own. Then `number` episodes follow. Each begins with the text of
another run's episode that solved the task. If there are too few texts, the rest begin without text.
Such text is FOREIGN: its log-probability under the policy that wrote it is known only for texts of
`load`. The text includes all turns of the other episode. The environment must repeat its
observations. The policy ends the last reply, and this run's environment gives the reward. The
reward in the other run is not used. The advantage is the reward minus the mean reward of the group.
Foreign text is trained on where its advantage is above 0.

The texts come from a directory `folder` that several runs share. Each run writes the texts of its
successes there, and encodes the others' with its own tokenizer. Texts of several turns are used
where both runs write the prompt of the task in the same way. A text whose observations are not
repeated is not tried again (metric `bus/refused`), and its task remains. From SAPO (swarm
sampling). Or they are the successes of an earlier run `load` with the same policy and tasks. With
`when` = failed, texts are used only in groups without a success. From DART, which keeps successes
collected in advance for tasks that always fail, beside those of the run (technique `replay`, which
stores only episodes without foreign text). An allocator's number of episodes includes these
`number`, and a group has at least one more. A technique's limit of turns does not hold for
episodes with foreign text.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby, pairwise
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
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    is_reply,
    is_unrepeated,
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
    "distiller": "which is not built with it, because a teacher scores sampled tokens only",
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
    """Only with `folder`: the name of this run in the directory. No other run may have it."""
    load: str = ""
    """Folder of an earlier run with the same policy and tasks, whose successes are used. Empty:
    none.
    """
    number: Count = 0
    """Largest number of episodes of a group with foreign text; 0 is half of `schedule.group_size`.
    Without enough texts, plain episodes take their place.
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
        self._chosen: dict[int, list[Text]] = {}
        """The texts of each group that runs, by the number of the episode that is forked. Empty
        after the episodes with these texts have ended.
        """
        self._refused: set[tuple[tuple[int, ...], ...]] = set()
        """Tokens of texts whose observations this run's environment did not repeat."""

    def name_tasks(self, identify: Callable[[Task], str]) -> None:
        self._identify = identify

    def roots(self, group_size: int) -> int:
        return max(1, group_size - self._options.number)

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork | None]:
        finished = [each for each in rounds[0] if isinstance(each, Trajectory)]
        if not finished:
            return ()
        own: list[None] = [None] * self._options.number
        trunk = next((each for each in finished if not each.branches), None)
        if trunk is None:
            return own if len(rounds) == 1 else ()
        if len(rounds) > 1:
            # the fork says what was tried: a resumed run may choose other texts than before
            self._refused |= {
                _tokens(each.fork.text) for each in rounds[1] if is_unrepeated(each) and each.fork
            }
            self._chosen[trunk.episode] = []
            return ()
        start = replies(trunk.pieces)[0][0]
        if trunk.episode not in self._chosen:
            prompt = tuple(trunk.tokens[:start])
            self._chosen[trunk.episode] = await self._choose(trunk, prompt, finished, texts)
        chosen = self._chosen[trunk.episode]
        return [*(Fork(trunk.episode, start, text) for text in chosen), *own[len(chosen) :]]

    async def _choose(
        self,
        trunk: Trajectory,
        prompt: tuple[int, ...],
        finished: Sequence[Trajectory],
        texts: Texts,
    ) -> list[Text]:
        """Share a group's successes, and return the texts with which its next episodes begin."""
        task = self._identify(trunk.task)
        found = await asyncio.to_thread(self._exchange, task, prompt, finished, texts)
        if self._options.when == "failed" and any(map(self._solved, finished)):
            return []
        version = min(trunk.versions)
        loaded = await asyncio.to_thread(self._of_earlier_run, task, prompt)
        found += [tuple(_compared(piece, version) for piece in text) for text in loaded]
        found = [text for text in found if _tokens(text) not in self._refused]
        random = Random(derive_seed(trunk.seed, "bus"))
        return random.sample(found, min(len(found), self._options.number))

    def _solved(self, episode: Trajectory) -> bool:
        return episode.reward >= self._options.success_at

    def _exchange(
        self, task: str, prompt: Sequence[int], finished: Sequence[Trajectory], texts: Texts
    ) -> list[Text]:
        """Write the successes of a group to the folder, and return the texts of other runs."""
        own = {
            each.episode: written
            for each in finished
            if self._solved(each) and not each.fork and (written := _written(each, texts))
        }
        read = self._shared.exchange(task, own)
        found = (_in_tokens(each, _digest(prompt, texts), texts) for each in read)
        return [text for text in found if text]

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
            for each in group.finished:
                self._chosen.pop(each.episode, None)
            mean = fmean(each.reward for each in group.finished) if group.finished else 0.0
            for each in group.trajectories:
                advantage = each.reward - mean
                scored += credited(each, advantage)
            number += len(group.trajectories)
            begun += [each for each in group.trajectories if each.fork]
        context.metrics["bus/episode_share"] = len(begun) / max(1, number)
        context.metrics["bus/success_share"] = fmean(map(self._solved, begun)) if begun else 0.0
        context.metrics["bus/lost"] = self._shared.lost
        context.metrics["bus/refused"] = len(self._refused)
        return scored


def foreign(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], Text]:
    """Return the prompt of an episode, and the rest of it as foreign text.

    The last token is left out, because the policy ends the last reply itself. The text is empty
    if the episode does not end with a reply, or if its last reply has one token.
    """
    prompt: tuple[int, ...] = ()
    text: list[ContextPiece | Placed] = []
    for piece in pieces:
        if is_reply(piece):
            text.append(_foreign(piece))
        elif text:
            assert isinstance(piece, ContextPiece), "all others are replies"
            text.append(piece)
        else:
            prompt += piece.tokens
    if not text or not isinstance(last := text.pop(), Placed):
        return prompt, ()
    if len(last.tokens) > 1:
        source = last.source_logp
        text.append(replace(last, tokens=last.tokens[:-1], source_logp=source and source[:-1]))
    return prompt, tuple(text) if text and isinstance(text[-1], Placed) else ()


def _foreign(piece: Piece) -> Placed:
    """Return a piece of a reply as foreign text.

    Its source is known if the other policy sampled it from its whole vocabulary.
    """
    if isinstance(piece, Sampled) and piece.kept_sets is None:
        return Placed(piece.tokens, Provenance.FOREIGN, piece.version, piece.behavior_logp)
    return Placed(piece.tokens, Provenance.FOREIGN)


def _compared(piece: ContextPiece | Placed, version: int) -> ContextPiece | Placed:
    """Return foreign text whose source is compared with a version of this run."""
    if isinstance(piece, Placed) and piece.source_logp is not None:
        return replace(piece, version=version)
    return piece


def _tokens(text: Text) -> tuple[tuple[int, ...], ...]:
    return tuple(piece.tokens for piece in text)


def _digest(prompt: Sequence[int], texts: Texts) -> str:
    """Return a digest of a prompt's text, which is equal for runs that write it in the same way."""
    return blake2b(texts.whole(prompt).encode(errors="replace"), digest_size=8).hexdigest()


def _written(episode: Trajectory, texts: Texts) -> str:
    """Return an episode as JSON: the digest of its prompt, then the texts of its replies and of the
    observations between them, in turn.

    Empty if it has several conversations, or pictures among its observations.
    """
    prompt, text = foreign(episode.pieces)
    seen = any(isinstance(each, ContextPiece) and each.pictures for each in text)
    if not text or seen or episode.branches:
        return ""
    parts = [
        texts.whole([token for piece in part for token in piece.tokens])
        for _, part in groupby(text, lambda piece: isinstance(piece, Placed))
    ]
    return json.dumps([_digest(prompt, texts), *parts])


def _in_tokens(written: str, prompt: str, texts: Texts) -> Text:
    """Return an episode of another run in this run's tokens, where `prompt` is the own digest.

    Empty if `written` is not an episode, or has several turns and another prompt.
    """
    try:
        digest, *parts = json.loads(written)
    except (ValueError, TypeError, RecursionError):
        return ()
    if len(parts) % 2 == 0 or not all(isinstance(each, str) and each for each in parts):
        return ()
    if len(parts) > 1 and digest != prompt:
        return ()
    found: list[ContextPiece | Placed] = []
    for at, (before, part) in enumerate(pairwise(["", *parts])):
        tokens = texts.encode_whole(part, before)
        found.append(ContextPiece(tokens) if at % 2 else Placed(tokens, Provenance.FOREIGN))
    return tuple(found)


def _check(options: BusConfig, config: RunConfig) -> None:
    if not (options.folder or options.load):
        raise ConfigError(
            "the technique bus needs bus.folder or bus.load, which name where foreign texts are"
        )
    check_number("bus", options.number, config)
    reason = "otherwise foreign text has no loss: its source is unknown"
    allowed = ["anchor"] if options.folder else ["anchor", "guided"]
    require_value("bus", "objective.placed", config.objective.placed, allowed, reason)
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
        "this run's environment rewards them, and they are trained on where they helped"
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
    "exact. Foreign text has the loss of docs/placed.md. With anchor that is weighted imitation. "
    "With guided, which needs `load` without `folder`, text and later tokens have the weight "
    "pi / nu of the policy nu that sampled the text; text sampled with top-k or the like has no "
    "loss then. Texts are kept because they succeeded, so the gradient is biased towards them in "
    "both. An episode whose observations are not repeated counts as failed. Successes only, and a "
    "directory instead of a network are our own reading.",
    evidence="abstract",
)
