"""The records: an episode is a row of pieces, and everything per token derives from them.

    ContextPiece, Sampled -> Trajectory -> Group -> ScoredTrajectory -> Batch

Each stage returns a wider record; nothing is filled in later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # environments and the command line import this module without torch
    from torch import Tensor


class Provenance(IntEnum):
    """Where a token comes from, and so whether it may enter an importance product."""

    ENVIRONMENT = 0
    """Prompt, tool or user text."""
    SAMPLED = 1
    """Sampled by the engine in exactly this context."""
    FORCED = 2
    """Placed, not sampled: a hint, a branch seed, a spliced prefix."""
    REWRITTEN = 3
    """Sampled, but its context was edited afterwards."""
    FOREIGN = 4
    """Another policy's text."""
    REPLAYED = 5
    """`SAMPLED`, used again in a later step."""


HAS_BEHAVIOR = frozenset({Provenance.SAMPLED, Provenance.REPLAYED})
"""Only these have a behaviour probability; the others are trained only by objectives that say how."""

NO_VERSION = -1
"""`version` of a token that no engine sampled."""

Stop = Literal["done", "max_turns", "max_tokens"]
"""Why an episode ended: the environment said so, or a limit did."""


@dataclass(frozen=True, slots=True)
class ContextPiece:
    """Text that the policy did not choose."""

    tokens: tuple[int, ...]
    provenance: Provenance = Provenance.ENVIRONMENT

    def __post_init__(self) -> None:
        if self.provenance in HAS_BEHAVIOR:
            raise ValueError(
                f"a ContextPiece piece cannot be {self.provenance.name}; use Sampled, which has behavior_logp"
            )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One run of tokens from one engine and one version.

    `behavior_logp` is the log-probability of each token under the distribution it was sampled from.
    `clean` is False when weights changed under a kept KV cache: such tokens come from no version's policy.
    An interrupted reply is a piece that ends early; the next piece carries the next version.

    >>> Sampled((7, 9), (-0.1, -0.7), version=3).version
    3
    """

    tokens: tuple[int, ...]
    behavior_logp: tuple[float, ...]
    version: int
    clean: bool = True
    provenance: Provenance = Provenance.SAMPLED

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.behavior_logp):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.behavior_logp)} behavior_logp")
        if self.version < 0:
            raise ValueError(f"version must be >= 0, got {self.version}")
        if self.provenance not in HAS_BEHAVIOR:
            raise ValueError(f"a Sampled piece cannot be {self.provenance.name}; use ContextPiece")


Piece = ContextPiece | Sampled


@dataclass(frozen=True, slots=True)
class Task:
    """What an environment is asked to pose, small enough to write down: the environment rebuilds the rest from it.

    >>> Task("retail", "train", 17).key
    'retail/train/17'
    """

    env: str
    split: str
    index: int

    @property
    def key(self) -> str:
        return f"{self.env}/{self.split}/{self.index}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode. `rewards` are named channels; `turn_rewards`, beside them, one number a turn or none."""

    pieces: tuple[Piece, ...]
    rewards: Mapping[str, float]
    stop: Stop
    task: Task
    seed: int
    episode: int = 0
    """Unique within a run: the order in which episodes were begun."""
    turn_rewards: tuple[float, ...] = ()
    facts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """What the environment counted in passing (tool errors, turns); metrics, never reward."""
    branches: tuple["Trajectory", ...] = ()
    """What else was said in the episode, each in a context of its own. They share its reward and its credit."""

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def success(self) -> bool:
        """The environment's own word (`success` among the facts), or a reward of at least 1."""
        return self.facts.get("success", self.reward) >= 1

    def led(self) -> "Trajectory":
        """Itself, or where only branches were answered, the first of them with the others."""
        return (
            self
            if self.sampled or not self.branches
            else replace(self.branches[0], branches=self.branches[1:])
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.tokens)

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Sampled))

    @property
    def versions(self) -> frozenset[int]:
        """Versions that sampled at least one token."""
        return frozenset(piece.version for piece in self.sampled if piece.tokens)

    @property
    def num_sampled(self) -> int:
        return sum(len(piece.tokens) for piece in self.sampled)

    @property
    def num_turns(self) -> int:
        return count_turns(self.pieces)

    def __len__(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)


def walk(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece, int]]:
    """`(start, piece, turn)` of every piece that holds tokens; `turn` is -1 on ContextPiece pieces.

    Adjacent Sampled pieces belong to one turn: an interrupted reply and its continuation.

    >>> a, b = Sampled((5,), (-0.1,), 0), Sampled((6,), (-0.2,), 1)
    >>> [(start, turn) for start, _, turn in walk([ContextPiece((1, 2)), a, b, ContextPiece((3,)), a])]
    [(0, -1), (2, 0), (3, 0), (4, -1), (5, 1)]
    """
    start, turn, speaking = 0, -1, False
    for piece in pieces:
        if not piece.tokens:
            continue
        sampled = isinstance(piece, Sampled)
        turn += sampled and not speaking
        speaking = sampled
        yield start, piece, turn if sampled else -1
        start += len(piece.tokens)


def count_turns(pieces: Sequence[Piece]) -> int:
    """Replies, however many pieces each came in."""
    return max((turn for _, _, turn in walk(pieces)), default=-1) + 1


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that its environment could not finish: data, not a crash."""

    task: Task
    stage: str
    error: str
    turns: int = 0
    sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: the trajectories of one task. `failures` counts the episodes that never became one."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()
    number: int = 0
    """Unique within a run: the order in which groups were admitted."""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A judged trajectory: one advantage per turn (a single number is the same for every turn)."""

    trajectory: Trajectory
    advantage: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.advantage) not in (1, self.trajectory.num_turns, len(self.trajectory)):
            raise ValueError(
                f"{len(self.advantage)} advantages for {self.trajectory.num_turns} turns and "
                f"{len(self.trajectory)} tokens; give one, one per turn, or one per token"
            )


