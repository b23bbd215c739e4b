"""Reads: the database becomes records again. Read-only; nothing in the file is executed, only looked at."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import quote

from unstale.durability.journal.tables import (
    COLUMNS,
    FORMAT,
    SCHEMA,
    TRIED,
    failed,
    seal,
    unpack_logps,
    unpack_tokens,
)
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    Group,
    GroupRequest,
    Piece,
    Provenance,
    Sampled,
    Stop,
    Task,
    Trajectory,
)

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
    place: int
    """Of the task among the training tasks."""

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


@dataclass(frozen=True, slots=True)
class Marked:
    """A checkpoint that was the current one at its time."""

    checkpoint: int
    step: int
    version: int
    name: str


class JournalReader:
    """The journal as it was when this was made; for a later moment make another. `with` closes it."""

    def __init__(self, path: Path) -> None:
        """FileNotFoundError without a journal, `JournalError` if it cannot be one."""
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path.parent} holds no journal: there is no {path.name}")
        with ExitStack() as unless_sound:
            with self._named():
                _roll_back(path)
                self._connection = sqlite3.connect(
                    f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None
                )
                unless_sound.callback(self._connection.close)
                self._connection.executescript(
                    "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; BEGIN;"
                )
                ((found,),) = self.rows("PRAGMA user_version")
                self.rows(
                    "SELECT count(*) FROM sqlite_master"
                )  # the first look decides which moment this is
                self._connection.create_function("seal", -1, seal, deterministic=True)
            if found != FORMAT:
                raise failed(path, f"it has format {found}, this version reads {FORMAT}")
            with self._named():
                require_tables(path, self._connection)
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
            """WITH ends AS (SELECT number, count(t.episode) AS told, count(f.episode) AS broken FROM episodes
                LEFT JOIN trajectories t USING (episode) LEFT JOIN failures f USING (episode) GROUP BY number)
            SELECT g.number, env, split, task, seed, g.at, f.at, step, version, coalesce(told, 0),
                coalesce(broken, 0), g.place
            FROM groups g LEFT JOIN ends USING (number) LEFT JOIN finished f USING (number)
            LEFT JOIN consumed USING (number) ORDER BY g.number"""
        )
        return [
            Handed(number, Task(env, split, index), *rest)
            for number, env, split, index, *rest in found
        ]

    def versions(self) -> list[int]:
        """In the order of their publication."""
        return [version for (version,) in self.rows("SELECT version FROM versions ORDER BY id")]

    def events(self) -> list[dict[str, Any]]:
        """What happened, in order; a step's metrics are of kind `step`."""
        found = self.rows("SELECT at, kind, fields FROM events ORDER BY id")
        with self._named("the events"):
            return [{"at": at, "kind": kind, **_object(fields)} for at, kind, fields in found]

    def checkpoints(self) -> list[Marked]:
        """In order; the last is the current one."""
        found = self.rows(
            "SELECT checkpoint, step, version, name FROM checkpoints ORDER BY checkpoint"
        )
        return [Marked(*row) for row in found]

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of every step that was written down, as `metrics.jsonl` has them."""
        found = self.rows("SELECT fields FROM events WHERE kind = 'step' ORDER BY id")
        with self._named("the metrics"):
            return [_object(fields) for (fields,) in found]

    def outcomes(self, number: int) -> tuple[bool, ...]:
        """Of the last episodes, as many: whether they were finished, or given up."""
        found = self.rows(
            f"""SELECT trajectories.episode IS NOT NULL FROM (SELECT max(episode) AS episode FROM {TRIED}
            GROUP BY number, sibling) LEFT JOIN trajectories USING (episode) LEFT JOIN failures USING (episode)
            WHERE coalesce(trajectories.episode, failures.episode) IS NOT NULL ORDER BY episode DESC LIMIT ?""",
            number,
        )
        return tuple(bool(finished) for (finished,) in reversed(found))

    def unsound(self) -> list[str]:
        """Tables with rows that are not as they were written, in words."""
        wrong = []
        for table, columns in COLUMNS.items():
            question = f"SELECT count(*) FROM {table} WHERE seal IS NOT seal('{table}', {', '.join(columns)})"
            ((count,),) = self.rows(question)
            if count:
                wrong.append(f"{count} rows of {table} are not as they were written")
        return wrong

    def counts(self) -> tuple[int, int, int]:
        """Groups handed out, the place after the last one's task, and episodes begun."""
        (found,) = self.rows(
            """SELECT (SELECT coalesce(max(number) + 1, 0) FROM groups),
            (SELECT coalesce(max(place) + 1, 0) FROM groups), (SELECT coalesce(max(episode) + 1, 0) FROM episodes)"""
        )
        return found[0], found[1], found[2]

    def given_up(self, retries: int) -> frozenset[str]:
        """Keys of the tasks with an episode that failed more often than it was to be begun again."""
        found = self.rows(
            """SELECT env, split, task FROM groups WHERE number IN (SELECT number FROM episodes
            JOIN failures USING (episode) GROUP BY number, sibling HAVING count(*) > ?)""",
            retries,
        )
        return frozenset(Task(*row).key for row in found)

    def requests(self) -> list[GroupRequest]:
        """Every group that no checkpoint holds the effect of, in admission order, with all that is known of it."""
        found = self.rows(
            """SELECT g.number, env, split, task, seed, place, f.number IS NOT NULL FROM groups g
            LEFT JOIN finished f USING (number) WHERE g.number NOT IN (SELECT number FROM consumed) ORDER BY g.number"""
        )
        tasks = [Task(*row[1:4]) for row in found]
        return [
            GroupRequest(number, task, seed, place, True, self._past(number, task), bool(done))
            for task, (number, _, _, _, seed, place, done) in zip(tasks, found, strict=True)
        ]

    def _past(self, number: int, task: Task) -> tuple[EpisodeRecord, ...]:
        """Episodes of a group that has not been consumed, by sibling."""
        found = self.rows(
            f"""SELECT sibling, max(episode), count(failures.episode) FROM {TRIED} LEFT JOIN failures USING (episode)
            WHERE number = ? GROUP BY sibling ORDER BY sibling""",
            number,
        )
        if [row[0] for row in found] != list(range(len(found))):
            raise failed(
                self.path,
                f"group {number} lacks episodes: it has siblings {[row[0] for row in found]}",
            )
        return tuple(self._last(episode, task, failures) for _, episode, failures in found)

    def _last(self, episode: int, task: Task, failures: int) -> EpisodeRecord:
        ended = self.rows(
            """SELECT (SELECT count(*) FROM trajectories WHERE episode = ?1),
            (SELECT count(*) FROM failures WHERE episode = ?1), (SELECT count(*) FROM restarts WHERE episode = ?1)""",
            episode,
        )[0]
        if ended[2]:
            told = self.rows(
                "SELECT reason, turns, sampled_tokens FROM restarts WHERE episode = ?", episode
            )[0]
            return EpisodeRecord(episode, (), Failure(task, "replay", *told), failures)
        held = self.rows(
            "SELECT num_pieces, state FROM snapshots WHERE episode = ? ORDER BY num_pieces", episode
        )
        outcome = self._outcome(episode, task) if any(ended) else None
        also = [
            (branch, self._kept(branch).trajectory if told else None)
            for branch, told in self._branches(episode)
        ]
        branches = tuple(EpisodeRecord(branch, self.pieces(branch), end) for branch, end in also)
        return EpisodeRecord(
            episode, self.pieces(episode), outcome, failures, held[-1] if held else None, branches
        )

    def _branches(self, episode: int) -> list[tuple[int, bool]]:
        """What else was said in the last attempt at an episode, and whether it has ended."""
        return self.rows(
            """SELECT more.episode, t.episode IS NOT NULL FROM episodes JOIN episodes more USING (number, sibling)
            LEFT JOIN trajectories t ON t.episode = more.episode
            WHERE episodes.episode = ? AND more.episode > episodes.episode ORDER BY more.episode""",
            episode,
        )

    def trajectories(self) -> Iterator[Kept]:
        """Every finished episode, in the order in which they were begun."""
        for (episode,) in self.rows("SELECT episode FROM trajectories ORDER BY episode"):
            yield self._kept(episode)

    def group(self, number: int) -> Group:
        """As it was when it was finished: the last attempt at each episode counts."""
        found = self.rows(
            "SELECT env, split, task FROM groups JOIN finished USING (number) WHERE number = ?",
            number,
        )
        if not found:
            raise failed(self.path, f"group {number} was not finished")
        task = Task(*found[0])
        question = (
            f"SELECT max(episode) FROM {TRIED} WHERE number = ? GROUP BY sibling ORDER BY sibling"
        )
        last = self.rows(question, number)
        ended = [self._outcome(episode, task) for (episode,) in last]
        return Group(
            task=task,
            trajectories=tuple(outcome for outcome in ended if isinstance(outcome, Trajectory)),
            failures=tuple(outcome for outcome in ended if isinstance(outcome, Failure)),
            number=number,
        )

    def consumed(self, step: int) -> list[Group]:
        """What a step trained on, in its order."""
        return [
            self.group(n)
            for (n,) in self.rows("SELECT number FROM consumed WHERE step = ? ORDER BY place", step)
        ]

    def pieces(self, episode: int) -> tuple[Piece, ...]:
        """Of any episode, also of one that has not ended."""
        found = self.rows(
            f"SELECT {', '.join(COLUMNS['pieces'])}, seal FROM pieces WHERE episode = ? ORDER BY position",
            episode,
        )
        with self._named(f"the pieces of episode {episode}"):
            if [row[1] for row in found] != list(range(len(found))):
                raise ValueError("positions are not contiguous")
            if any(seal("pieces", *row[:-1]) != row[-1] for row in found):
                raise ValueError("a piece is not as it was written")
            return tuple(_piece(*row[2:-2]) for row in found)

    def _outcome(self, episode: int, task: Task) -> Trajectory | Failure:
        failure = self.rows(
            "SELECT stage, error, turns, sampled_tokens FROM failures WHERE episode = ?", episode
        )
        if failure:
            return Failure(task, *failure[0])
        also = tuple(
            self._kept(branch).trajectory for branch, ended in self._branches(episode) if ended
        )
        return replace(self._kept(episode).trajectory, branches=also).led()

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
            rewards, facts = _numbers(_object(texts[0])), _numbers(_object(texts[2]))
            turn_rewards = json.loads(texts[1])
            if stop not in get_args(Stop) or not isinstance(turn_rewards, list):
                raise ValueError(f"it ended with {stop!r} and {texts[1]}")
            spoken = tuple(_numbers(dict(enumerate(turn_rewards))).values())
            trajectory = Trajectory(
                pieces, rewards, stop, Task(env, split, index), seed, episode, spoken, facts
            )
            return Kept(trajectory, number, step)

    @contextmanager
    def _named(self, what: str = "") -> Iterator[None]:
        """Whatever is wrong with the file is a `JournalError` that names it."""
        try:
            yield
        except (
            sqlite3.Error,
            struct.error,
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise failed(self.path, f"{what}: {error}" if what else error) from error


def require_tables(path: Path, connection: sqlite3.Connection) -> None:
    """`JournalError` unless the database has the journal's tables and nothing else: no view, no trigger."""
    question = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        wanted = fresh.execute(question).fetchall()
    if connection.execute(question).fetchall() != wanted:
        raise failed(path, "its tables are not those of a journal")


def _roll_back(path: Path) -> None:
    """Undo what a writer was at when it was killed while it made the database one plain file: a reader may not."""
    if path.with_name(f"{path.name}-journal").exists():
        with closing(sqlite3.connect(path)) as writer:
            writer.execute("SELECT count(*) FROM sqlite_master")


def _object(text: str) -> dict[str, Any]:
    """What a JSON object holds. ValueError for anything else."""
    held = json.loads(text)
    if not isinstance(held, dict):
        raise ValueError(f"{text[:40]} is no object")
    return held


def _numbers(named: dict[Any, Any]) -> dict[Any, float]:
    if wrong := [
        name
        for name, value in named.items()
        if isinstance(value, bool) or not isinstance(value, int | float)
    ]:
        raise ValueError(f"{wrong} are no numbers")
    return {name: float(value) for name, value in named.items()}


def _piece(provenance: int, count: int, tokens: bytes, *sampled: Any) -> Piece:
    version, clean, logps = sampled
    source, text = Provenance(provenance), unpack_tokens(tokens, count)
    if version is None:
        return ContextPiece(text, source)
    return Sampled(text, unpack_logps(logps, count), version, bool(clean), source)
