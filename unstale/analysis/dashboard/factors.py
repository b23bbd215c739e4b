"""Return the trained tokens of a run as counts and points in a plot of log D and log S.

These are the values that the run trained with: log D is `old_logp - behavior_logp` and log S is
`logp - old_logp`. They come from the journal's table of trained tokens. Counts are of all tokens
that were read, and points are a sample of these.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from unstale.analysis.dashboard.journals import open_journal
from unstale.analysis.dashboard.table import BadQuestion
from unstale.durability.journal import JournalReader
from unstale.durability.journal.tables import COLUMNS, seal
from unstale.durability.journal.token_rows import unpack_tokens
from unstale.durability.run_folder import Row
from unstale.token_values import KEPT, OUTCOMES, SKIPPED, TokenFlag, TokenValues

MAX_READ = 3_000_000
"""Largest number of tokens that are read for one answer. In a longer run, rows of the journal are
left out evenly over the steps. A million tokens took 0.4 s of CPU time to read, and 0.6 s to count.
"""

MAX_CACHED = 4_000_000
"""Largest number of tokens that the cache keeps in memory, of all runs together: about 100 MB."""

MAX_POINTS = 3000
MAX_EPISODES = 100
"""Largest number of episodes that are listed with tokens inside the brush, the rectangle that the
user selected.
"""

CELLS = 73
"""Number of cells along each axis of the grid in which tokens are counted. It is odd, so that 0 is
in the middle of a cell.
"""

UNIT = 1e-3
"""Log ratio in nats up to which the axes are about linear. Beyond it they are logarithmic."""

MAX_LAG = 5
"""The largest lag (staleness) that is counted by itself. Larger lags count as this one."""

OUTCOME_NAMES = (*OUTCOMES, KEPT, SKIPPED)
"""The outcomes of a trained token in the loss, for example `masked` or `kept`. Arrays of outcomes
hold indices of this list.
"""

EXACTNESS = ("all", "exact", "approximated")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """Trained tokens of one group in one step. Each field except `step` is an array with one entry
    per token, `[n]`.
    """

    step: int
    log_d: Any
    """log D in nats, float32. NaN if no `old_logp` was computed."""
    log_s: Any
    """log S in nats, float32. NaN if no training pass was run on the episode."""
    lag: Any
    """Versions published between sampling and training, int16. Larger numbers than 32767 are
    clipped.
    """
    flags: Any
    """For each token, the sum of its `TokenFlag` values."""
    outcome: Any
    """The outcome of each token, as a position in `OUTCOME_NAMES`."""
    episode: Any
    token: Any
    """Position of the token in its episode, counting context tokens."""

    def __len__(self) -> int:
        return len(self.lag)

    def take(self, where: Any) -> "TokenColumns":
        """Return the tokens that `where` selects: a mask `[n]`, or an array of positions."""
        arrays = {each.name: getattr(self, each.name)[where] for each in fields(self)[1:]}
        return TokenColumns(step=self.step, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A filter of trained tokens by step, lag (staleness) and exactness of their `old_logp`.

    Limits are inclusive. None sets no limit. `exact` is one of `EXACTNESS`.
    """

    step_min: int | None = None
    step_max: int | None = None
    lag_min: int | None = None
    lag_max: int | None = None
    exact: str = "all"

    def __post_init__(self) -> None:
        if self.exact not in EXACTNESS:
            raise BadQuestion(f"exact must be one of {', '.join(EXACTNESS)}, got {self.exact!r}")
        for name in ("step", "lag"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low is not None and high is not None and low > high:
                raise BadQuestion(f"{name}_min must be <= {name}_max, got {low} and {high}")

    def contains(self, lag: Any, flags: Any) -> Any:
        """Return a mask `[n]` of the tokens with a chosen lag and exactness. Steps are not
        tested.
        """
        where = np.ones(len(lag), bool)
        if self.lag_min is not None:
            where &= lag >= self.lag_min
        if self.lag_max is not None:
            where &= lag <= self.lag_max
        if self.exact != "all":
            where &= ((flags & int(TokenFlag.EXACT)) != 0) == (self.exact == "exact")
        return where


@dataclass(frozen=True, slots=True, kw_only=True)
class Brush:
    """A rectangle that the user selected in the plot of log D and log S, in nats. Limits are
    inclusive. None sets no limit.
    """

    d_min: float | None = None
    d_max: float | None = None
    s_min: float | None = None
    s_max: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not math.isfinite(value):
                raise BadQuestion(f"{each.name} must be a finite number, got {value}")
        for name in "ds":
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low is not None and high is not None and low > high:
                raise BadQuestion(f"{name}_min must be <= {name}_max, got {low:g} and {high:g}")

    @property
    def is_set(self) -> bool:
        """True if at least one side of the rectangle has a limit."""
        return bool(self.ratios)

    @property
    def ratios(self) -> str:
        """The ratios that have a limit, as letters: "d", "s", "ds", or "" without limits."""
        limited = {each.name[0] for each in fields(self) if getattr(self, each.name) is not None}
        return "".join(sorted(limited))

    def contains(self, log_d: Any, log_s: Any) -> Any:
        """Return a mask `[n]` of the tokens inside the rectangle.

        A token without a log D is outside. A token without a log S is inside only if D has a limit
        and S has none.
        """
        where = np.isfinite(log_d)
        if "s" in self.ratios or not self.is_set:
            where &= np.isfinite(log_s)
        for values, name in ((log_d, "d"), (log_s, "s")):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            # float32 as the values, so that a limit that was read off a token includes the token
            if low is not None:
                where &= values >= np.float32(low)
            if high is not None:
                where &= values <= np.float32(high)
        return where


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row of the journal's table of trained tokens, without the tokens' values.

    Each row is about one group in one step. `seal` is the checksum of the row.
    """

    group: int
    step: int
    num_tokens: int
    seal: int


@dataclass(frozen=True, slots=True)
class RowsToRead:
    """The journal's rows to read for an answer.

    `num_tokens` is the number of tokens in these rows. `num_all` is the number in all rows of the
    chosen steps.
    """

    rows: Sequence[TokenRow]
    num_tokens: int
    num_all: int


def find_rows(journal: JournalReader, choice: TokenChoice, *, limit: int) -> RowsToRead:
    """Return the journal's rows to read for the steps in `choice`, in the order of steps.

    If the steps have more than `limit` tokens, rows are left out evenly over the steps. One row is
    always read, even if it has more.
    """
    if not journal.num_token_values:
        return RowsToRead((), 0, 0)
    low = 0 if choice.step_min is None else choice.step_min
    high = 2**62 if choice.step_max is None else choice.step_max
    rows = journal.rows(
        "SELECT number, step, num_tokens, seal FROM trained_tokens "
        "WHERE step BETWEEN ? AND ? ORDER BY step, number",
        low,
        high,
    )
    with journal.wrap_errors("the trained tokens"):
        found = [TokenRow(*map(int, row)) for row in rows]
    total = sum(row.num_tokens for row in found)
    chosen = found
    while sum(row.num_tokens for row in chosen) > limit and len(chosen) > 1:
        tokens = sum(row.num_tokens for row in chosen)
        fewer = len(chosen) - 1 - len(chosen) // 100  # so there are few passes
        kept = max(1, min(fewer, len(chosen) * limit // tokens))
        chosen = [found[i * len(found) // kept] for i in range(kept)]
    return RowsToRead(chosen, sum(row.num_tokens for row in chosen), total)


class TokenCache:
    """A cache of trained tokens that were read from journals. It can be used by several threads."""

    def __init__(self, *, limit: int = MAX_CACHED) -> None:
        """Create a cache of at most `limit` tokens. The least recently used are dropped first."""
        self._limit = limit
        self._parts: OrderedDict[tuple[Path, TokenRow], TokenColumns] = OrderedDict()
        self._lock = threading.Lock()
        self._size = 0

    @property
    def num_tokens(self) -> int:
        return self._size

    def read(self, folder: Path, choice: TokenChoice, *, limit: int = MAX_READ) -> "ChosenTokens":
        """Return the trained tokens of a run that `choice` selects. About `limit` tokens are read
        at most.

        A cached row is not read again. If a row changes, its checksum differs, so it is read.
        Raises `JournalError` if the journal is damaged, and OSError if there is none.
        """
        parts = []
        with open_journal(folder) as journal:
            read = find_rows(journal, choice, limit=limit)
            for row in read.rows:
                part = self._get(folder, row)
                if part is None:
                    part = read_row(journal, row)
                    self._keep(folder, row, part)
                parts.append(part.take(choice.contains(part.lag, part.flags)))
        return ChosenTokens(parts, read)

    def _get(self, folder: Path, row: TokenRow) -> TokenColumns | None:
        with self._lock:
            part = self._parts.get((folder, row))
            if part is not None:
                self._parts.move_to_end((folder, row))
            return part

    def _keep(self, folder: Path, row: TokenRow, part: TokenColumns) -> None:
        with self._lock:
            if (folder, row) in self._parts:
                return
            self._parts[folder, row] = part
            self._size += len(part)
            while self._size > self._limit and self._parts:
                self._size -= len(self._parts.popitem(last=False)[1])


def read_row(journal: JournalReader, row: TokenRow) -> TokenColumns:
    """Return the trained tokens of a row. Raises `JournalError` if the row or one of its episodes
    is damaged.
    """
    columns = ", ".join(COLUMNS["trained_tokens"])
    ((*values, stored),) = journal.rows(
        f"SELECT {columns}, seal FROM trained_tokens WHERE number = ? AND step = ?",
        row.group,
        row.step,
    )
    with journal.wrap_errors(f"the trained tokens of group {row.group} in step {row.step}"):
        if seal("trained_tokens", *values) != stored:
            raise ValueError("they changed after they were written")
        number, step, version, route, num_tokens, packed, *_ = values
        every = unpack_tokens(packed, group=number, route=route)
        if sum(len(each.flags) for each in every) != num_tokens:
            raise ValueError(f"they are not {num_tokens} tokens")
        pieces = _pieces(journal, [each.episode for each in every])
        parts = []
        for each in every:
            token, sampled_by = _places(pieces[each.episode], each)
            run = each.minibatch is not None
            parts.append(
                {
                    "log_d": each.log_d,
                    "log_s": each.log_s,
                    "lag": np.clip(version - sampled_by, -1, 2**15 - 1).astype(np.int16),
                    "flags": each.flags,
                    "outcome": outcome_codes(each.flags, run=run),
                    "episode": np.full(len(token), each.episode, np.int64),
                    "token": token,
                }
            )
    names = [each.name for each in fields(TokenColumns)[1:]]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return TokenColumns(step=step, **joined)


def _pieces(
    journal: JournalReader, episodes: Sequence[int]
) -> dict[int, list[tuple[int, int | None]]]:
    """Return the runs of tokens of each episode: number of tokens, and version (None for
    context).
    """
    found: dict[int, list[tuple[int, int | None]]] = {each: [] for each in episodes}
    for start in range(0, len(episodes), 500):
        part = episodes[start : start + 500]
        marks = ", ".join("?" * len(part))
        for episode, count, version in journal.rows(
            f"SELECT episode, num_tokens, version FROM pieces WHERE episode IN ({marks}) "
            "ORDER BY episode, position",
            *part,
        ):
            found[episode].append((count, version))
    return found


def _places(pieces: Sequence[tuple[int, int | None]], values: TokenValues) -> tuple[Any, Any]:
    """Return the positions of an episode's sampled tokens, and the versions that sampled them.

    Raises ValueError if `pieces` and `values` have different numbers of sampled tokens. This is
    checked first, because a damaged number may be too large for memory.
    """
    num_sampled = sum(count for count, version in pieces if version is not None)
    if num_sampled != len(values.flags) or any(count < 0 for count, _ in pieces):
        raise ValueError(
            f"episode {values.episode} has {num_sampled} sampled tokens, but the values of "
            f"{len(values.flags)} are recorded"
        )
    tokens, versions = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    start = 0
    for count, version in pieces:
        if version is not None:
            tokens.append(np.arange(start, start + count, dtype=np.int32))
            versions.append(np.full(count, version, np.int64))
        start += count
    return np.concatenate(tokens), np.concatenate(versions)


def outcome_codes(flags: Any, *, run: Any) -> Any:
    """Return the outcome of each token as a position in `OUTCOME_NAMES`, `[n]` uint8.

    `flags` are sums of `TokenFlag` values. `run` is True if a training pass was run on the token's
    episode, for all tokens or for each.
    """
    names = list(OUTCOME_NAMES)
    other = np.where(run, names.index(KEPT), names.index(SKIPPED))
    tests = [(flags & int(flag)) != 0 for flag in OUTCOMES.values()]
    return np.select(tests, list(range(len(tests))), other).astype(np.uint8)


class ChosenTokens:
    """The trained tokens of a run that a `TokenChoice` (a filter by step, lag and exactness)
    selects.

    The tokens are held in parts, one for each group in each step that trained on it.
    """

    def __init__(self, parts: Sequence[TokenColumns], read: RowsToRead) -> None:
        self.read = read
        self._parts = parts
        self.with_d = [_finite(part, "log_d") for part in parts]
        """The tokens that have a log D, in parts. Some have no log S, because no training pass was
        run on their episode.
        """
        self.placed = [_finite(part, "log_s") for part in self.with_d]
        """The tokens that have both a log D and a log S, in parts."""

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def num_placed(self) -> int:
        return sum(map(len, self.placed))

    @property
    def without_s(self) -> Row:
        """Two numbers: the `tokens` with a log D and no log S, and those of them that were
        `dropped` by the correction or a technique.
        """
        dropped = 0
        for part in self.with_d:
            names = np.array(OUTCOME_NAMES)[part.outcome[~np.isfinite(part.log_s)]]
            dropped += int((~np.isin(names, (KEPT, SKIPPED))).sum())
        return {"tokens": sum(map(len, self.with_d)) - self.num_placed, "dropped": dropped}

    def for_ratios(self, ratios: str) -> Sequence[TokenColumns]:
        """Return the tokens, in parts, that have values of all ratios in "d", "s" or "ds"."""
        return self.with_d if ratios == "d" else self.placed

    @property
    def lag_max(self) -> int:
        return max((int(part.lag.max()) for part in self._parts if len(part)), default=0)

    @property
    def steps(self) -> list[int]:
        """The first and the last step that trained on the tokens. Empty if there are no tokens."""
        steps = [part.step for part in self._parts if len(part)]
        return [min(steps), max(steps)] if steps else []

    def inside(self, brush: Brush) -> Iterator[TokenColumns]:
        for part in self.for_ratios(brush.ratios):
            yield part.take(brush.contains(part.log_d, part.log_s))


def _finite(part: TokenColumns, name: str) -> TokenColumns:
    where = np.isfinite(getattr(part, name))
    return part if where.all() else part.take(where)


def answer(tokens: ChosenTokens, brush: Brush, drawn: Row, max_points: int = 0) -> Row:
    """Return the answer for the plot of log D and log S: counts, points and marginals of `tokens`,
    and the episodes with tokens inside the `brush` (the rectangle that the user selected).

    The items of `drawn` become part of the answer. Its `lines` are the run's limits on D and S, for
    which the axes have space. At most `max_points` points are returned, or `MAX_POINTS` if
    `max_points` is 0 or larger.
    """
    lines = drawn["lines"]
    axes = {name: _extent(tokens, name, lines) for name in ("log_d", "log_s")}
    points = _sample(
        tokens.placed, axes, max_points if max_points in range(1, MAX_POINTS) else MAX_POINTS
    )
    return {
        "total": tokens.read.num_all,
        "read": tokens.read.num_tokens,
        "chosen": len(tokens),
        "placed": tokens.num_placed,
        "without_s": tokens.without_s,
        "lag_max": tokens.lag_max,
        "steps": tokens.steps,
        "unit": UNIT,
        "outcomes": list(OUTCOME_NAMES),
        "axes": axes,
        "cells": CELLS,
        "counts": _counts(tokens.placed, axes),
        "marginals": {
            name: _marginal(tokens.for_ratios(name[-1]), name, axes[name])
            for name in ("log_d", "log_s")
        },
        "points": points,
        "by_lag": _by_lag(tokens.placed),
        "selected": _selected(tokens, brush) if brush.is_set else None,
        **drawn,
    }


def to_axis(values: Any) -> Any:
    """Return positions of log ratios (in nats) on an axis: about linear up to `UNIT`, then
    logarithmic.
    """
    return np.arcsinh(np.asarray(values, np.float64) / UNIT)


def _extent(tokens: ChosenTokens, name: str, lines: Sequence[Row]) -> list[float]:
    """Return both ends of the axis `name` ("log_d" or "log_s"), as positions on the axis
    (`to_axis`).
    """
    values = [0.01, -0.01]
    for part in tokens.for_ratios(name[-1]):
        if len(part):
            column = getattr(part, name)
            values += [float(column.min()), float(column.max())]
    for line in lines:
        if line["on"] == name[-1] and abs(line["at"]) < 10:
            values.append(line["at"])
    low, high = float(to_axis(min(values))), float(to_axis(max(values)))
    space = 0.04 * (high - low)
    return [low - space, high + space]


def _cell(values: Any, axis: Sequence[float]) -> Any:
    low, high = axis
    cells = np.floor(CELLS * (to_axis(values) - low) / (high - low))
    return np.clip(cells, 0, CELLS - 1).astype(np.int64)


def _counts(parts: Sequence[TokenColumns], axes: Mapping[str, Sequence[float]]) -> list[list[int]]:
    """Return the number of tokens in each cell of the grid, as `[column, row, number]`, without
    empty cells.
    """
    grid = np.zeros(CELLS * CELLS, np.int64)
    for part in parts:
        cell = _cell(part.log_d, axes["log_d"]) * CELLS + _cell(part.log_s, axes["log_s"])
        grid += np.bincount(cell, minlength=len(grid))
    (filled,) = grid.nonzero()
    return [[int(at // CELLS), int(at % CELLS), int(grid[at])] for at in filled]


def _marginal(parts: Sequence[TokenColumns], name: str, axis: Sequence[float]) -> list[Row]:
    """Return the number of tokens in each cell along the axis `name` ("log_d" or "log_s"), by lag
    (staleness).
    """
    found: dict[int, Any] = {}
    for part in parts:
        cell = _cell(getattr(part, name), axis)
        shown = np.clip(part.lag, 0, MAX_LAG)
        for lag in np.unique(shown):
            grid = found.setdefault(int(lag), np.zeros(CELLS, np.int64))
            grid += np.bincount(cell[shown == lag], minlength=CELLS)
    return [{"lag": lag, "counts": found[lag].tolist()} for lag in sorted(found)]


def _by_lag(parts: Sequence[TokenColumns]) -> list[list[int]]:
    """Return `[lag, number of tokens]` for each lag (staleness). Lags above `MAX_LAG` count as
    `MAX_LAG`.
    """
    counts = np.zeros(MAX_LAG + 1, np.int64)
    for part in parts:
        counts += np.bincount(np.clip(part.lag, 0, MAX_LAG), minlength=MAX_LAG + 1)
    return [[lag, int(count)] for lag, count in enumerate(counts) if count]


_MIX = 0x9E3779B97F4A7C15

MERGED = 50_000
"""Approximate number of tokens that `_sample` sorts together to choose the points of the plot."""


def _sample(parts: Sequence[TokenColumns], axes: Mapping[str, Sequence[float]], limit: int) -> Row:
    """Return the tokens to draw as points, at most `limit`: a list of values for each column, by
    name.

    The first token of each cell of the grid is taken first, then the second of each cell, and so
    on. The order within a cell is that of a hash, so the sample is random but the same in every
    call.
    """
    names = [each.name for each in fields(TokenColumns)[1:]]
    best: dict[str, Any] = {}
    waiting: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        columns = {name: getattr(part, name) for name in names}
        columns["step"] = np.full(len(part), part.step, np.int64)
        columns["order"] = _hash(part)
        cell = _cell(part.log_d, axes["log_d"]) * CELLS + _cell(part.log_s, axes["log_s"])
        waiting.append(columns | {"cell": cell})
        size = sum(len(each["cell"]) for each in waiting)
        if size >= MERGED or number == len(parts) - 1:
            best = _best([best, *waiting] if best else waiting, limit)
            waiting = []
    shown = ("log_d", "log_s", "lag", "outcome", "episode", "token", "step")
    return {name: best[name].tolist() if best else [] for name in shown}


def _hash(part: TokenColumns) -> Any:
    """Return a hash of the episode and position of each token, `[n]` uint64."""
    with np.errstate(over="ignore"):
        mixed = (part.episode.astype(np.uint64) << np.uint64(32)) + part.token.astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MIX)
        return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MIX)


def _best(columns: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """Return at most `limit` tokens of `columns`: the first of each cell, then the second, and so
    on.

    A token that is left out here would also be left out if there were more tokens.
    """
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    by_cell = np.lexsort((joined["order"], joined["cell"]))
    cell = joined["cell"][by_cell]
    begins = np.flatnonzero(np.concatenate([[True], cell[1:] != cell[:-1]])[: len(cell)])
    lengths = np.diff(np.concatenate([begins, [len(cell)]]))
    rank = np.arange(len(cell)) - np.repeat(begins, lengths)
    first = by_cell[np.lexsort((joined["order"][by_cell], rank))[:limit]]
    return {name: column[first] for name, column in joined.items()}


@dataclass(slots=True)
class _Episode:
    """The number of an episode's tokens inside the brush (the selected rectangle) in one step, and
    the values of its farthest such token.
    """

    episode: int
    step: int
    tokens: int = 0
    token: int = 0
    log_d: float = 0.0
    log_s: float = 0.0
    lag: int = 0


def _selected(tokens: ChosenTokens, brush: Brush) -> Row:
    """Return the number of tokens inside the brush (the selected rectangle), and the episodes with
    most such tokens.

    Each episode has its farthest token inside: the one with the largest |log D| or |log S|, of the
    ratios that the brush limits.
    """
    found: list[_Episode] = []
    parts = list(tokens.inside(brush))
    for part in parts:
        if not len(part):
            continue
        sizes = {"d": np.abs(part.log_d), "s": np.abs(part.log_s)}
        size = np.maximum.reduce([sizes[ratio] for ratio in brush.ratios])
        episodes, inverse, counts = np.unique(part.episode, return_inverse=True, return_counts=True)
        by_size = np.lexsort((-size, inverse))
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        for number, count, at in zip(episodes, counts, by_size[starts], strict=True):
            found.append(
                _Episode(
                    episode=int(number),
                    step=part.step,
                    tokens=int(count),
                    token=int(part.token[at]),
                    log_d=float(part.log_d[at]),
                    log_s=float(part.log_s[at]),
                    lag=int(part.lag[at]),
                )
            )
    found.sort(key=lambda each: (-each.tokens, each.episode, each.step))
    listed = [{each.name: getattr(row, each.name) for each in fields(row)} for row in found]
    outcomes = np.zeros(len(OUTCOME_NAMES), np.int64)
    for part in parts:
        outcomes += np.bincount(part.outcome, minlength=len(OUTCOME_NAMES))
    names = {name: int(n) for name, n in zip(OUTCOME_NAMES, outcomes, strict=True) if n}
    return {
        "tokens": sum(map(len, parts)),
        "of": sum(map(len, tokens.for_ratios(brush.ratios))),
        "by_lag": _by_lag(parts),
        "outcomes": names,
        "episodes": len(found),
        "rows": listed[:MAX_EPISODES],
    }
