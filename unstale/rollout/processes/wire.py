"""The messages between the main process and its rollout processes, in MessagePack.

Types are checked when a message is read. Tokens and log-probabilities are in native byte order,
because all processes are on one machine.
"""

import asyncio
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np

from unstale.engines.following import Finding, StateChange
from unstale.records import (
    ContextPiece,
    EpisodeBudget,
    EpisodeRecord,
    Failure,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Stop,
    Task,
    Trajectory,
    TurnLimit,
    link_experts,
)
from unstale.routed_experts import RoutedExperts

_LENGTH = struct.Struct("=Q")


class WireExperts(msgspec.Struct, array_like=True):
    """The experts that an MoE model chose for the tokens of one piece (`RoutedExperts`), as a
    message. Experts of earlier tokens are left out.
    """

    start: int
    shape: tuple[int, int, int]
    dtype: str
    data: bytes


class WirePiece(msgspec.Struct, array_like=True):
    """A `Piece` as a message: successive tokens of an episode that have the same origin.

    `logps` is None for context tokens, whose `version` is -1.
    """

    tokens: bytes
    logps: bytes | None
    version: int
    clean: bool
    provenance: int
    experts: WireExperts | None = None


class WireFailure(msgspec.Struct, tag=True):
    """A `Failure` as a message."""

    task: Task
    stage: str
    error: str
    turns: int
    sampled_tokens: int

    @classmethod
    def of(cls, failure: Failure) -> Self:
        return cls(
            failure.task, failure.stage, failure.error, failure.turns, failure.sampled_tokens
        )

    def read(self) -> Failure:
        return Failure(self.task, self.stage, self.error, self.turns, self.sampled_tokens)


class WireTrajectory(msgspec.Struct, tag=True):
    """A `Trajectory` as a message. Its tokens are sent before, in `Wrote` events."""

    rewards: dict[str, float]
    stop: Stop
    turn_rewards: tuple[float, ...]
    facts: dict[str, float]


WireOutcome = WireTrajectory | WireFailure


class WireRecord(msgspec.Struct):
    """An `EpisodeRecord` as a message: the part of an episode that the main process read from the
    journal.
    """

    episode: int
    pieces: list[WirePiece]
    outcome: WireOutcome | None
    failures: int
    snapshot: tuple[int, str] | None


class Setup(msgspec.Struct, tag=True):
    """The first message to a rollout process: the run's configuration and how it numbers
    episodes.
    """

    config: dict[str, Any]
    """The run's configuration, in the form of `config.json`."""
    ends: tuple[int, ...]
    """The token ids that end a reply, from the model's generation config."""
    engines: int
    max_running: int
    """Largest number of this process's replies that one engine samples at the same time."""
    vocab_size: int
    routed: tuple[bool, ...]
    first_episode: int
    """Number of the process's first episode."""
    stride: int
    """Difference between the numbers of two successive episodes of one process. It keeps the
    processes from using the same number.
    """
    ray: str = ""
    """Address of the Ray cluster with the engines. Empty if they do not run on Ray."""


class RunEpisodes(msgspec.Struct, tag=True):
    """A command: run episodes of a group. `EpisodesEnded` answers it."""

    job: int
    number: int
    task: Task
    seed: int
    indices: tuple[int, int]
    """Range of the episodes' indices in their group: (first, one after the last)."""
    records: dict[int, WireRecord]
    """Index of an episode in its group -> its record, if it was begun before."""
    turn_limit: TurnLimit | None
    budget: EpisodeBudget


class CancelEpisodes(msgspec.Struct, tag=True):
    job: int


class Ready(msgspec.Struct, tag=True):
    """An event: the rollout process can run episodes."""


class Refused(msgspec.Struct, tag=True):
    """An event: the process cannot run episodes, or the user's code hangs. It ends the run."""

    error: str


class Began(msgspec.Struct, tag=True):
    """An event: an attempt at an episode begins, or continues with `again`."""

    job: int
    index: int
    episode: int
    seed: int
    again: bool


class Wrote(msgspec.Struct, tag=True):
    """An event: a piece (run of tokens) for the journal."""

    episode: int
    position: int
    piece: WirePiece


class Saved(msgspec.Struct, tag=True):
    """An event with a snapshot of an environment, for the journal."""

    episode: int
    num_pieces: int
    state: str


class Ended(msgspec.Struct, tag=True):
    """An event: the outcome of an attempt."""

    episode: int
    outcome: WireOutcome


class Restarted(msgspec.Struct, tag=True):
    """An event: an attempt could not be replayed, so the episode starts from its beginning."""

    episode: int
    reason: str
    failure: WireFailure


class Blocked(msgspec.Struct, tag=True):
    """An event: the user's code `name` has blocked the process's event loop for `seconds`."""

    name: str
    seconds: float


class Logged(msgspec.Struct, tag=True):
    """An event for the run's log: its kind and its further fields."""

    kind: str
    fields: dict[str, Any]


