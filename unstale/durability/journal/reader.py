"""Read the journal of a run, and turn its rows into records.

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

GroupEnd = Literal["open", "finished", "consumed", "failed"]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of episodes that was started, with its end. Times are seconds since 1970.

    `handed_out` is the time of the start. `finished` is the time at which its last episode ended,
    or None before that.
    """

    number: int
    task: Task
    seed: int
    handed_out: float
    finished: float | None
    step: int | None
    """The optimizer step that trained on the group. None if no step did."""
    version: int | None
    """The version of the policy with which this step began. None if no step trained on the group.
    """
    num_trajectories: int
    num_failures: int
    """Number of failed attempts at the group's episodes. Attempts that were repeated count, too."""
    place: int
    """Index of the task in the sequence of training tasks."""

    @property
    def ended(self) -> GroupEnd:
        """The group's end: "open", "finished" (not trained on), "consumed" (trained on) or
        "failed".

        "failed" means that no episode of the group finished. If a batch contained such a group, its
        end is "failed" too, not "consumed".
        """
        if self.finished is None:
            return "open"
        if not self.num_trajectories:
            return "failed"
        return "finished" if self.step is None else "consumed"


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """A finished episode, the number of its group, and the step that trained on it.

    `step` is None if no step trained on it.
    """

    trajectory: Trajectory
    group: int
    step: int | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint in the journal.

    `checkpoint` is its number, and `name` the name of its folder.
    """

    checkpoint: int
    step: int
    version: int
    name: str


class JournalReader:
    """A reader of a journal. It sees the journal as it was when the reader was created.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, path: Path, routed_experts: ExpertFiles | None = None, *, leave_files: bool = False
    ) -> None:
        """Open a journal for reading.

        `routed_experts` are the files with the experts of sampled tokens, or None if experts are
        not needed. With `leave_files`, no file of the folder is written, not even the lock file of
        the write-ahead log. Raises FileNotFoundError without a journal file, and `JournalError` if
        the file is not a journal.
        """
        self.path = path
        self._routed_experts = routed_experts
        self._group_experts: tuple[int, dict[ExpertKey, RoutedExperts]] | None = None
        """The number of the group whose routed experts were read last, and these experts."""
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

        While the run is active, a `-wal` file has a few MB more.
        """
        ((pages,),) = self.rows("PRAGMA page_count")
        ((page_bytes,),) = self.rows("PRAGMA page_size")
        return int(pages * page_bytes)

    def rows(self, statement: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL statement yields."""
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
        """Return the published versions of the weights, in order of publication."""
        return [version for (version,) in self.rows("SELECT version FROM versions ORDER BY id")]

    def events(self) -> list[dict[str, Any]]:
        """Return all events of the run in order, such as the metrics of a step (kind "step")."""
        rows = self.rows("SELECT at, kind, fields FROM events ORDER BY id")
        with self.wrap_errors("the events"):
            return [{"at": at, "kind": kind, **_parse_object(fields)} for at, kind, fields in rows]

    def checkpoints(self) -> list[CheckpointRow]:
        """Return the recorded checkpoints in order. The run continues from the last one."""
        return [
            CheckpointRow(*row)
            for row in self.rows(
                "SELECT checkpoint, step, version, name FROM checkpoints ORDER BY checkpoint"
            )
        ]

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of every logged step, as in `metrics.jsonl`."""
        rows = self.rows("SELECT fields FROM events WHERE kind = 'step' ORDER BY id")
        with self.wrap_errors("the metrics"):
            return [_parse_object(fields) for (fields,) in rows]

    def logged_step(self, step: int) -> tuple[int, dict[str, Any]]:
        """Return the id of the event with the metrics of a step, and the metrics.

        Returns (-1, {}) if the metrics were not logged.
        """
        rows = self.rows("SELECT id, fields FROM events WHERE kind = 'step' ORDER BY id DESC")
        with self.wrap_errors("the metrics"):
            for event, fields in rows:
                if (found := _parse_object(fields))["step"] == step:
                    return event, found
        return -1, {}

    def token_samples(self, *, newest: int = -1) -> Iterator[dict[str, Any]]:
        """Yield a row for each logged sample token: step, lag in versions, log_d and log_s.

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

        The shares are in the order in which the groups began. An episode counts as failed if its
        newest attempt failed.
        """
        rows = self.rows(
            f"""SELECT avg(trajectories.episode IS NULL)
            FROM (SELECT number, max(episode) AS episode FROM {ATTEMPTS} GROUP BY number, sibling)
            JOIN finished USING (number) LEFT JOIN trajectories USING (episode)
            GROUP BY number ORDER BY number DESC LIMIT ?""",
            number,
        )
        return tuple(share for (share,) in reversed(rows))

    def unsound(self) -> list[str]:
        """Return a sentence for each table in which rows were changed, lost or added."""
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
        """Return the number of started groups, the next task's index, and the number of
        episodes.
        """
        ((groups, place, episodes),) = self.rows(
            """SELECT coalesce(max(number) + 1, 0), coalesce(max(place) + 1, 0),
            (SELECT coalesce(max(episode) + 1, 0) FROM episodes) FROM groups"""
        )
        return groups, place, episodes

    def given_up(self, retries: int) -> frozenset[Task]:
        """Return the tasks with an episode that failed more than `retries` times."""
        rows = self.rows(
            """SELECT env, split, task FROM groups WHERE number IN (
                SELECT number FROM episodes JOIN failures USING (episode)
                GROUP BY number, sibling HAVING count(*) > ?)""",
            retries,
        )
        return frozenset(Task(*row) for row in rows)

    def requests(self) -> list[GroupRequest]:
        """Return the groups that no recorded checkpoint was trained on, in order of their start.

        Each request has the recorded state of the group's episodes.
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
        """Return, by group, the numbers of episodes that differ from `schedule.group_size`.

        A group's first number is the one at its start. Each enlargement adds a further one.
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
        """Return the turn limit of each group that has one, by the group's number."""
        return self._of_groups(TURN_LIMIT, TurnLimit)

    def _of_groups(self, kind: str, read: Callable[..., _Read]) -> dict[int, _Read]:
        """Return what the events of a kind say of each group, by the group's number.

        `read` gets the other fields of an event.
        """
        found = {}
        for (fields,) in self.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", kind):
            with self.wrap_errors(f"an event of kind {kind}"):
                event = _parse_object(fields)
                number = int(event.pop("group"))
                found[number] = read(**event)
        return found

    def _rounds(self) -> dict[int, tuple[Mapping[str, Any], ...]]:
        """Return the decisions about the episodes of each group that has some, round by round."""
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
        """Yield every finished episode, in the order in which the episodes began."""
        for (episode,) in self.rows("SELECT episode FROM trajectories ORDER BY episode"):
            yield self.episode(episode)

    def group(self, number: int) -> Group:
        """Return a finished group with its last attempt at each episode.

        Raises `JournalError` if it is not finished.
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
        """Return the groups that a step trained on, in the order of the batch."""
        rows = self.rows("SELECT number FROM consumed WHERE step = ? ORDER BY place", step)
        return [self.group(number) for (number,) in rows]

    def replayed(self, step: int | None = None) -> list[int]:
        """Return the numbers of the groups that a step trained on again, in the order of the batch.

        Without `step`, return the groups of all steps in order.
        """
        where = "" if step is None else f"WHERE step = {int(step)}"
        rows = self.rows(f"SELECT number FROM replayed {where} ORDER BY step, place")
        return [number for (number,) in rows]

    def token_steps(self) -> dict[int, list[int]]:
        """Return for each group the steps whose token values (log D, weight, ...) the journal has.

        Groups and steps are in order. A group that was replayed has several steps.
        """
        steps: dict[int, list[int]] = {}
        rows = self.rows("SELECT number, step FROM trained_tokens ORDER BY number, step")
        for group, step in rows:
            steps.setdefault(group, []).append(step)
        return steps

    @property
    def num_token_values(self) -> int:
        """Number of trained tokens whose values (log D, log S, ...) the journal has.

        A token counts once for each step that trained on it.
        """
        ((count,),) = self.rows("SELECT coalesce(sum(num_tokens), 0) FROM trained_tokens")
        return int(count)

    def token_rows(self) -> Iterator[tuple[int, int, str, int, bytes]]:
        """Yield the rows of token values: group, step, route, number of tokens, packed values.

        The route is the way in which `old_logp` was computed.
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

        Each element has arrays `[n]` over the episode's sampled tokens, in order. Only episodes in
        the batch are returned, in the order of the steps, then of the batch. Without `step`, all
        steps that trained on the group are included. With `episode`, only this episode is returned.
        Empty if the journal has no values of this group. A step's values are available as soon as
        the step is committed, before its checkpoint. Raises `JournalError` if a row is damaged.
        """
        found: list[TrainedTokens] = []
        for row in self._token_rows(group, step):
            with self.wrap_errors(_row_of_tokens(row)):
                found += self._trained(row, episode)
        return found

    def token_values(self, group: int, step: int) -> list[TokenValues]:
        """Return the values of a group's trained tokens in one step, one element for each episode.

        The values are as in `trained_tokens`, but without `logp`, `old_logp` and `behavior_logp`,
        for which the episodes' tokens would have to be read. This takes a third of the time. The
        number of tokens is not checked. Raises `JournalError` if the row is damaged.
        """
        found: list[TokenValues] = []
        for row in self._token_rows(group, step):
            with self.wrap_errors(_row_of_tokens(row)):
                found += _unpack_row(row)
        return found

    def _token_rows(self, group: int, step: int | None) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a group's trained tokens, in the order of the steps."""
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
        """Return the trained tokens in a row of the table `trained_tokens`.

        They are those of all its episodes, or only of `episode` if that is given. Raises ValueError
        if the row is wrong.
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
        """Return where an episode was forked from another one. None if it was not forked.

        `pieces` are those of the episode.
        """
        for parent, at in self.rows("SELECT parent, at FROM forks WHERE episode = ?", episode):
            note, writes = self._note(episode)
            text = () if note else _text_of_fork(pieces, at)
            return Fork(parent, at, text, note, writes)
        return None

    def _note(self, episode: int) -> tuple[str, bool]:
        """Return the note of an episode, and True if it is the whole prompt. Empty without one."""
        rows = self.rows("SELECT note, writes FROM notes WHERE episode = ?", episode)
        return next(((note, bool(writes)) for note, writes in rows), ("", False))

    def _role(self, episode: int) -> str:
        """Return the role that the policy has in a conversation. Empty if it has none."""
        return "".join(
            row[0] for row in self.rows("SELECT role FROM roles WHERE episode = ?", episode)
        )

    def pieces(self, episode: int) -> tuple[Piece, ...]:
        """Return the recorded tokens of an episode, which may not have ended yet.

        A piece has successive tokens that are all context, or all sampled by one version.
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
        """Return pieces with what other tables have of them: kept sets, sources and signals."""
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
            ended = Failure(task, "replay", *reason)
            fork = self.fork(episode, self.pieces(episode))
            return EpisodeRecord(episode, (), ended, failures, fork=fork)
        snapshots = self.rows(
            "SELECT num_pieces, state FROM snapshots WHERE episode = ? ORDER BY num_pieces", episode
        )
        branches = []
        for branch, is_finished in self._branches(episode):
            end = self.episode(branch).trajectory if is_finished else None
            role = self._role(branch)
            branches.append(EpisodeRecord(branch, self.pieces(branch), end, role=role))
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

    def _branches(self, episode: int) -> list[tuple[int, bool]]:
        """Return the further conversations of an episode's last attempt.

        An external agent begins one when it edits its history. Each is a pair: its episode number,
        and True if it has ended.
        """
        return self.rows(
            """SELECT more.episode, t.episode IS NOT NULL
            FROM episodes JOIN episodes more USING (number, sibling)
            LEFT JOIN trajectories t ON t.episode = more.episode
            WHERE episodes.episode = ? AND more.episode > episodes.episode ORDER BY more.episode""",
            episode,
        )

    def _outcome(self, episode: int, task: Task) -> Trajectory | Failure | None:
        """Return the result of an attempt at an episode, with its further conversations.

        None if the attempt has not ended.
        """
        for row in self.rows(
            "SELECT stage, error, turns, sampled_tokens FROM failures WHERE episode = ?", episode
        ):
            return Failure(task, *row)
        if not self.rows("SELECT 1 FROM trajectories WHERE episode = ?", episode):
            return None
        branches = self._branches(episode)
        ended = tuple(self.episode(branch).trajectory for branch, done in branches if done)
        return replace(self.episode(episode).trajectory, branches=ended).led()

    @contextmanager
    def wrap_errors(self, subject: str = "") -> Iterator[None]:
        """Return a context that turns database errors into a `JournalError` with the file's name.

        `subject` names what was read.
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
"""Tables with further columns of pieces, and functions that add them to a piece."""


def _row_of_tokens(row: Sequence[Any]) -> str:
    """Return a text that names a row of the table `trained_tokens`, for error messages."""
    return f"the trained tokens of group {row[0]} in step {row[1]}"


def _unpack_row(row: Sequence[Any]) -> list[TokenValues]:
    """Return the token values in a row of the table `trained_tokens`, one element for each episode.

    Raises ValueError if the row is wrong.
    """
    number, _, _, route, num_tokens, packed, *_ = row
    found = unpack_tokens(packed, group=number, route=route)
    if sum(len(each.flags) for each in found) != num_tokens:
        raise ValueError(f"they are not {num_tokens} tokens")
    return found


def require_tables(path: Path, connection: sqlite3.Connection) -> None:
    """Raise `JournalError` if the database has other tables, or a view or trigger."""
    question = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        expected = fresh.execute(question).fetchall()
    if connection.execute(question).fetchall() != expected:
        raise journal_error(path, "its tables are not those of a journal")


def require_sound_wal(path: Path) -> None:
    """Raise `JournalError` if damage of the `-wal` file makes SQLite ignore later rows."""
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
    """Return True if there is a journal file that is not empty. A crash may leave an empty one."""
    return path.is_file() and path.stat().st_size > 0


def identity(path: Path) -> int:
    """Return the random number that a journal got when it was created. Checkpoints store it, too.

    0 if there is no journal.
    """
    if not holds_journal(path):
        return 0
    with path.open("rb") as file:  # the application id in the header of an SQLite file
        return int.from_bytes(file.read(72)[68:])


def _roll_back(path: Path) -> None:
    """Undo the unfinished transaction of a writer that was killed.

    A read-only connection cannot do this.
    """
    if path.with_name(f"{path.name}-journal").exists():
        with closing(sqlite3.connect(path)) as writer:
            writer.execute("SELECT count(*) FROM sqlite_master")


def _text_of_fork(pieces: Sequence[Piece], at: int) -> tuple[ContextPiece | Placed, ...]:
    """Return the placed text with which an episode begins after its first `at` tokens."""
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
