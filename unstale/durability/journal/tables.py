"""The tables of the journal, and the conversion of episodes, groups and results into rows."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unstale.pictures import Picture
from unstale.records import (
    ContextPiece,
    Edit,
    Failure,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Trajectory,
    is_success,
    total_reward,
)

JOURNAL = "journal.sqlite"

FORMAT = 10
"""Number of the format of journals. The database stores it as its `user_version`."""

TABLES = {
    "groups": "number INTEGER PRIMARY KEY, env TEXT NOT NULL, split TEXT NOT NULL, "
    "task INTEGER NOT NULL, seed INTEGER NOT NULL, place INTEGER NOT NULL, at REAL NOT NULL, "
    "after INTEGER NOT NULL",
    "episodes": "episode INTEGER PRIMARY KEY, "
    "number INTEGER NOT NULL REFERENCES groups, sibling INTEGER NOT NULL, seed INTEGER NOT NULL, "
    "at REAL NOT NULL, after INTEGER NOT NULL",
    "pieces": "episode INTEGER NOT NULL REFERENCES episodes, "
    "position INTEGER NOT NULL, provenance INTEGER NOT NULL, num_tokens INTEGER NOT NULL, "
    "tokens BLOB NOT NULL, version INTEGER, clean INTEGER, behavior_logp BLOB, "
    "after INTEGER NOT NULL",
    "kept_sets": "episode INTEGER NOT NULL, position INTEGER NOT NULL, sets BLOB NOT NULL, "
    "after INTEGER NOT NULL",
    "placed": "episode INTEGER NOT NULL, position INTEGER NOT NULL, version INTEGER, "
    "source_logp BLOB, start INTEGER, stop INTEGER, tokens BLOB, after INTEGER NOT NULL",
    "signals": "episode INTEGER NOT NULL, position INTEGER NOT NULL, signals BLOB NOT NULL, "
    "after INTEGER NOT NULL",
    "pictures": "episode INTEGER NOT NULL, position INTEGER NOT NULL, pictures BLOB NOT NULL, "
    "after INTEGER NOT NULL",
    "snapshots": "episode INTEGER NOT NULL REFERENCES episodes, "
    "num_pieces INTEGER NOT NULL, state TEXT NOT NULL, after INTEGER NOT NULL",
    "trajectories": "episode INTEGER PRIMARY KEY REFERENCES episodes, "
    "num_pieces INTEGER NOT NULL, stop TEXT NOT NULL, rewards TEXT NOT NULL, "
    "turn_rewards TEXT NOT NULL, facts TEXT NOT NULL, after INTEGER NOT NULL",
    "failures": "episode INTEGER PRIMARY KEY REFERENCES episodes, stage TEXT NOT NULL, "
    "error TEXT NOT NULL, turns INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, "
    "after INTEGER NOT NULL",
    "restarts": "episode INTEGER PRIMARY KEY REFERENCES episodes, "
    "reason TEXT NOT NULL, turns INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, "
    "after INTEGER NOT NULL",
    "finished": "number INTEGER PRIMARY KEY REFERENCES groups, at REAL NOT NULL, "
    "after INTEGER NOT NULL",
    "checkpoints": "checkpoint INTEGER PRIMARY KEY, step INTEGER NOT NULL, "
    "version INTEGER NOT NULL, name TEXT NOT NULL, at REAL NOT NULL",
    "consumed": "number INTEGER PRIMARY KEY REFERENCES finished, "
    "step INTEGER NOT NULL, place INTEGER NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL, "
    "checkpoint INTEGER NOT NULL REFERENCES checkpoints",
    "replayed": "number INTEGER NOT NULL REFERENCES consumed, "
    "step INTEGER NOT NULL, place INTEGER NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL, "
    "checkpoint INTEGER NOT NULL REFERENCES checkpoints",
    "trained_tokens": "number INTEGER NOT NULL REFERENCES finished, step INTEGER NOT NULL, "
    "version INTEGER NOT NULL, route TEXT NOT NULL, num_tokens INTEGER NOT NULL, "
    "tokens BLOB NOT NULL, after INTEGER NOT NULL",
    "forks": "episode INTEGER PRIMARY KEY REFERENCES episodes, "
    "parent INTEGER NOT NULL REFERENCES episodes, at INTEGER NOT NULL, after INTEGER NOT NULL",
    "notes": "episode INTEGER PRIMARY KEY REFERENCES forks, note TEXT NOT NULL, "
    "writes INTEGER NOT NULL, after INTEGER NOT NULL",
    "roles": "episode INTEGER PRIMARY KEY REFERENCES episodes, role TEXT NOT NULL, "
    "after INTEGER NOT NULL",
    "versions": "id INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE, "
    "at REAL NOT NULL, after INTEGER NOT NULL",
    "events": "id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, "
    "fields TEXT NOT NULL, after INTEGER NOT NULL",
    "counts": "name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL",
}
"""Columns of each table, in SQL. The column `after` has the number of the newest checkpoint when
the row was written.
"""

_KEYS = {
    "pieces": ", PRIMARY KEY (episode, position)",
    "kept_sets": ", PRIMARY KEY (episode, position), FOREIGN KEY (episode, position) "
    "REFERENCES pieces",
    "placed": ", PRIMARY KEY (episode, position), FOREIGN KEY (episode, position) "
    "REFERENCES pieces",
    "signals": ", PRIMARY KEY (episode, position), FOREIGN KEY (episode, position) "
    "REFERENCES pieces",
    "pictures": ", PRIMARY KEY (episode, position), FOREIGN KEY (episode, position) "
    "REFERENCES pieces",
    "snapshots": ", PRIMARY KEY (episode, num_pieces)",
    "replayed": ", PRIMARY KEY (number, step)",
    "trained_tokens": ", PRIMARY KEY (number, step)",
}

COLUMNS = {
    name: tuple(column.split()[0] for column in columns.split(", ") if not column.startswith("id "))
    for name, columns in TABLES.items()
}
"""Names of the columns of each table, without ids that the database assigns. A row's checksum
covers these columns.
"""

COUNTED = tuple(name for name in TABLES if name != "counts")
"""Tables whose numbers of rows the table `counts` has, so that a loss of whole rows is noticed. The
checksums of rows do not show such a loss.
"""

REPEATED = (
    "snapshots",
    "kept_sets",
    "placed",
    "signals",
    "pictures",
    "pieces",
    "trajectories",
    "failures",
    "restarts",
    "notes",
    "forks",
    "roles",
    "finished",
    "episodes",
    "groups",
    "versions",
)
"""Tables whose rows after a checkpoint are deleted when a deterministic run resumes from it,
because the run writes them again. No table comes after one that its rows refer to.
"""

ATTEMPTS = """(SELECT episode, number, sibling FROM (SELECT episode, number, sibling,
    seed = first_value(seed) OVER (PARTITION BY number, sibling ORDER BY episode) AS is_attempt
    FROM episodes)
    WHERE is_attempt)"""
"""SQL query of the rows of the table `episodes` that are attempts at an episode. The other rows are
further conversations of an agent, which have another seed than the attempts.
"""

TOKEN_SAMPLES = "token_samples"
"""Kind of the events with a sample of the tokens that a step trained on."""

ROUND = "round"
"""Kind of the events with decisions about the episodes of a group, such as to prune one."""

GROUP_SIZE = "group_size"
"""Kind of the events with the number of episodes of a group, in the fields `group` and `size`. A
group of `schedule.group_size` episodes has no such event, and an enlarged group has several.
"""

TURN_LIMIT = "turn_limit"
"""Kind of the events with the turn limit of a group. The fields are `group` and those of
`records.TurnLimit`. A group that only `rollout.max_turns` limits has no such event.
"""

EPISODE_BUDGET = "episode_budget"
"""Kind of the events with the budget of each episode of a group. The fields are `group` and those
of `records.EpisodeBudget`. A group with `records.NO_BUDGET` has no such event.
"""

_PICTURE = struct.Struct("<I32s")
"""Format of a picture in a row of `pictures`: its number and its content hash."""

Record = tuple[str, Sequence[Any]]
"""An SQL statement and its parameters."""


class JournalError(RuntimeError):
    """Error: the journal cannot be written or read. The text names the file and the cause."""


def insert(table: str, *values: Any) -> Record:
    """Return the SQL statement that inserts a row into a table, and its parameters.

    `values` are those of the columns in `COLUMNS`. The row's checksum is added as its column
    `seal`.

    >>> insert("finished", 3, 0.5, 1)[0]
    'INSERT INTO finished (number, at, after, seal) VALUES (?, ?, ?, ?)'
    """
    row = tuple([int(value) if isinstance(value, bool) else value for value in values])
    return _insertion(table), (*row, seal(table, *row))


@cache
def _insertion(table: str) -> str:
    columns = COLUMNS[table]
    marks = ", ".join("?" * (len(columns) + 1))
    return f"INSERT INTO {table} ({', '.join(columns)}, seal) VALUES ({marks})"


def seal(table: str, *row: Any) -> int:
    """Return the checksum of a row of a table. It shows a change of the row by a faulty disk."""
    return zlib.crc32(repr((table, row)).encode(errors="surrogatepass"))


SCHEMA = "".join(
    f"CREATE TABLE {name} ({columns}, seal INTEGER NOT NULL{_KEYS.get(name, '')}) STRICT;\n"
    for name, columns in TABLES.items()
) + "".join(
    f"INSERT INTO counts VALUES ('{name}', 0, {seal('counts', name, 0)});\n" for name in COUNTED
)
"""SQL statements that create the tables of an empty journal. The table `counts` records 0 rows for
each of them.
"""


def count_rows(changes: Mapping[str, int], counts: dict[str, int]) -> list[Record]:
    """Add the changes of numbers of rows to `counts`, which has the number of rows of each table.

    Return the SQL statements that write the new numbers to the table `counts`.
    """
    records: list[Record] = []
    for table, change in changes.items():
        counts[table] += change
        row = (table, counts[table])
        statement = "UPDATE counts SET num_rows = ?, seal = ? WHERE name = ?"
        records.append((statement, (counts[table], seal("counts", *row), table)))
    return records


def piece_rows(episode: int, position: int, piece: Piece, after: int) -> list[Record]:
    """Return the SQL statements that insert a piece, a run of tokens of an episode.

    `position` is the index of `piece` in the episode. Kept sets, signals, pictures and what
    `_source` returns go to tables of their own. Numbers are packed little-endian. Tokens take two
    bytes each if all of them fit, otherwise four. Log-probabilities are float32, the precision in
    which engines compute them. `after` is the number of the newest checkpoint.
    """
    count = len(piece.tokens)
    tokens = _pack(piece.tokens)
    sampled: tuple[Any, ...] = (None, None, None)
    if isinstance(piece, Sampled):
        sampled = (piece.version, piece.clean, struct.pack(f"<{count}f", *piece.behavior_logp))
    row = (episode, position, int(piece.provenance), count, tokens)
    rows = [insert("pieces", *row, *sampled, after)]
    if isinstance(piece, Sampled) and piece.kept_sets is not None:
        sets = piece.kept_sets.pack(piece.tokens)
        rows.append(insert("kept_sets", episode, position, sets, after))
    if isinstance(piece, Sampled) and piece.signals is not None:
        rows.append(insert("signals", episode, position, piece.signals.tobytes(), after))
    if isinstance(piece, Placed):
        rows.append(insert("placed", episode, position, *_source(piece), after))
    if isinstance(piece, ContextPiece) and piece.pictures:
        packed = b"".join(
            _PICTURE.pack(each.number, bytes.fromhex(each.digest)) for each in piece.pictures
        )
        rows.append(insert("pictures", episode, position, packed, after))
    return rows


def to_pictures(packed: bytes) -> tuple[Picture, ...]:
    """Return pictures from their bytes in the table `pictures`."""
    return tuple(Picture(number, digest.hex()) for number, digest in _PICTURE.iter_unpack(packed))


def _source(piece: Placed) -> tuple[Any, ...]:
    """Return the columns of the table `placed` for text with a known source.

    They are the version that wrote the text, its log-probabilities under this version, and the edit
    of its context, which is None for FOREIGN text. All are None for text without a known source.
    """
    if piece.source_logp is None:
        return (None,) * 5
    logps = struct.pack(f"<{len(piece.tokens)}f", *piece.source_logp)
    edit = piece.edit
    if edit is None:
        return (piece.version, logps, None, None, None)
    return (piece.version, logps, edit.start, edit.stop, _pack(edit.tokens, wide=True))


def to_placed(piece: Piece, *source: Any) -> Placed:
    """Return placed text from its piece and the columns of its row in the table `placed`.

    `source` are the columns that `_source` returns.
    """
    version, logps, start, stop, removed = source
    if version is None:
        return Placed(piece.tokens, piece.provenance)
    source_logp = struct.unpack(f"<{len(piece.tokens)}f", logps)
    edit = None
    if removed is not None:
        edit = Edit(start, stop, struct.unpack(f"<{len(removed) // 4}I", removed))
    return Placed(piece.tokens, piece.provenance, version, source_logp, edit)


def _pack(tokens: Sequence[int], *, wide: bool = False) -> bytes:
    """Return tokens as two bytes each, or as four if `wide` or if one of them needs it."""
    width = "I" if wide or max(tokens, default=0) >= 1 << 16 else "H"
    return struct.pack(f"<{len(tokens)}{width}", *tokens)


def to_piece(provenance: int, count: int, tokens: bytes, *sampled: Any) -> Piece:
    """Return a piece, a run of tokens of an episode, from the columns of its row in the table
    `pieces`.
    """
    version, clean, logps = sampled
    width = "H" if len(tokens) == 2 * count else "I"
    unpacked = struct.unpack(f"<{count}{width}", tokens)
    source = Provenance(provenance)
    if version is None:
        return ContextPiece(unpacked, source)
    behavior_logp = struct.unpack(f"<{count}f", logps)
    return Sampled(unpacked, behavior_logp, version, bool(clean), source)


def outcome_row(episode: int, outcome: Trajectory | Failure, after: int) -> Record:
    if isinstance(outcome, Failure):
        cause = (to_utf8(outcome.stage), to_utf8(outcome.error))
        return insert("failures", episode, *cause, outcome.turns, outcome.sampled_tokens, after)
    row = (
        len(outcome.pieces),
        outcome.stop,
        _dump_numbers(outcome.rewards),
        json.dumps([float(value) for value in outcome.turn_rewards]),
        _dump_numbers(outcome.facts),
    )
    return insert("trajectories", episode, *row, after)


def to_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, such as half of a surrogate pair.

    >>> to_utf8("half a pair: \\ud800")
    'half a pair: ?'
    """
    return text.encode(errors="replace").decode()


def grade(rewards: Mapping[str, float], facts: Mapping[str, float]) -> tuple[bool, float]:
    """Return an episode's success and total reward, as the class `Trajectory` computes them."""
    return is_success(rewards, facts), total_reward(rewards)


def _dump_numbers(values: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in values.items()})


_REMEDIES = {
    "disk is full": "Free space on its disk",
    "readonly": "Make the file and its folder writable",
    "locked": "End the other program that has it open",
    "unable to open": "Check that the file and its folder exist and can be read",
    "malformed": "Check the disk, and restore the run folder from a copy",
    "not a database": "Check the disk, and restore the run folder from a copy",
    "disk I/O error": "Check that its disk works and is mounted",
}
"""Advice for the user, by a part of the text of the error to which it applies."""


def journal_error(path: Path, cause: object) -> JournalError:
    """Return an error whose text names the journal's file, the cause and, for known causes, a
    remedy.
    """
    text = str(cause)
    remedy = next((each for words, each in _REMEDIES.items() if words in text), "")
    return JournalError(f"the journal {path} failed: {text}{f'. {remedy}' if remedy else ''}")