class Waited(msgspec.Struct, tag=True):
    """An event: for how long episodes waited since the last such event, and how many wait, by
    activity.

    It is sent every `TICK_S` seconds and so also shows that the process is alive.
    """

    seconds: dict[str, float]
    running: dict[str, int]


class EpisodesEnded(msgspec.Struct, tag=True):
    """An event: all episodes of a job have ended. The run ends if `error` is not empty."""

    job: int
    error: str = ""


TICK_S = 0.25
Command = Setup | RunEpisodes | CancelEpisodes | StateChange
Event = (
    Ready
    | Refused
    | Began
    | Wrote
    | Saved
    | Ended
    | Restarted
    | Blocked
    | Logged
    | Waited
    | EpisodesEnded
    | Finding
)


def wire_piece(piece: Piece) -> WirePiece:
    """Return a piece as a message, without the routed experts of earlier tokens.

    Raises ValueError for pictures, and for text that a strategy put into a reply. Rollout processes
    do not support these.
    """
    tokens = array("I", piece.tokens).tobytes()
    if isinstance(piece, ContextPiece):
        if piece.pictures:
            raise ValueError("rollout processes do not send pictures")
        return WirePiece(tokens, None, -1, True, int(piece.provenance))
    if isinstance(piece, Placed):
        raise ValueError("rollout processes do not send placed text")
    experts = None
    if (own := piece.routed_experts) is not None:
        rows = np.ascontiguousarray(own.experts)
        experts = WireExperts(own.start, rows.shape, rows.dtype.str, rows.tobytes())
    logps = array("d", piece.behavior_logp).tobytes()
    return WirePiece(tokens, logps, piece.version, piece.clean, int(piece.provenance), experts)


def read_piece(piece: WirePiece) -> Piece:
    """Return the piece (run of tokens) in a message. Its routed experts are those in the message,
    without those of earlier tokens.
    """
    tokens = tuple(memoryview(piece.tokens).cast("I"))
    provenance = Provenance(piece.provenance)
    if piece.logps is None:
        return ContextPiece(tokens, provenance)
    experts = None
    if (own := piece.experts) is not None:
        rows = np.frombuffer(own.data, np.dtype(own.dtype)).reshape(own.shape)
        experts = RoutedExperts(own.start, rows)
    logps = tuple(memoryview(piece.logps).cast("d"))
    return Sampled(tokens, logps, piece.version, piece.clean, provenance, experts)


def linked(piece: Piece, before: Sequence[Piece]) -> Piece:
    """Return a copy of a piece (run of tokens) whose routed experts continue those of the pieces
    `before` it.
    """
    return link_experts(piece, before) if isinstance(piece, Sampled) else piece


def wire_outcome(outcome: Trajectory | Failure) -> WireOutcome:
    if isinstance(outcome, Failure):
        return WireFailure.of(outcome)
    return WireTrajectory(
        _numbers(outcome.rewards), outcome.stop, outcome.turn_rewards, _numbers(outcome.facts)
    )


def read_outcome(
    outcome: WireOutcome, *, pieces: Sequence[Piece], task: Task, seed: int, episode: int
) -> Trajectory | Failure:
    """Return the outcome that a message has. `pieces` are the tokens of the episode."""
    if isinstance(outcome, WireFailure):
        return outcome.read()
    return Trajectory(
        pieces=tuple(pieces),
        rewards=outcome.rewards,
        stop=outcome.stop,
        task=task,
        seed=seed,
        episode=episode,
        turn_rewards=outcome.turn_rewards,
        facts=outcome.facts,
    )


def _numbers(values: Any) -> dict[str, Any]:
    """Return a dict whose NumPy numbers are converted to Python's."""
    return {
        str(name): value if type(value) in (int, float, bool) else float(value)
        for name, value in values.items()
    }


def wire_record(record: EpisodeRecord) -> WireRecord:
    outcome = wire_outcome(record.outcome) if record.outcome is not None else None
    pieces = [wire_piece(piece) for piece in record.pieces]
    return WireRecord(record.episode, pieces, outcome, record.failures, record.snapshot)


def read_record(record: WireRecord, task: Task, seed: int) -> EpisodeRecord:
    pieces: list[Piece] = []
    for piece in record.pieces:
        pieces.append(linked(read_piece(piece), pieces))
    outcome = None
    if record.outcome is not None:
        outcome = read_outcome(
            record.outcome, pieces=pieces, task=task, seed=seed, episode=record.episode
        )
    return EpisodeRecord(record.episode, tuple(pieces), outcome, record.failures, record.snapshot)


def encode(messages: Sequence[Any]) -> bytes:
    """Return the bytes of a frame that has these messages."""
    body = msgspec.msgpack.encode(messages)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame of a stream and return the bytes of its messages, not yet decoded.

    Raises `asyncio.IncompleteReadError` or `ConnectionError` at the end of the stream.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(size)


DECODE_COMMANDS = msgspec.msgpack.Decoder(list[Command]).decode
DECODE_EVENTS = msgspec.msgpack.Decoder(list[Event]).decode
