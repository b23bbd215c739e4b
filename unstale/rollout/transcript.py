"""Record and replay of one attempt at an episode.

The record is a list of pieces: successive tokens that are all context, or were all sampled by one
version. A piece is written to the journal before other code uses it. A resumed run repeats the
attempt with the recorded replies, and the environment or agent must produce the recorded text
again. If it does not, the episode starts from its beginning.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any, Protocol

from unstale.engines.prefixes import EpisodeTokens
from unstale.envs import Forkable, Resumable, Turn
from unstale.envs.hooks import EnvCaller
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    Fork,
    PendingPiece,
    Piece,
    Sampled,
    Trajectory,
    is_reply,
    link_experts,
)
from unstale.rollout.rounds import UNLIMITED, Looks
from unstale.rollout.seeds import derive_seed
from unstale.rollout.states import EnvState, EnvStates


class NotReplayed(Exception):
    """Error: a resumed attempt's environment or agent did not repeat the recorded text."""


class TextNotRepeated(NotReplayed):
    """Error: an environment gave other answers than the text of a fork has."""


class EpisodeWriter(Protocol):
    """The interface that receives the record of one attempt at an episode, such as the
    journal's.
    """

    def write_piece(self, position: int, piece: Piece) -> None: ...

    def write_snapshot(self, num_pieces: int, state: str) -> None: ...

    def write_outcome(self, outcome: Trajectory | Failure) -> None: ...

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


OpenWriter = Callable[..., EpisodeWriter]
"""A function that opens the journal's record of an attempt. It gets the arguments `episode` and
`seed`, and `again`, which is True if the journal already has this attempt. For a forked episode it
also gets `fork`, and as `prefix` the tokens before the fork, which it writes at once. For a
conversation with a role it gets `role`.
"""


class NullWriter:
    """An `EpisodeWriter` that discards the record."""

    def __init__(self, *_: int, **__: Any) -> None: ...

    def write_piece(self, position: int, piece: Piece) -> None: ...

    def write_snapshot(self, num_pieces: int, state: str) -> None: ...

    def write_outcome(self, outcome: Trajectory | Failure) -> None: ...

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