@dataclass(frozen=True, slots=True)
class PendingPiece:
    """A piece that just arrived, with all that is needed to score it: `tokens[start:]` are the piece's own."""

    episode: int
    text: Sequence[int]
    """Of its episode up to the piece's end, or further: all pieces of an episode can share it while it grows."""
    start: int
    piece: Sampled

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.text[: self.start + len(self.piece.tokens)])


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """What an earlier life of the run has of one episode: its last attempt, and how many have failed."""

    episode: int
    pieces: tuple[Piece, ...]
    outcome: Trajectory | Failure | None
    """None while it goes on."""
    failures: int = 0
    snapshot: tuple[int, str] | None = None
    """The environment's own, and the number of pieces that it had led to."""
    branches: tuple["EpisodeRecord", ...] = ()
    """What else was said in the attempt, in contexts of its own."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A task that becomes a group, the `number`-th of the run. `place` is its place among the training tasks."""

    number: int
    task: Task
    seed: int
    place: int
    begun: bool = False
    """It was handed out before, by an earlier life of the run."""
    past: tuple[EpisodeRecord, ...] = ()
    """By sibling, as far as they were begun."""
    finished: bool = False

    def opens(self) -> Iterator[PendingPiece]:
        """Every sampled piece of its episodes that can still be trained on."""
        alive = [past for past in self.past if not isinstance(past.outcome, Failure)]
        for one in (one for past in alive for one in (past, *past.branches)):
            text: list[int] = []
            for piece in one.pieces:
                start = len(text)
                text += piece.tokens
                if isinstance(piece, Sampled):
                    yield PendingPiece(one.episode, text, start, piece)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences packed end to end; every tensor is `[T]`. Sequence `i` is `offsets[i]:offsets[i + 1]`.

    Per-token values stand at the token they speak of: `behavior_logp[t]` is the log-probability of `tokens[t]`
    given what precedes it in its own sequence. Off the mask, `behavior_logp` and `advantage` are 0, `version` and
    `turn` are -1.
    """

    tokens: "Tensor"
    offsets: tuple[int, ...]
    sampled: "Tensor"
    """True on action tokens: those the policy chose."""
    behavior_logp: "Tensor"
    version: "Tensor"
    turn: "Tensor"
    provenance: "Tensor"
    clean: "Tensor"
    advantage: "Tensor"
    episodes: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def sequence(self) -> "Tensor":
        """`[T]`, the index of the sequence that a token belongs to."""
        import torch

        lengths = torch.tensor([end - start for start, end in self.spans()])
        return torch.repeat_interleave(torch.arange(self.num_sequences), lengths)

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def select(self, sequences: Sequence[int]) -> "tuple[Batch, Tensor]":
        """The batch of these sequences, in this order, and the `[T']` index of its tokens in this batch."""
        import torch

        spans = self.spans()
        index = torch.cat(
            [torch.empty(0, dtype=torch.long), *(torch.arange(*spans[i]) for i in sequences)]
        )
        offsets = [0]
        for i in sequences:
            offsets.append(offsets[-1] + spans[i][1] - spans[i][0])
        rows = {name: getattr(self, name)[index] for name in _PER_TOKEN}
        return Batch(
            offsets=tuple(offsets), episodes=tuple(self.episodes[i] for i in sequences), **rows
        ), index


_PER_TOKEN = (
    "tokens", "sampled", "behavior_logp", "version", "turn", "provenance", "clean", "advantage",
)  # fmt: skip


def collate(credited: Sequence[ScoredTrajectory]) -> Batch:
    """Pack judged trajectories into one batch. No padding: sequences lie end to end."""
    import torch

    if not credited:
        raise ValueError("nothing to collate: every group of this step came back empty")
    tokens: list[int] = []
    behavior_logp: list[float] = []
    advantage: list[float] = []
    pieces: list[tuple[int, ...]] = []
    offsets = [0]
    for item in credited:
        for start, piece, turn in walk(item.trajectory.pieces):
            count, provenance = len(piece.tokens), int(piece.provenance)
            tokens += piece.tokens
            advantage += _advantages(item, start, count, turn)
            if isinstance(piece, Sampled):
                behavior_logp += piece.behavior_logp
                pieces.append((count, True, piece.version, turn, provenance, piece.clean))
            else:
                behavior_logp += [0.0] * count
                pieces.append((count, False, NO_VERSION, turn, provenance, True))
        offsets.append(len(tokens))
    counts, *columns = torch.tensor(pieces, dtype=torch.long).reshape(-1, 6).T
    sampled, version, turns, provenances, clean = (
        torch.repeat_interleave(column, counts) for column in columns
    )
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.long),
        offsets=tuple(offsets),
        sampled=sampled.bool(),
        behavior_logp=torch.tensor(behavior_logp, dtype=torch.float32),
        version=version,
        turn=turns,
        provenance=provenances,
        clean=clean.bool(),
        advantage=torch.tensor(advantage, dtype=torch.float32),
        episodes=tuple(item.trajectory.episode for item in credited),
    )


def _advantages(item: ScoredTrajectory, start: int, count: int, turn: int) -> list[float]:
    if turn < 0:
        return [0.0] * count
    if len(item.advantage) == 1:
        return [item.advantage[0]] * count
    if len(item.advantage) == item.trajectory.num_turns:
        return [item.advantage[turn]] * count
    return list(item.advantage[start : start + count])
