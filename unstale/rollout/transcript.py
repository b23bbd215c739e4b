"""Record and replay of one attempt at an episode, with its branches (other contexts of the agent).

Each new piece of text is written to the journal before other code sees it. After a crash the record
is replayed first: the environment or agent has to produce the same text again.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from unstale.envs import Resumable
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    PendingPiece,
    Piece,
    Sampled,
    Trajectory,
)
from unstale.rollout.seeds import derive_seed


class NotReplayed(Exception):
    """A mismatch between a resumed attempt and its record."""


class EpisodeWriter(Protocol):
    """A destination for the pieces, snapshots and outcome of one attempt."""

    def write_piece(self, position: int, piece: Piece) -> None: ...

    def write_snapshot(self, num_pieces: int, state: str) -> None: ...

    def write_outcome(self, outcome: Trajectory | Failure) -> None: ...

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


OpenWriter = Callable[..., EpisodeWriter]
"""Opens the writer of an attempt. `again` continues a recorded attempt."""


class NullWriter:
    """A writer that keeps nothing."""

    def __init__(self, *_: int, episode: int, seed: int, again: bool = False) -> None: ...

    def write_piece(self, position: int, piece: Piece) -> None: ...

    def write_snapshot(self, num_pieces: int, state: str) -> None: ...

    def write_outcome(self, outcome: Trajectory | Failure) -> None: ...

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


class BranchWriter:
    """The writer of a branch. It opens with the first reply, so empty branches are not recorded."""

    def __init__(self, open_writer: Callable[[], EpisodeWriter], *, closed: bool = False) -> None:
        self._open = open_writer
        self._writer: EpisodeWriter | None = None
        self._unwritten: list[tuple[int, Piece]] = []
        self._closed = closed

    def write_piece(self, position: int, piece: Piece) -> None:
        self._unwritten.append((position, piece))
        if self._writer is None and isinstance(piece, ContextPiece):
            return
        self._writer = self._writer or self._open()
        for place, waiting in self._unwritten:
            self._writer.write_piece(place, waiting)
        self._unwritten.clear()

    def write_snapshot(self, num_pieces: int, state: str) -> None: ...

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        if not self._closed:
            self._writer = self._writer or self._open()
            self._writer.write_outcome(outcome)

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        """Do nothing: the attempt is restarted, not its branch."""


class Transcript:
    """The pieces of one attempt in one context, and the branches that diverged from it.

    With a `record`, its pieces are replayed first. `on_piece` gets each newly sampled piece.
    """

    def __init__(
        self,
        episode: int,
        seed: int,
        open_writer: OpenWriter = NullWriter,
        *,
        record: EpisodeRecord | None = None,
        on_piece: Callable[[PendingPiece], None] = lambda piece: None,
    ) -> None:
        self.episode = episode
        self.seed = seed
        """Seed of the sampling noise."""
        self.pieces: list[Piece] = []
        self.tokens: list[int] = []
        """Tokens of all pieces. The list only ever grows."""
        self.writer: EpisodeWriter = open_writer(
            episode=episode, seed=seed, again=record is not None
        )
        self._open_writer = open_writer
        self._on_piece = on_piece
        self._recorded = deque(record.pieces if record else ())
        self._snapshot = record.snapshot if record else None
        self.branches: list[Transcript] = []
        for branch in record.branches if record else ():
            self.add_branch(branch.episode, branch)

    def add_branch(self, episode: int, record: EpisodeRecord | None = None) -> "Transcript":
        """Begin a branch with its own sampling noise, written as an episode of this number."""
        seed = derive_seed(self.seed, "branch", len(self.branches) + 1)
        closed = record is not None and record.outcome is not None

        def open_writer(**options: Any) -> EpisodeWriter:
            return BranchWriter(partial(self._open_writer, **options), closed=closed)

        branch = Transcript(episode, seed, open_writer, record=record, on_piece=self._on_piece)
        self.branches.append(branch)
        return branch

    @property
    def replaying(self) -> bool:
        """True if recorded pieces are left to replay, here or in a branch."""
        return bool(self._recorded) or any(branch.replaying for branch in self.branches)

    @property
    def all_pieces(self) -> list[Piece]:
        """The pieces so far and those left to replay."""
        return [*self.pieces, *self._recorded]

    async def restore_snapshot(self, env: Resumable) -> list[float] | None:
        """Restore `env` from its recorded snapshot, and replay the pieces before it.

        Return the turn rewards up to there, or None if there is no snapshot.
        """
        if self._snapshot is None:
            return None
        num_pieces, state = self._snapshot
        turn_rewards, env_state = json.loads(state)
        await env.resume(env_state)
        rewards = [*turn_rewards]
        for _ in range(num_pieces):
            self._replay()
        return rewards

    def save_snapshot(self, env: Resumable, turn_rewards: Sequence[float]) -> None:
        """Write the environment's state, unless pieces are still being replayed."""
        if not self._recorded:
            state = json.dumps([list(turn_rewards), env.snapshot()])
            self.writer.write_snapshot(len(self.pieces), state)

    def add_context(self, piece: ContextPiece) -> None:
        """Append a piece, or replay it if it is recorded. Raises `NotReplayed` if they differ."""
        if not self._recorded:
            self.append(piece)
            return
        recorded = self._recorded[0]
        if recorded != piece:
            raise NotReplayed(
                f"piece {len(self.pieces)} has other tokens than the "
                f"{len(recorded.tokens)} on record"
            )
        self._replay()

    def replay_reply(self) -> Iterator[Sampled]:
        """Replay the recorded part of the next reply."""
        while self._recorded and isinstance(piece := self._recorded[0], Sampled):
            self._replay()
            yield piece

    def require_replayed(self) -> None:
        """Raise `NotReplayed` if recorded pieces are left."""
        if self._recorded:
            raise NotReplayed(f"{len(self._recorded)} recorded pieces were not requested")

    def append(self, piece: Piece) -> None:
        """Write a new piece, add it, and announce it if it was sampled."""
        self.writer.write_piece(len(self.pieces), piece)
        start = len(self.tokens)
        self._add(piece)
        if isinstance(piece, Sampled):
            self._on_piece(PendingPiece(self.episode, self.tokens, start, piece))

    def _replay(self) -> None:
        self._add(self._recorded.popleft())

    def _add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.tokens.extend(piece.tokens)