class Transcript:
    """The tokens of one attempt at an episode, and of its branches.

    A branch is a further conversation of the attempt. It begins when an external agent edits its
    history. The pieces of `record` are replayed first. Without a record, a forked episode first
    replays `prefix`, the pieces before the fork. `on_piece` is called with all newly sampled
    tokens.
    """

    __slots__ = (
        "_has_outcome",
        "_on_piece",
        "_open_writer",
        "_opens_at_reply",
        "_recorded",
        "_snapshot",
        "_states",
        "branches",
        "episode",
        "fork",
        "looks",
        "pieces",
        "role",
        "seed",
        "start",
        "task_set",
        "tokens",
        "writer",
    )

    def __init__(  # noqa: PLR0913 - two of them are callbacks
        self,
        episode: int,
        seed: int,
        open_writer: OpenWriter = NullWriter,
        *,
        record: EpisodeRecord | None = None,
        on_piece: Callable[[PendingPiece], None] = lambda piece: None,
        is_branch: bool = False,
        fork: Fork | None = None,
        prefix: Sequence[Piece] = (),
        role: str = "",
        looks: Looks | None = None,
        states: EnvStates | None = None,
        task_set: str = "",
    ) -> None:
        """Create the transcript. `states` keeps the states of the environment, for forks."""
        self.episode = episode
        self.fork = fork
        self.looks = looks
        """The places at which a strategy decides how the episode continues. None without such
        places.
        """
        self.task_set = task_set
        """The name of the task's task set, by which engines may be chosen."""
        self.role = role
        """The role of the policy in this conversation. Empty if the task set has no roles."""
        self.seed = seed
        """Seed of the random numbers for sampling."""
        self.pieces: list[Piece] = []
        self.tokens = EpisodeTokens()
        """All tokens of the attempt so far."""
        self.branches: list[Transcript] = []
        self.writer: EpisodeWriter = NullWriter(episode=episode, seed=seed)
        self._open_writer = open_writer
        self._on_piece = on_piece
        self._recorded = [*record.pieces] if record else [*prefix]
        """Recorded tokens that have not been replayed yet."""
        self._snapshot = record.snapshot if record else None
        self._states = states
        self.start: EnvState | None = None
        """The parent's state with which a forked episode begins. None to send its replies again."""
        if states and fork and self._snapshot is None:
            self.start = states.begin(episode, fork)
        self._has_outcome = record is not None and record.outcome is not None
        self._opens_at_reply = is_branch and record is None
        """True for a new branch (conversation) before its first reply. The journal gets no record
        of it until then.
        """
        if not self._opens_at_reply:
            self._open(again=record is not None)
        for branch in record.branches if record else ():
            self.add_branch(branch.episode, branch, role=branch.role)

    def _open(self, *, again: bool) -> None:
        start: dict[str, Any] = {"episode": self.episode, "seed": self.seed, "again": again}
        if self.fork and not again:
            start |= {"fork": self.fork, "prefix": tuple(self._recorded)}
        if self.role:
            start["role"] = self.role
        self.writer = self._open_writer(**start)
        for position, piece in enumerate(self.pieces):
            self.writer.write_piece(position, piece)
        self._opens_at_reply = False

    def add_branch(
        self, episode: int, record: EpisodeRecord | None = None, *, role: str = ""
    ) -> "Transcript":
        """Begin and return a branch: a further conversation, with a sampling seed of its own.

        The journal records it as episode number `episode`. `record` is its record from before a
        resume, with its seed. A new branch gets the first derived seed that no other branch has. It
        cannot be derived from the number of branches, because branches without a reply are not
        recorded.
        """
        used = {branch.seed for branch in self.branches}
        seeds = (derive_seed(self.seed, "branch", number) for number in count(1))
        branch = Transcript(
            episode,
            record.seed if record else next(seed for seed in seeds if seed not in used),
            self._open_writer,
            record=record,
            on_piece=self._on_piece,
            is_branch=True,
            role=role,
            task_set=self.task_set,
        )
        self.branches.append(branch)
        return branch

    @property
    def replaying(self) -> bool:
        """True while the attempt, or another conversation of it, replays its record from before a
        resume.
        """
        return bool(self._recorded) or any(branch.replaying for branch in self.branches)

    @property
    def has_reply(self) -> bool:
        return any(isinstance(piece, Sampled) for piece in self.pieces)

    @property
    def first_version(self) -> int:
        """The version that sampled the attempt's first token. -1 if no token is sampled yet."""
        return next((each.version for each in self.pieces if isinstance(each, Sampled)), -1)

    @property
    def all_pieces(self) -> list[Piece]:
        """The tokens so far, followed by the recorded tokens that have not been replayed yet."""
        return [*self.pieces, *self._recorded]

    async def restore(self, caller: EnvCaller) -> tuple[Turn, list[float]] | None:
        """Resume a `Resumable` environment from its snapshot, or from its parent's at a fork, and
        replay the record up to that place. A copy has the state already.

        Return the last turn before the snapshot, without its messages, and the list of rewards of
        all turns until then. Return None if there is no such state.
        """
        start, snapshot = self.start, self._snapshot
        if start:
            ends = accumulate(len(piece.tokens) for piece in self._recorded)
            snapshot = sum(end <= start.num_tokens for end in ends), start.text
        if snapshot is None or not (Resumable in caller.kinds or (start and start.copy)):
            return None
        num_pieces, state = snapshot
        turn_rewards, env_state, *last = json.loads(state)
        rewards, facts = last or ({}, {})  # journals before 0.2 lack them
        if not (start and start.copy):
            await caller(caller.env.resume, env_state)
        for _ in range(num_pieces):
            self._replay()
        if start:
            self._write_snapshot(state, env_state)
        return Turn((), rewards=rewards, facts=facts), [*turn_rewards]

    async def save_state(
        self, caller: EnvCaller, turn: Turn, turn_rewards: Sequence[float]
    ) -> None:
        """Write a snapshot of a `Resumable` environment to the journal. Keep its state for forks.

        `turn` is the environment's last answer. Its rewards and facts (reported numbers) are stored
        with the snapshot, like `turn_rewards`, the rewards of all turns.
        """
        copies = self._states is not None and Forkable in caller.kinds
        saves = Resumable in caller.kinds and (self._states is not None or self._is_last_turn)
        if not (copies or saves):
            return
        env_state = None
        if saves:
            env_state = await caller.hook("snapshot()", lambda: caller.env.snapshot())
        last = (dict(turn.rewards), dict(turn.facts))
        state = json.dumps([list(turn_rewards), env_state, *last])
        self._write_snapshot(state, env_state)
        if self._states is not None and (copies or env_state is not None):
            copy = await caller.fork() if copies else None
            self._states.add(self.episode, EnvState(len(self.tokens), state, copy))

    @property
    def _is_last_turn(self) -> bool:
        """True if the record has no further turn of the environment, but perhaps a part of a
        reply.
        """
        return all(map(is_reply, self._recorded))

    def _write_snapshot(self, state: str, env_state: str | None) -> None:
        """Write the state to the journal, unless the environment has no snapshot or the attempt
        still replays its record.
        """
        if env_state is not None and self._is_last_turn:
            self.writer.write_snapshot(len(self.pieces), state)

    def add_context(self, piece: ContextPiece) -> None:
        """Add context tokens. During a replay, compare them with the recorded ones instead.

        Raises `NotReplayed` if they differ.
        """
        if not self._recorded:
            self.append(piece)
            return
        recorded = self._recorded[0]
        if recorded != piece:
            raise self._not_replayed(
                f"piece {len(self.pieces)} has other tokens than the "
                f"{len(recorded.tokens)} on record"
            )
        self._replay()

    def replay_reply(self) -> Iterator[Piece]:
        """Yield the recorded parts of the next reply, and add each to the transcript.

        There are several if several versions sampled the reply, or if the episode was forked within
        it.
        """
        while self._recorded and is_reply(piece := self._recorded[0]):
            self._replay()
            yield piece

    def require_replayed(self) -> None:
        """Raise `NotReplayed` if the resumed attempt has not repeated its whole record."""
        if self._recorded:
            raise self._not_replayed(f"{len(self._recorded)} recorded pieces were not requested")

    def _not_replayed(self, problem: str) -> NotReplayed:
        """Return the error that an attempt differs from its record. It blames the text of the fork
        if the attempt differs there, and the text has answers that could differ.
        """
        text = self.fork.text if self.fork else ()
        if self.fork and any(isinstance(each, ContextPiece) for each in text):
            end = self.fork.at + sum(len(each.tokens) for each in text)
            if self.fork.at <= len(self.tokens) < end:
                return TextNotRepeated(problem)
        return NotReplayed(problem)

    async def look(self, *, going: bool) -> None:
        """Wait for the decision at each place that the episode has reached (see `Looks.visit`).

        `going` is True if the last reply is incomplete. Raises `Pruned` if a decision ends the
        episode.
        """
        if self.looks:
            await self.looks.visit(self.episode, self.pieces, going=going)

    def until_look(self, length: int) -> int:
        """Return the number of tokens to sample until the next place of decision.

        `length` is the number of tokens of the reply so far.
        """
        return self.looks.left(length) if self.looks else UNLIMITED

    def weight(self) -> dict[str, float]:
        """Return the episode's importance weight as a fact (reported number). Empty if it is 1."""
        return self.looks.facts() if self.looks else {}

    def append(self, piece: Piece) -> None:
        """Write new tokens to the journal, then add them to the transcript."""
        if isinstance(piece, Sampled):
            piece = link_experts(piece, self.pieces)
        if self._opens_at_reply and isinstance(piece, Sampled):
            self._open(again=False)
        self.writer.write_piece(len(self.pieces), piece)
        start = len(self.tokens)
        self._add(piece)
        if isinstance(piece, Sampled):
            self._on_piece(PendingPiece(self.episode, self.tokens, start, piece))

    def known_experts(self) -> tuple[int, int]:
        """Return the version that sampled last, and the number of tokens with recorded experts.

        These are the experts that an MoE model chose for each token. (-1, 0) if none are recorded.
        """
        last = next((p for p in reversed(self.pieces) if isinstance(p, Sampled)), None)
        return (
            (last.version, last.routed_experts.covered) if last and last.routed_experts else (-1, 0)
        )

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        """Write the attempt's outcome to the journal, unless the journal already has it."""
        if not self._has_outcome:
            self.writer.write_outcome(outcome)
            self._has_outcome = True

    def _replay(self) -> None:
        self._add(self._recorded.pop(0))

    def _add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.tokens.extend(piece.tokens)
