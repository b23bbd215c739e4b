"""Reads: the database becomes records again. Read-only; nothing in the file is executed, only looked at."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from afterimage.journal.tables import FORMAT, failed, unpack_logps, unpack_tokens
from afterimage.trajectory import Failure, Given, Group, Piece, Provenance, Sampled, Task, Trajectory

Ended = Literal["open", "finished", "consumed", "failed"]


@dataclass(frozen=True, slots=True)
class Handed:
    """A group that was handed out, and how it ended. Times are seconds since 1970."""

    number: int
    task: Task
    seed: int
    handed_out: float
    finished: float | None
    step: int | None
    """That consumed it."""
    version: int | None
    """Of the policy that was trained on it."""
    num_trajectories: int
    num_failures: int
    """Attempts that broke, those begun again included."""

    @property
    def ended(self) -> Ended:
        """`failed` when no episode of it became a trajectory, consumed or not."""
        if self.finished is None:
            return "open"
        if not self.num_trajectories:
            return "failed"
        return "finished" if self.step is None else "consumed"


@dataclass(frozen=True, slots=True)
class Kept:
    """A finished episode, the group it belongs to, and the step that consumed it, if one has."""

    trajectory: Trajectory
    group: int
    step: int | None


class JournalReader:
    """The journal as it was when this was made; for a later moment make another. `with` closes it."""

    def __init__(self, path: Path) -> None:
        """FileNotFoundError without a journal, `JournalError` if it cannot be one."""
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path.parent} holds no journal: there is no {path.name}")
        with ExitStack() as unless_sound:
            with self._named():
                self._connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)
                unless_sound.callback(self._connection.close)
                self._connection.executescript("PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; BEGIN;")
                ((found,),) = self.rows("PRAGMA user_version")
                self.rows("SELECT count(*) FROM sqlite_master")  # the first look decides which moment this is
            if found != FORMAT:
                raise failed(path, f"it has format {found}, this version reads {FORMAT}")
            unless_sound.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def num_bytes(self) -> int:
        """Of the main file once all that is committed is in it; beside it a run has a few MB in `-wal`."""
        ((pages,), (size,)) = (*self.rows("PRAGMA page_count"), *self.rows("PRAGMA page_size"))
        return int(pages * size)

    def rows(self, statement: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        """The answer to one SQL statement."""
        with self._named():
            return self._connection.execute(statement, parameters).fetchall()

    def groups(self) -> list[Handed]:
        """Every group handed out, in admission order."""
        found = self.rows(
            """SELECT g.number, env, split, task, seed, g.at, f.at, step, version,
                (SELECT count(*) FROM episodes JOIN trajectories USING (episode) WHERE number = g.number),
                (SELECT count(*) FROM episodes JOIN failures USING (episode) WHERE number = g.number)
            FROM groups g LEFT JOIN finished f USING (number) LEFT JOIN consumed USING (number) ORDER BY g.number"""
        )
        return [Handed(number, Task(env, split, index), *rest) for number, env, split, index, *rest in found]

    def versions(self) -> list[int]:
        """In the order of their publication."""
        return [version for (version,) in self.rows("SELECT version FROM versions ORDER BY id")]

    def events(self) -> list[dict[str, Any]]:
        """What happened, in order; a step's metrics are of kind `step`."""
        found = self.rows("SELECT at, kind, fields FROM events ORDER BY id")
        return [{"at": at, "kind": kind, **json.loads(fields)} for at, kind, fields in found]

    def trajectories(self) -> Iterator[Kept]:
        """Every finished episode, in the order in which they were begun."""
        for (episode,) in self.rows("SELECT episode FROM trajectories ORDER BY episode"):
            yield self._kept(episode)

    def group(self, number: int) -> Group:
        """As it was when it was finished: the last attempt at each episode counts."""
        found = self.rows("SELECT env, split, task FROM groups JOIN finished USING (number) WHERE number = ?", number)
        if not found:
            raise failed(self.path, f"group {number} was not finished")
        task = Task(*found[0])
        last = self.rows("SELECT max(episode) FROM episodes WHERE number = ? GROUP BY sibling ORDER BY sibling", number)
        ended = [self._outcome(episode, task) for (episode,) in last]
        return Group(
            task=task,
            trajectories=tuple(outcome for outcome in ended if isinstance(outcome, Trajectory)),
            failures=tuple(outcome for outcome in ended if isinstance(outcome, Failure)),
            number=number,
        )

    def consumed(self, step: int) -> list[Group]:
        """What a step trained on, in its order."""
        return [self.group(n) for (n,) in self.rows("SELECT number FROM consumed WHERE step = ? ORDER BY place", step)]

    def pieces(self, episode: int) -> tuple[Piece, ...]:
        """Of any episode, also of one that has not ended."""
        found = self.rows(
            """SELECT position, provenance, num_tokens, tokens, version, clean, behavior_logp
            FROM pieces WHERE episode = ? ORDER BY position""",
            episode,
        )
        with self._named(f"the pieces of episode {episode}"):
            if [row[0] for row in found] != list(range(len(found))):
                raise ValueError("positions are not contiguous")
            return tuple(_piece(*row[1:]) for row in found)

    def _outcome(self, episode: int, task: Task) -> Trajectory | Failure:
        failure = self.rows("SELECT stage, error, turns, sampled_tokens FROM failures WHERE episode = ?", episode)
        return Failure(task, *failure[0]) if failure else self._kept(episode).trajectory

    def _kept(self, episode: int) -> Kept:
        found = self.rows(
            """SELECT number, step, env, split, task, e.seed, num_pieces, stop, rewards, turn_rewards, facts
            FROM trajectories JOIN episodes e USING (episode) JOIN groups USING (number)
            LEFT JOIN consumed USING (number) WHERE episode = ?""",
            episode,
        )
        pieces = self.pieces(episode)
        with self._named(f"episode {episode}"):
            if not found or found[0][6] != len(pieces):
                raise ValueError("it is not whole")
            number, step, env, split, index, seed, _, stop, *texts = found[0]
            rewards, turn_rewards, facts = map(json.loads, texts)
            task = Task(env, split, index)
            trajectory = Trajectory(pieces, rewards, stop, task, seed, episode, tuple(turn_rewards), facts)
            return Kept(trajectory, number, step)

    @contextmanager
    def _named(self, what: str = "") -> Iterator[None]:
        """Whatever is wrong with the file is a `JournalError` that names it."""
        try:
            yield
        except (sqlite3.Error, struct.error, ValueError, TypeError, RecursionError) as error:
            raise failed(self.path, f"{what}: {error}" if what else error) from error


def _piece(provenance: int, count: int, tokens: bytes, *sampled: Any) -> Piece:
    version, clean, logps = sampled
    source, text = Provenance(provenance), unpack_tokens(tokens, count)
    if version is None:
        return Given(text, source)
    return Sampled(text, unpack_logps(logps, count), version, bool(clean), source)
