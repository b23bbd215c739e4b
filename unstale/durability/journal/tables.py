"""The tables, and how pieces, groups and their ends become rows."""

import json
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unstale.records import Failure, GroupRequest, Piece, Sampled, Trajectory

JOURNAL = "journal.sqlite"
"""Its name in a run folder."""

FORMAT = 2
"""`user_version` of the database."""

TABLES = {
    "groups": "number INTEGER PRIMARY KEY, env TEXT NOT NULL, split TEXT NOT NULL, task INTEGER NOT NULL, "
    "seed INTEGER NOT NULL, place INTEGER NOT NULL, at REAL NOT NULL, after INTEGER NOT NULL",
    "episodes": "episode INTEGER PRIMARY KEY, number INTEGER NOT NULL REFERENCES groups, sibling INTEGER NOT NULL, "
    "seed INTEGER NOT NULL, at REAL NOT NULL, after INTEGER NOT NULL",
    "pieces": "episode INTEGER NOT NULL REFERENCES episodes, position INTEGER NOT NULL, provenance INTEGER NOT NULL, "
    "num_tokens INTEGER NOT NULL, tokens BLOB NOT NULL, version INTEGER, clean INTEGER, behavior_logp BLOB, "
    "after INTEGER NOT NULL",
    "snapshots": "episode INTEGER NOT NULL REFERENCES episodes, num_pieces INTEGER NOT NULL, state TEXT NOT NULL, "
    "after INTEGER NOT NULL",
    "trajectories": "episode INTEGER PRIMARY KEY REFERENCES episodes, num_pieces INTEGER NOT NULL, "
    "stop TEXT NOT NULL, rewards TEXT NOT NULL, turn_rewards TEXT NOT NULL, facts TEXT NOT NULL, "
    "after INTEGER NOT NULL",
    "failures": "episode INTEGER PRIMARY KEY REFERENCES episodes, stage TEXT NOT NULL, error TEXT NOT NULL, "
    "turns INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, after INTEGER NOT NULL",
    "restarts": "episode INTEGER PRIMARY KEY REFERENCES episodes, reason TEXT NOT NULL, turns INTEGER NOT NULL, "
    "sampled_tokens INTEGER NOT NULL, after INTEGER NOT NULL",
    "finished": "number INTEGER PRIMARY KEY REFERENCES groups, at REAL NOT NULL, after INTEGER NOT NULL",
    "checkpoints": "checkpoint INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER NOT NULL, "
    "name TEXT NOT NULL, at REAL NOT NULL",
    "consumed": "number INTEGER PRIMARY KEY REFERENCES finished, step INTEGER NOT NULL, place INTEGER NOT NULL, "
    "version INTEGER NOT NULL, at REAL NOT NULL, checkpoint INTEGER NOT NULL REFERENCES checkpoints",
    "versions": "id INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE, at REAL NOT NULL, after INTEGER NOT NULL",
    "events": "id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, fields TEXT NOT NULL, "
    "after INTEGER NOT NULL",
}
"""`after` is the checkpoint that a row came after."""

_KEYS = {
    "pieces": ", PRIMARY KEY (episode, position)",
    "snapshots": ", PRIMARY KEY (episode, num_pieces)",
}

SCHEMA = "".join(
    f"CREATE TABLE {name} ({columns}, seal INTEGER NOT NULL{_KEYS.get(name, '')}) STRICT;\n"
    for name, columns in TABLES.items()
)

COLUMNS = {
    name: tuple(column.split()[0] for column in columns.split(", ") if not column.startswith("id "))
    for name, columns in TABLES.items()
}
"""What a row's seal covers: everything but a number that the database gives."""

NEWER = (
    "snapshots",
    "pieces",
    "trajectories",
    "failures",
    "restarts",
    "finished",
    "episodes",
    "groups",
    "versions",
)
"""Tables whose rows a deterministic run makes again, in an order in which they can go."""

TRIED = """(SELECT episode, number, sibling FROM (SELECT episode, number, sibling,
    seed = first_value(seed) OVER (PARTITION BY number, sibling ORDER BY episode) AS own FROM episodes) WHERE own)"""
"""Attempts at episodes, which all have the sibling's seed. What else was said in one has another: its branches."""

Record = tuple[str, Sequence[Any]]
"""An SQL statement and its parameters."""


class JournalError(RuntimeError):
    """The journal cannot be written or read: names the file and the cause."""


def insert(table: str, *values: Any) -> Record:
    """One row, sealed.

    >>> insert("finished", 3, 0.5, 1)[0]
    'INSERT INTO finished (number, at, after, seal) VALUES (?, ?, ?, ?)'
    """
    columns = COLUMNS[table]
    row = tuple(int(value) if isinstance(value, bool) else value for value in values)
    marks = ", ".join("?" * (len(columns) + 1))
    return f"INSERT INTO {table} ({', '.join(columns)}, seal) VALUES ({marks})", (
        *row,
        seal(table, *row),
    )


def seal(table: str, *row: Any) -> int:
    """Checksum of a row as SQLite keeps it: what a disk changed is found where it is read."""
    return zlib.crc32(repr((table, row)).encode(errors="surrogatepass"))


def handed_out(request: GroupRequest, after: int) -> Record:
    task = request.task
    row = (request.number, task.env, task.split, int(task.index), request.seed, request.place)
    return insert("groups", *row, time.time(), after)


def piece_row(episode: int, position: int, piece: Piece, after: int) -> Record:
    row = (episode, position, int(piece.provenance), len(piece.tokens), pack_tokens(piece.tokens))
    if isinstance(piece, Sampled):
        return insert(
            "pieces", *row, piece.version, piece.clean, pack_logps(piece.behavior_logp), after
        )
    return insert("pieces", *row, None, None, None, after)


def outcome_row(episode: int, outcome: Trajectory | Failure, after: int) -> Record:
    if isinstance(outcome, Failure):
        stage, error = plain(outcome.stage), plain(outcome.error)
        return insert(
            "failures", episode, stage, error, outcome.turns, outcome.sampled_tokens, after
        )
    rewards, facts = _numbers(outcome.rewards), _numbers(outcome.facts)
    turn_rewards = json.dumps([float(value) for value in outcome.turn_rewards])
    return insert(
        "trajectories",
        episode,
        len(outcome.pieces),
        outcome.stop,
        rewards,
        turn_rewards,
        facts,
        after,
    )


def plain(text: str) -> str:
    """As UTF-8 can have it.

    >>> plain("half a pair: \\ud800")
    'half a pair: ?'
    """
    return text.encode(errors="replace").decode()


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
