"""The tables, and how pieces, groups and their ends become rows."""

import json
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afterimage.trajectory import Failure, Group, Piece, Sampled, Task, Trajectory

JOURNAL = "journal.sqlite"
"""Its name in a run folder."""

FORMAT = 1
"""`user_version` of the database."""

SCHEMA = """
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, env TEXT NOT NULL, split TEXT NOT NULL, task INTEGER NOT NULL, seed INTEGER NOT NULL,
    at REAL NOT NULL);
CREATE TABLE episodes (
    episode INTEGER PRIMARY KEY, number INTEGER NOT NULL REFERENCES groups, sibling INTEGER NOT NULL,
    seed INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE pieces (
    episode INTEGER NOT NULL REFERENCES episodes, position INTEGER NOT NULL, provenance INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, tokens BLOB NOT NULL, version INTEGER, clean INTEGER, behavior_logp BLOB,
    PRIMARY KEY (episode, position)) WITHOUT ROWID;
CREATE TABLE trajectories (
    episode INTEGER PRIMARY KEY REFERENCES episodes, num_pieces INTEGER NOT NULL, stop TEXT NOT NULL,
    rewards TEXT NOT NULL, turn_rewards TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE failures (
    episode INTEGER PRIMARY KEY REFERENCES episodes, stage TEXT NOT NULL, error TEXT NOT NULL, turns INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL);
CREATE TABLE finished (number INTEGER PRIMARY KEY REFERENCES groups, at REAL NOT NULL);
CREATE TABLE consumed (
    number INTEGER PRIMARY KEY REFERENCES finished, step INTEGER NOT NULL, place INTEGER NOT NULL,
    version INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE versions (id INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE, at REAL NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, fields TEXT NOT NULL);
"""

Record = tuple[str, Sequence[Any]]
"""An SQL statement and its parameters."""


class JournalError(RuntimeError):
    """The journal cannot be written or read: names the file and the cause."""


def insert(table: str, *values: Any) -> Record:
    """One row; `table` may name its columns.

    >>> insert("versions (version, at)", 3, 0.5)
    ('INSERT INTO versions (version, at) VALUES (?, ?)', (3, 0.5))
    """
    return f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values


def handed_out(number: int, task: Task, seed: int) -> Record:
    return insert("groups", number, task.env, task.split, int(task.index), seed, time.time())


def piece_row(episode: int, position: int, piece: Piece) -> Record:
    row = (episode, position, int(piece.provenance), len(piece.tokens), pack_tokens(piece.tokens))
    if isinstance(piece, Sampled):
        return insert("pieces", *row, piece.version, piece.clean, pack_logps(piece.behavior_logp))
    return insert("pieces", *row, None, None, None)


def outcome_row(episode: int, outcome: Trajectory | Failure) -> Record:
    if isinstance(outcome, Failure):
        stage, error = (text.encode(errors="replace").decode() for text in (outcome.stage, outcome.error))
        return insert("failures", episode, stage, error, outcome.turns, outcome.sampled_tokens)
    rewards, facts = _numbers(outcome.rewards), _numbers(outcome.facts)
    turn_rewards = json.dumps([float(value) for value in outcome.turn_rewards])
    return insert("trajectories", episode, len(outcome.pieces), outcome.stop, rewards, turn_rewards, facts)


def consumption(groups: Sequence[Group], *, step: int, version: int) -> list[Record]:
    """That a step trained on these groups, in this order, while the policy had this version."""
    now = time.time()
    return [insert("consumed", group.number, step, place, version, now) for place, group in enumerate(groups)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian, two bytes each where all of them fit, else four.

    >>> pack_tokens([1, 65535]), pack_tokens([65536])
    (b'\\x01\\x00\\xff\\xff', b'\\x00\\x00\\x01\\x00')
    """
    return struct.pack(f"<{len(tokens)}{'H' if max(tokens, default=0) < 1 << 16 else 'I'}", *tokens)


def unpack_tokens(blob: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}{'H' if len(blob) == 2 * count else 'I'}", blob)


def pack_logps(values: Sequence[float]) -> bytes:
    """float32, which is what engines compute in: exact for their values."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_logps(blob: bytes, count: int) -> tuple[float, ...]:
    return struct.unpack(f"<{count}f", blob)


def _numbers(named: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in named.items()})


def failed(path: Path, cause: object) -> JournalError:
    return JournalError(f"the journal {path} failed: {cause}")
