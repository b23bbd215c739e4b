"""Read the journal of a run, and turn the rows of its tables into records.

The database is opened read-only, and nothing that it contains is executed.
"""

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args
from urllib.parse import quote

from unstale.durability.journal.expert_files import ExpertFiles, ExpertKey
from unstale.durability.journal.tables import (
    ATTEMPTS,
    COLUMNS,
    COUNTED,
    EPISODE_BUDGET,
    FORMAT,
    GROUP_SIZE,
    ROUND,
    SCHEMA,
    TABLES,
    TOKEN_SAMPLES,
    TURN_LIMIT,
    journal_error,
    seal,
    to_pictures,
    to_piece,
    to_placed,
)
from unstale.durability.journal.token_rows import TrainedTokens, to_trained, unpack_tokens
from unstale.durability.journal.wal import find_damage
from unstale.durability.run_folder import METRICS, BrokenFile, read_jsonl
from unstale.kept_sets import KeptSets
from unstale.records import (
    NO_BUDGET,
    UNREPEATED_TEXT,
    ContextPiece,
    EpisodeBudget,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Placed,
    Sampled,
    Stop,
    Task,
    Trajectory,
    TurnLimit,
    link_experts,
    walk,
)
from unstale.routed_experts import RoutedExperts
from unstale.signals import Signals
from unstale.token_values import TokenValues

_Read = TypeVar("_Read")

_OF_TEXT = f"coalesce(error GLOB '{UNREPEATED_TEXT}*', 0)"
"""SQL condition: an attempt failed by the text of its fork (`UNREPEATED_TEXT`)."""

GroupEnd = Literal["open", "finished", "consumed", "failed"]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of episodes in the journal, from its start on. Times are in seconds since 1970.

    `handed_out` is the time of its start. `finished` is the time at which its last episode ended,
    or None if some have not ended.
    """

    number: int
    task: Task
    seed: int
    handed_out: float
    finished: float | None
    step: int | None
    """The step that trained on the group. None if no step did."""
    version: int | None
    """The version of the policy at the beginning of `step`.

    None if no step trained on the group.
    """
    num_trajectories: int
    num_failures: int
    """Number of failed attempts at the group's episodes, including attempts that were repeated."""
    place: int
    """Index of the group's task in the sequence of training tasks."""

    @property
    def ended(self) -> GroupEnd:
        """The group's end: "open" (not all episodes ended), "finished" (not trained on), "consumed"
        or "failed".

        "consumed" means that a step trained on it. "failed" means that all of its episodes failed,
        even if a batch contained the group.
        """
        if self.finished is None:
            return "open"
        if not self.num_trajectories:
            return "failed"
        return "finished" if self.step is None else "consumed"


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """A finished episode in the journal, with the number of its group.

    `step` is the step that trained on it. None if no step did.
    """

    trajectory: Trajectory
    group: int
    step: int | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint in the journal: its number, step and version, and the name of its folder."""

    checkpoint: int
    step: int
    version: int
    name: str


class JournalReader:
    """A reader of a journal, which it sees as it was when the reader was created.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, path: Path, routed_experts: ExpertFiles | None = None, *, leave_files: bool = False
    ) -> None:
        """Open the journal `path` for reading.

        `routed_experts` are the files with the experts that an MoE model used. With None, sampled
        tokens are returned without them. With `leave_files`, no file of the folder is written, not
        even the lock file of the write-ahead log. Raises FileNotFoundError if `path` does not
        exist, and `JournalError` if it is not a journal.
        """
        self.path = path
        self._routed_experts = routed_experts
        self._group_experts: tuple[int, dict[ExpertKey, RoutedExperts]] | None = None
        """The group whose routed experts were read last: its number and these experts."""
        if not path.is_file():
            problem = f"{path.name} is missing"
            if not path.parent.is_dir():
                problem = "it is a file" if path.parent.exists() else "it does not exist"
            raise FileNotFoundError(f"{path.parent} holds no journal: {problem}")
        with ExitStack() as on_error:
            require_sound_wal(path)
            with self.wrap_errors():
                if not leave_files:
                    _roll_back(path)
                address = f"file:{quote(str(path))}?mode=ro&readonly_shm={int(leave_files)}"
                self._connection = sqlite3.connect(address, uri=True, isolation_level=None)
                on_error.callback(self._connection.close)
                self._connection.executescript(
                    "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; BEGIN;"
                )
                ((version,),) = self.rows("PRAGMA user_version")
                # the first query fixes the moment that is read
                self.rows("SELECT count(*) FROM sqlite_master")
                self._connection.create_function("seal", -1, seal, deterministic=True)
            if version != FORMAT:
                raise journal_error(path, f"its format is {version}, this release reads {FORMAT}")
            with self.wrap_errors():
                require_tables(path, self._connection)
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the journal's main file.

        While the run is active, a few MB more are in SQLite's `-wal` file.
        """
        ((pages,),) = self.rows("PRAGMA page_count")
        ((page_bytes,),) = self.rows("PRAGMA page_size")
        return int(pages * page_bytes)

    def rows(self, statement: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL statement yields. `parameters` replace its question marks."""
        with self.wrap_errors():
            return self._connection.execute(statement, parameters).fetchall()

    def groups(self) -> list[GroupRow]:
        """Return all groups in the order in which they were started."""
        rows = self.rows(
            """WITH ends AS (
                SELECT number, count(t.episode) AS done, count(f.episode) AS broken FROM episodes
                LEFT JOIN trajectories t USING (episode) LEFT JOIN failures f USING (episode)
                GROUP BY number)
            SELECT g.number, env, split, task, seed, g.at, f.at, step, version,
                coalesce(done, 0), coalesce(broken, 0), g.place
            FROM groups g LEFT JOIN ends USING (number) LEFT JOIN finished f USING (number)
            LEFT JOIN consumed USING (number) ORDER BY g.number"""
        )
        return [
            GroupRow(number, Task(env, split, index), *columns)
            for number, env, split, index, *columns in rows
        ]

    def versions(self) -> list[int]:
        """Return the numbers of the published weight versions, in order of publication."""
        return [version for (version,) in self.rows("SELECT version FROM versions ORDER BY id")]

    def events(self) -> list[dict[str, Any]]:
        """Return all events of the run, oldest first, with time (`at`), `kind` and the event's own
        fields.

        An example is an event of kind "step", whose fields are the metrics of a step.
        """
        rows = self.rows("SELECT at, kind, fields FROM events ORDER BY id")
        with self.wrap_errors("the events"):
            return [{"at": at, "kind": kind, **_parse_object(fields)} for at, kind, fields in rows]

    def checkpoints(self) -> list[CheckpointRow]:
        """Return the checkpoints in the journal, oldest first. A resumed run continues from the
        last one.
        """
        return [
            CheckpointRow(*row)
            for row in self.rows(
                "SELECT checkpoint, step, version, name FROM checkpoints ORDER BY checkpoint"
            )
        ]

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of every logged step, oldest first.

        They are those in `metrics.jsonl`.
        """
        rows = self.rows("SELECT fields FROM events WHERE kind = 'step' ORDER BY id")
        with self.wrap_errors("the metrics"):
            return [_parse_object(fields) for (fields,) in rows]

    def logged_step(self, step: int) -> tuple[int, dict[str, Any]]:
        """Return the metrics of a step, after the id of the event that has them.

        Returns (-1, {}) if they were not logged.
        """
        rows = self.rows("SELECT id, fields FROM events WHERE kind = 'step' ORDER BY id DESC")
        with self.wrap_errors("the metrics"):
            for event, fields in rows:
                if (found := _parse_object(fields))["step"] == step:
                    return event, found
        return -1, {}

    def token_samples(self, *, newest: int = -1) -> Iterator[dict[str, Any]]:
        """Yield a row for each token of the samples that the run logged: step, lag, log_d and
        log_s.

        The lag is the number of versions by which the token is older than the weights in training.
        log_d is old_logp - behavior_logp and log_s is logp - old_logp. A token that was audited
        also has `true_log_d` and `true_log_s`, which are computed with the exact old_logp. With
        `newest`, only the samples of the last `newest` steps are read.
        """
        rows = self.rows(
            "SELECT fields FROM (SELECT id, fields FROM events WHERE kind = ? "
            "ORDER BY id DESC LIMIT ?) ORDER BY id",
            TOKEN_SAMPLES,
            newest,
        )
        with self.wrap_errors("the token samples"):
            for (fields,) in rows:
                sample = _parse_object(fields)
                for columns in (sample["tokens"], sample["audited"]):
                    for values in zip(*columns.values(), strict=True):
                        yield {"step": sample["step"], **dict(zip(columns, values, strict=True))}

    def failed_shares(self, number: int) -> tuple[float, ...]:
        """Return the share of failed episodes in each of the last `number` finished groups.

        The shares are in the order in which the groups were started. An episode failed if its last
        attempt failed. Episodes that failed by the text of their fork are left out.
        """
        rows = self.rows(
            f"""SELECT avg(trajectories.episode IS NULL)
            FROM (SELECT number, max(episode) AS episode FROM {ATTEMPTS} GROUP BY number, sibling)
            JOIN finished USING (number) LEFT JOIN trajectories USING (episode)
            LEFT JOIN failures USING (episode) WHERE NOT {_OF_TEXT}
            GROUP BY number ORDER BY number DESC LIMIT ?""",
            number,
        )
        return tuple(share for (share,) in reversed(rows))

    def unsound(self) -> list[str]:
        """Return a sentence for each table of the journal in which rows were changed, lost or
        added.

        The list is empty for an undamaged journal.
        """
        problems = []
        for table in TABLES:
            columns = COLUMNS[table]
            expected = f"seal('{table}', {', '.join(columns)})"
            ((count,),) = self.rows(f"SELECT count(*) FROM {table} WHERE seal IS NOT {expected}")
            if count:
                problems.append(f"{count} rows of {table} changed after they were written")
        written = dict(self.rows("SELECT name, num_rows FROM counts"))
        for table in COUNTED:
            ((count,),) = self.rows(f"SELECT count(*) FROM {table}")
            if count != written.get(table):
                problems.append(f"{table} has {count} rows, but {written.get(table)} were written")
        return problems

    def counts(self) -> tuple[int, int, int]:
        """Return how many groups were started, the index of the next training task, and how many
        episodes were begun.
        """
        ((groups, place, episodes),) = self.rows(
            """SELECT coalesce(max(number) + 1, 0), coalesce(max(place) + 1, 0),
            (SELECT coalesce(max(episode) + 1, 0) FROM episodes) FROM groups"""
        )
        return groups, place, episodes

    def given_up(self, retries: int) -> frozenset[Task]:
        """Return the tasks for which an episode failed more than `retries` times.

        Failures by the text of a fork are left out.
        """
        rows = self.rows(
            f"""SELECT env, split, task FROM groups WHERE number IN (
                SELECT number FROM episodes JOIN failures USING (episode)
                WHERE NOT {_OF_TEXT}
                GROUP BY number, sibling HAVING count(*) > ?)""",
            retries,
        )
        return frozenset(Task(*row) for row in rows)

    def requests(self) -> list[GroupRequest]:
        """Return the groups that no checkpoint in the journal was trained on, in the order of their
        start.

        Each is a request to run the group's episodes, with what the journal recorded of them.
        """
        rows = self.rows(
            """SELECT g.number, env, split, task, seed, place, f.number IS NOT NULL
            FROM groups g LEFT JOIN finished f USING (number)
            WHERE g.number NOT IN (SELECT number FROM consumed) ORDER BY g.number"""
        )
        sizes = self._sizes()
        limits = self.turn_limits()
        budgets = self._of_groups(EPISODE_BUDGET, EpisodeBudget)
        rounds = self._rounds()
        requests = []
        for number, env, split, index, seed, place, is_finished in rows:
            task = Task(env, split, index)
            request = GroupRequest(
                number,
                task,
                seed,
                place,
                begun=True,
                past=self._episode_records(number, task),
                finished=bool(is_finished),
                sizes=sizes.get(number, ()),
                turn_limit=limits.get(number),
                budget=budgets.get(number, NO_BUDGET),
                rounds=rounds.get(number, ()),
            )
            requests.append(request)
        return requests

    def _sizes(self) -> dict[int, tuple[int, ...]]:
        """Return the sizes of groups that were enlarged, or started with another number of episodes
        than `schedule.group_size`.

        By group: the number of episodes at its start, then after each enlargement.
        """
        rows = self.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", GROUP_SIZE)
        sizes: dict[int, tuple[int, ...]] = {}
        with self.wrap_errors("the sizes of groups"):
            for (fields,) in rows:
                event = _parse_object(fields)
                group = int(event["group"])
                sizes[group] = (*sizes.get(group, ()), int(event["size"]))
        return sizes

    def turn_limits(self) -> dict[int, TurnLimit]:
        """Return the turn limits of groups by the number of the group. Groups without one are left
        out.
        """
        return self._of_groups(TURN_LIMIT, TurnLimit)

    def _of_groups(self, kind: str, read: Callable[..., _Read]) -> dict[int, _Read]:
        """Return what `read` returns for the event of this `kind` of each group, by the group's
        number.

        `read` gets the event's fields other than the group. Groups without such an event are left
        out.
        """
        found = {}
        for (fields,) in self.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", kind):
            with self.wrap_errors(f"an event of kind {kind}"):
                event = _parse_object(fields)
                number = int(event.pop("group"))
                found[number] = read(**event)
        return found

    def _rounds(self) -> dict[int, tuple[Mapping[str, Any], ...]]:
        """Return, by the number of the group, the recorded decisions about its episodes, oldest
        first.

        Groups without such decisions are left out.
        """
        rows = self.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", ROUND)
        rounds: dict[int, tuple[Mapping[str, Any], ...]] = {}
        with self.wrap_errors("the rounds of groups"):
            for (fields,) in rows:
                event = _parse_object(fields)
                group = int(event["group"])
                rounds[group] = (*rounds.get(group, ()), event)
        return rounds

    def visits(self) -> dict[Task, int]:
        """Return the number of groups that were started on each task."""
        rows = self.rows("SELECT env, split, task, count(*) FROM groups GROUP BY env, split, task")
        return {Task(env, split, index): count for env, split, index, count in rows}

    def trajectories(self) -> Iterator[StoredEpisode]:
        """Yield every finished episode, in the order in which the episodes were begun."""
        for (episode,) in self.rows("SELECT episode FROM trajectories ORDER BY episode"):
            yield self.episode(episode)

    def group(self, number: int) -> Group:
        """Return a finished group, with the result of the last attempt at each of its episodes.

        Raises `JournalError` if the group is not finished.
        """
        rows = self.rows(
            "SELECT env, split, task FROM groups JOIN finished USING (number) WHERE number = ?",
            number,
        )
        if not rows:
            raise journal_error(self.path, f"group {number} is not finished")
        task = Task(*rows[0])
        last = self.rows(
            f"SELECT max(episode) FROM {ATTEMPTS} WHERE number = ? "
            "GROUP BY sibling ORDER BY sibling",
            number,
        )
        outcomes = [self._outcome(episode, task) for (episode,) in last]
        if None in outcomes:
            raise journal_error(self.path, f"group {number} has an episode without an outcome")
        return Group(
            task=task,
            trajectories=tuple(end for end in outcomes if isinstance(end, Trajectory)),
            failures=tuple(end for end in outcomes if isinstance(end, Failure)),
            number=number,
        )

    def consumed(self, step: int) -> list[Group]:
        """Return the groups that a step trained on for the first time, in the order of the
        batch.
        """
        rows = self.rows("SELECT number FROM consumed WHERE step = ? ORDER BY place", step)
        return [self.group(number) for (number,) in rows]

    def replayed(self, step: int | None = None) -> list[int]:
        """Return the numbers of groups that a step trained on although an earlier step had trained
        on them.

        They are in the order of the batch. Without `step`, those of all steps are returned, ordered
        by step.
        """
        where = "" if step is None else f"WHERE step = {int(step)}"
        rows = self.rows(f"SELECT number FROM replayed {where} ORDER BY step, place")
        return [number for (number,) in rows]

    def token_steps(self) -> dict[int, list[int]]:
        """Return, by group, the steps for which the journal has values of the group's trained
        tokens.

        Such values are log D, log S, the weight and the advantage. Groups and steps are in order. A
        group has several steps if several trained on it.
        """
        steps: dict[int, list[int]] = {}
        rows = self.rows("SELECT number, step FROM trained_tokens ORDER BY number, step")
        for group, step in rows:
            steps.setdefault(group, []).append(step)
        return steps

    @property
    def num_token_values(self) -> int:
        """Number of trained tokens for which the journal has values, such as log D and the weight.

        A token counts once for each step that trained on it.
        """
        ((count,),) = self.rows("SELECT coalesce(sum(num_tokens), 0) FROM trained_tokens")
        return int(count)

    def token_rows(self) -> Iterator[tuple[int, int, str, int, bytes]]:
        """Yield the rows of the table `trained_tokens`: group, step, route, number of tokens,
        packed values.

        The route is the way in which `old_logp` was computed, as in the option `old_logps.route`.
        The values are packed by `token_rows.pack_tokens`.
        """
        for group in self.token_steps():
            yield from self.rows(
                "SELECT number, step, route, num_tokens, tokens FROM trained_tokens "
                "WHERE number = ? ORDER BY step",
                group,
            )

    def trained_tokens(
        self, group: int, step: int | None = None, *, episode: int | None = None
    ) -> list[TrainedTokens]:
        """Return the values of a group's trained tokens, one element for each episode and step.

        The arrays of an element are `[n]`, over the episode's sampled tokens in order. Elements are
        in the order of the steps, then of the batch. Without `step`, all steps that trained on the
        group are included. With `episode`, only this episode is returned. Empty if the journal has
        no values of this group. A step's values can be read before its checkpoint is written.
        Raises `JournalError` if a row is damaged.
        """
        found: list[TrainedTokens] = []
        for row in self._token_rows(group, step):
            with self.wrap_errors(_row_of_tokens(row)):
                found += self._trained(row, episode)
        return found

    def token_values(self, group: int, step: int) -> list[TokenValues]:
        """Return the values of a group's trained tokens in one step, one element for each episode.

        The elements have no `logp`, `old_logp` and `behavior_logp`, because these need the
        episodes' tokens. So this takes a third of the time of `trained_tokens`. It does not check
        that the episodes have as many tokens as there are values. Raises `JournalError` if the row
        is damaged.
        """
        found: list[TokenValues] = []
        for row in self._token_rows(group, step):
            with self.wrap_errors(_row_of_tokens(row)):
                found += _unpack_row(row)
        return found

    def _token_rows(self, group: int, step: int | None) -> Iterator[tuple[Any, ...]]:
        """Yield a group's rows of the table `trained_tokens`, by step. With `step`, only that of
        this step.
        """
        where = "" if step is None else f"AND step = {int(step)}"
        rows = self.rows(
            f"SELECT {', '.join(COLUMNS['trained_tokens'])}, seal FROM trained_tokens "
            f"WHERE number = ? {where} ORDER BY step",
            group,
        )
        for row in rows:
            with self.wrap_errors(_row_of_tokens(row)):
                if seal("trained_tokens", *row[:-1]) != row[-1]:
                    raise ValueError("they changed after they were written")
            yield row

    def _trained(self, row: Sequence[Any], episode: int | None) -> list[TrainedTokens]:
        """Return the values in a row of the table `trained_tokens`, one element for each episode.

        With `episode`, only this episode is returned. Raises ValueError if the row is wrong.
        """
        import numpy as np

        number, step, version, *_ = row
        found = []
        for values in _unpack_row(row):
            if episode not in (None, values.episode):
                continue
            rows = self.rows("SELECT number FROM episodes WHERE episode = ?", values.episode)
            if rows != [(number,)]:
                raise ValueError(f"episode {values.episode} is not one of its group")
            sampled = [
                np.array(piece.behavior_logp, np.float32)
                for piece in self.pieces(values.episode)
                if isinstance(piece, Sampled)
            ]
            logp = np.concatenate([np.empty(0, np.float32), *sampled])
            found.append(to_trained(values, step=step, version=version, behavior_logp=logp))
        return found

    def episode(self, episode: int) -> StoredEpisode:
        """Return a finished episode. Raises `JournalError` if the episode has not finished."""
        rows = self.rows(
            """SELECT number, step, env, split, task, e.seed,
                num_pieces, stop, rewards, turn_rewards, facts
            FROM trajectories JOIN episodes e USING (episode) JOIN groups USING (number)
            LEFT JOIN consumed USING (number) WHERE episode = ?""",
            episode,
        )
        pieces = self.pieces(episode)
        with self.wrap_errors(f"episode {episode}"):
            if not rows:
                raise ValueError("it has not finished")
            number, step, env, split, index, seed, num_pieces, *end = rows[0]
            stop, rewards, turn_rewards, facts = end
            if num_pieces != len(pieces):
                raise ValueError(f"it has {len(pieces)} pieces, but ended with {num_pieces}")
            turns = json.loads(turn_rewards)
            if stop not in get_args(Stop) or not isinstance(turns, list):
                raise ValueError(f"it ended with {stop!r} and turn rewards {turn_rewards}")
            trajectory = Trajectory(
                pieces=pieces,
                rewards=_require_numbers(_parse_object(rewards)),
                stop=stop,
                task=Task(env, split, index),
                seed=seed,
                episode=episode,
                turn_rewards=tuple(_require_numbers(dict(enumerate(turns))).values()),
                facts=_require_numbers(_parse_object(facts)),
                fork=self.fork(episode, pieces),
                role=self._role(episode),
            )
            return StoredEpisode(trajectory, number, step)

    def fork(self, episode: int, pieces: Sequence[Piece]) -> Fork | None:
        """Return where and how an episode was forked from another one. None if it was not forked.

        `pieces` are the pieces of the episode.
        """
        for parent, at in self.rows("SELECT parent, at FROM forks WHERE episode = ?", episode):
            note, writes = self._note(episode)
            text = () if note else _text_of_fork(pieces, at)
            return Fork(parent, at, text, note, writes)
        return None

    def _note(self, episode: int) -> tuple[str, bool]:
        """Return the note that ends an episode's prompt, and True if the note is the whole prompt.

        ("", False) if the episode has no note.
        """
        rows = self.rows("SELECT note, writes FROM notes WHERE episode = ?", episode)
        return next(((note, bool(writes)) for note, writes in rows), ("", False))

    def _role(self, episode: int) -> str:
        return "".join(
            row[0] for row in self.rows("SELECT role FROM roles WHERE episode = ?", episode)
        )

    def pieces(self, episode: int) -> tuple[Piece, ...]:
        """Return the recorded tokens of an episode as pieces. The episode may not have ended yet.

        A piece is a run of tokens that are all context, or that one weight version sampled.
        """
        rows = self.rows(
            f"SELECT {', '.join(COLUMNS['pieces'])}, seal FROM pieces WHERE episode = ? "
            "ORDER BY position",
            episode,
        )
        with self.wrap_errors(f"the pieces of episode {episode}"):
            if [row[1] for row in rows] != list(range(len(rows))):
                raise ValueError("positions are not contiguous")
            if any(seal("pieces", *row[:-1]) != row[-1] for row in rows):
                raise ValueError("a piece changed after it was written")
            pieces = tuple(to_piece(*row[2:-2]) for row in rows)
        pieces = self._with_annexes(episode, pieces)
        return self._with_experts(episode, pieces) if self._routed_experts else pieces

    def _with_annexes(self, episode: int, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Return pieces with their further data from other tables, such as kept sets and pictures
        (`_ANNEXES`).
        """
        found = list(pieces)
        for table, attach in _ANNEXES.items():
            rows = self.rows(
                f"SELECT {', '.join(COLUMNS[table])}, seal FROM {table} WHERE episode = ?", episode
            )
            with self.wrap_errors(f"{table} of episode {episode}"):
                for row in rows:
                    if seal(table, *row[:-1]) != row[-1]:
                        raise ValueError("a row changed after it was written")
                    found[row[1]] = attach(found[row[1]], *row[2:-2])
        return tuple(found)

    def _with_experts(self, episode: int, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        assert self._routed_experts is not None
        ((group,),) = self.rows("SELECT number FROM episodes WHERE episode = ?", episode)
        if self._group_experts is None or self._group_experts[0] != group:
            self._group_experts = group, self._routed_experts.read(group)
        records = self._group_experts[1]
        linked: list[Piece] = []
        for position, piece in enumerate(pieces):
            if isinstance(piece, Sampled):
                found = self._routed_experts.find(records, episode, position, piece)
                piece = link_experts(replace(piece, routed_experts=found), linked)
            linked.append(piece)
        return tuple(linked)

    def _episode_records(self, number: int, task: Task) -> tuple[EpisodeRecord, ...]:
        """Return the last attempt at each episode of a group, in order of the episodes."""
        rows = self.rows(
            f"""SELECT sibling, max(episode), count(failures.episode)
            FROM {ATTEMPTS} LEFT JOIN failures USING (episode)
            WHERE number = ? GROUP BY sibling ORDER BY sibling""",
            number,
        )
        siblings = [row[0] for row in rows]
        if siblings != list(range(len(rows))):
            raise journal_error(self.path, f"group {number} lacks episodes: it has only {siblings}")
        return tuple(self._last_attempt(episode, task, failures) for _, episode, failures in rows)

    def _last_attempt(self, episode: int, task: Task, failures: int) -> EpisodeRecord:
        for reason in self.rows(
            "SELECT reason, turns, sampled_tokens FROM restarts WHERE episode = ?", episode
        ):
            fork = self.fork(episode, self.pieces(episode))
            ended = replace(Failure(task, "replay", *reason), fork=fork)
            return EpisodeRecord(episode, (), ended, failures, fork=fork)
        snapshots = self.rows(
            "SELECT num_pieces, state FROM snapshots WHERE episode = ? ORDER BY num_pieces", episode
        )
        branches = []
        for branch, is_finished, seed in self._branches(episode):
            end = self.episode(branch).trajectory if is_finished else None
            role = self._role(branch)
            branches.append(EpisodeRecord(branch, self.pieces(branch), end, role=role, seed=seed))
        pieces = self.pieces(episode)
        return EpisodeRecord(
            episode=episode,
            pieces=pieces,
            outcome=self._outcome(episode, task),
            failures=failures,
            snapshot=snapshots[-1] if snapshots else None,
            branches=tuple(branches),
            fork=self.fork(episode, pieces),
        )

    def _branches(self, episode: int) -> list[tuple[int, bool, int]]:
        """Return `(episode number, ended, seed)` of the further conversations of an episode's last
        attempt.

        An agent begins a further conversation when it edits its history or starts a sub-agent.
        """
        return self.rows(
            """SELECT more.episode, t.episode IS NOT NULL, more.seed
            FROM episodes JOIN episodes more USING (number, sibling)
            LEFT JOIN trajectories t ON t.episode = more.episode
            WHERE episodes.episode = ? AND more.episode > episodes.episode ORDER BY more.episode""",
            episode,
        )

    def _outcome(self, episode: int, task: Task) -> Trajectory | Failure | None:
        """Return the result of an attempt at an episode, with the attempt's further conversations.

        None if the attempt has not ended.
        """
        for row in self.rows(
            "SELECT stage, error, turns, sampled_tokens FROM failures WHERE episode = ?", episode
        ):
            fork = self.fork(episode, self.pieces(episode))
            return replace(Failure(task, *row), fork=fork)
        if not self.rows("SELECT 1 FROM trajectories WHERE episode = ?", episode):
            return None
        branches = self._branches(episode)
        ended = tuple(self.episode(branch).trajectory for branch, done, _ in branches if done)
        return replace(self.episode(episode).trajectory, branches=ended).led()

    @contextmanager
    def wrap_errors(self, subject: str = "") -> Iterator[None]:
        """Return a context that turns an error of reading into a `JournalError` with the file's
        name.

        `subject` names in the error what was read.
        """
        try:
            yield
        except (
            sqlite3.Error,
            struct.error,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            cause = f"{subject}: {error}" if subject else error
            raise journal_error(self.path, cause) from error


def _with_kept_sets(piece: Piece, packed: bytes) -> Piece:
    return replace(_sampled(piece), kept_sets=KeptSets.unpack(packed, piece.tokens))


def _with_signals(piece: Piece, data: bytes) -> Piece:
    return replace(_sampled(piece), signals=Signals.frombuffer(data))


def _sampled(piece: Piece) -> Sampled:
    if not isinstance(piece, Sampled):
        raise ValueError("a piece was not sampled")
    return piece


def _with_pictures(piece: Piece, packed: bytes) -> Piece:
    if not isinstance(piece, ContextPiece):
        raise ValueError("a piece is no context")
    return replace(piece, pictures=to_pictures(packed))


_ANNEXES: Mapping[str, Callable[..., Piece]] = {
    "kept_sets": _with_kept_sets,
    "pictures": _with_pictures,
    "placed": to_placed,
    "signals": _with_signals,
}
"""Table with further data of some pieces -> function that adds the data of its row to a piece."""


def _row_of_tokens(row: Sequence[Any]) -> str:
    return f"the trained tokens of group {row[0]} in step {row[1]}"


def _unpack_row(row: Sequence[Any]) -> list[TokenValues]:
    """Return the values in a row of the table `trained_tokens`, one element for each episode.

    Raises ValueError if the row is wrong.
    """
    number, _, _, route, num_tokens, packed, *_ = row
    found = unpack_tokens(packed, group=number, route=route)
    if sum(len(each.flags) for each in found) != num_tokens:
        raise ValueError(f"they are not {num_tokens} tokens")
    return found


def require_tables(path: Path, connection: sqlite3.Connection) -> None:
    """Raise `JournalError` if a database does not have exactly the tables of a journal.

    A view or trigger also raises it. `path` is named in the error.
    """
    question = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        expected = fresh.execute(question).fetchall()
    if connection.execute(question).fetchall() != expected:
        raise journal_error(path, "the database's tables are not those of a journal")


def require_sound_wal(path: Path) -> None:
    """Raise `JournalError` if the `-wal` file of a journal is damaged, so that SQLite ignores rows
    in it.
    """
    try:
        damage = find_damage(path)
    except OSError as error:
        raise journal_error(path, error) from error
    if damage is None:
        return
    steps = []
    with suppress(BrokenFile):
        steps += [row["step"] for row in read_jsonl(path.parent / METRICS) if "step" in row]
    last = f". {METRICS} ends at step {steps[-1]}" if steps else ""
    raise journal_error(
        path,
        f"{damage}{last}. Their rows are lost unless you restore {path.name}-wal from a copy; no "
        "file was changed",
    )


def holds_journal(path: Path) -> bool:
    """Return True if `path` is a file that is not empty. A crash may leave an empty one."""
    return path.is_file() and path.stat().st_size > 0


def identity(path: Path) -> int:
    """Return the random number that a journal got when it was created. 0 if there is no journal.

    Checkpoints store it, too, which shows to which journal they belong.
    """
    if not holds_journal(path):
        return 0
    with path.open("rb") as file:  # the application id in the header of an SQLite file
        return int.from_bytes(file.read(72)[68:])


def _roll_back(path: Path) -> None:
    """Undo the unfinished transaction of a killed writer, which a read-only connection cannot
    do.
    """
    if path.with_name(f"{path.name}-journal").exists():
        with closing(sqlite3.connect(path)) as writer:
            writer.execute("SELECT count(*) FROM sqlite_master")


def _text_of_fork(pieces: Sequence[Piece], at: int) -> tuple[ContextPiece | Placed, ...]:
    """Return the text that a fork put after an episode's first `at` tokens, up to the last placed
    text.

    The environment's answers between placed texts are included.
    """
    text: list[ContextPiece | Placed] = []
    last = 0
    for start, piece, _ in walk(pieces):
        if start >= at and not isinstance(piece, Sampled):
            text.append(piece)
            last = len(text) if isinstance(piece, Placed) else last
    return tuple(text[:last])


def _parse_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:40]} is not a JSON object")
    return value


def _require_numbers(values: dict[Any, Any]) -> dict[Any, float]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}, not a number")
    return {name: float(value) for name, value in values.items()}
