"""Return pages of the table of episodes. Filters, sorting and full-text search are done in SQL."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unstale.analysis.dashboard.database import COLUMN, COLUMNS, Column, Database
from unstale.durability.run_folder import Row

MAX_PAGE = 200
MAX_CONDITIONS = 20

SORTED_QUICKLY = 5000
"""Largest number of matching episodes that are sorted without a database index of the column. This
takes a few milliseconds.
"""

OPERATORS = {"=": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "~": "LIKE"}
"""Operators of a filter, with their SQL. `~` means that the text in a column contains the value."""

_FIGURE = re.compile(r"(?:reward|fact):.+", re.DOTALL)
"""Pattern of a name such as `reward:NAME`, or `fact:NAME` for a number that the environment
reports.
"""

_CONDITION = re.compile(r"([a-z_]+|(?:reward|fact):[^<>=!~]+)(<=|>=|!=|=|<|>|~)(.*)", re.DOTALL)


class BadQuestion(ValueError):
    """Error: a parameter of a request is wrong. Its text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Condition:
    """An SQL condition or statement about the table `episodes`, with its parameters."""

    sql: str
    parameters: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a page of the table of episodes.

    `filter` has conditions such as `reward<1 stop=max_turns`, all of which must hold. `search` has
    words that a conversation must contain. `sort` is a column, `reward:NAME` or `fact:NAME`, with
    `-` before it for descending order. `page` counts from 0, and a page has up to `size` episodes.
    """

    filter: str = ""
    search: str = ""
    sort: str = "-episode"
    page: int = 0
    size: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_PAGE:
            raise BadQuestion(f"size must be between 1 and {MAX_PAGE}, got {self.size}")
        if self.page < 0:
            raise BadQuestion(f"page must be >= 0, got {self.page}")
        if self.column not in COLUMN and not _FIGURE.fullmatch(self.column):
            raise BadQuestion(
                f"sort must be one of {', '.join(COLUMN)}, reward:NAME or fact:NAME, "
                f"got {self.sort!r}"
            )

    @property
    def column(self) -> str:
        """Name of the column, reward or fact by which the table is sorted: `sort` without `-`."""
        return self.sort.removeprefix("-")

    @property
    def order(self) -> str:
        return "DESC" if self.sort[0] == "-" else "ASC"


def parse_filter(text: str) -> list[Condition]:
    """Return the conditions of a filter. Raises `BadQuestion` if one is not valid or there are too
    many.

    >>> parse_filter("reward>=0.5 stop=done")[0].sql
    'reward >= ?'
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadQuestion(f"the filter has an open quotation mark: {text}") from error
    if len(words) > MAX_CONDITIONS:
        raise BadQuestion(f"a filter has at most {MAX_CONDITIONS} conditions, got {len(words)}")
    return [_condition(word) for word in words]


def _condition(word: str) -> Condition:
    match = _CONDITION.fullmatch(word)
    if match is None:
        raise BadQuestion(
            f"cannot read the condition {word!r}: write a column, one of "
            f"{' '.join(OPERATORS)} and a value, as in reward>=0.5"
        )
    name, operator, value = match.groups()
    if ":" in name:
        comparison = f"value {OPERATORS[operator]} ?"
        return Condition(
            f"episode IN (SELECT episode FROM figures WHERE name = ? AND {comparison})",
            (name, _number(name, operator, value)),
        )
    column = COLUMN.get(name)
    if column is None:
        raise BadQuestion(
            f"there is no column {name!r}: use one of {', '.join(COLUMN)}, reward:NAME or fact:NAME"
        )
    if column.kind == "number":
        return Condition(f"{name} {OPERATORS[operator]} ?", (_number(name, operator, value),))
    if operator == "~":
        escaped = re.sub(r"([%_\\])", r"\\\1", value)
        return Condition(f"{name} LIKE ? ESCAPE '\\'", (f"%{escaped}%",))
    return Condition(f"{name} {OPERATORS[operator]} ?", (value,))


def _number(name: str, operator: str, value: str) -> float:
    try:
        if operator != "~":
            return float(value)
    except ValueError:
        pass
    raise BadQuestion(f"{name} is a number: {name}{operator}{value} has none to compare it with")


def parse_search(text: str) -> Condition | None:
    """Return the condition that a conversation contains all words of `text`. None without words.

    Words in quotation marks must follow each other in the conversation.
    """
    phrases = re.findall(r'"([^"]*)"|(\S+)', text)
    words = [phrase or word for phrase, word in phrases]
    words = [word.replace('"', " ").replace("\0", " ") for word in words]
    query = " ".join(f'"{word}"' for word in words if re.search(r"\w", word))
    if not query:
        return None
    return Condition("episode IN (SELECT rowid FROM words WHERE words MATCH ?)", (query,))


def statements(question: Question) -> tuple[Condition, list[Condition]]:
    """Return an SQL statement that counts the episodes of a request, and two statements that read
    them.

    The first of the two reads the episodes that have a value in the sorted column. The second reads
    the others, which come last in both directions. The count has two numbers: of all matching
    episodes, and of those with a value.
    """
    conditions = parse_filter(question.filter)
    if search := parse_search(question.search):
        conditions.append(search)
    where = " AND ".join(condition.sql for condition in conditions) or "1"
    parameters = tuple(value for condition in conditions for value in condition.parameters)
    names = ", ".join(column.name for column in COLUMNS)
    read, order = f"SELECT {names}, is_branch, note FROM", question.order
    if question.column in COLUMN:
        name = question.column
        count = Condition(f"SELECT count(*), count({name}) FROM episodes WHERE {where}", parameters)
        known = f"episodes WHERE {where} AND {name} IS NOT NULL"
        present = Condition(f"{read} {known} ORDER BY {name} {order}, episode {order}", parameters)
        absent = Condition(f"{name} IS NULL")
    else:
        figure = (question.column,)
        known = f"""(SELECT episode AS valued, value FROM figures WHERE name = ?)
            CROSS JOIN episodes ON episode = valued WHERE {where}"""
        count = Condition(
            f"SELECT (SELECT count(*) FROM episodes WHERE {where}), (SELECT count(*) FROM {known})",
            (*parameters, *figure, *parameters),
        )
        present = Condition(
            f"{read} {known} ORDER BY value {order}, valued {order}", (*figure, *parameters)
        )
        absent = Condition(
            "NOT EXISTS (SELECT 1 FROM figures AS own WHERE name = ? AND own.episode = "
            "episodes.episode)",
            figure,
        )
    rest = Condition(
        f"{read} episodes WHERE {where} AND {absent.sql} ORDER BY episode {order}",
        (*parameters, *absent.parameters),
    )
    return count, [present, rest]


def page(database: Database, question: Question) -> Row:
    """Return a page of the table: `total`, the number of all matching episodes, and the `rows` of
    the page.

    If many episodes match, a database index of the sorted column is requested, so that later pages
    are quicker.
    """
    count, (present, absent) = statements(question)
    first, limit = question.page * question.size, question.size
    with database.read() as reader:
        ((total, valued),) = reader.execute(count.sql, count.parameters).fetchall()
        rows: list[Sequence[Any]] = []
        if first < valued:
            paged = f"{present.sql} LIMIT ? OFFSET ?"
            rows += reader.execute(paged, (*present.parameters, limit, first)).fetchall()
        if len(rows) < limit and total > valued:
            paged = f"{absent.sql} LIMIT ? OFFSET ?"
            skipped = max(0, first - valued)
            rest = (*absent.parameters, limit - len(rows), skipped)
            rows += reader.execute(paged, rest).fetchall()
        names = [column.name for column in COLUMNS]
        found = [as_row(row, names) for row in rows]
        _add_figures(reader, found)
    if total > SORTED_QUICKLY:
        database.want_index(question.column)
    return {"total": total, "page": question.page, "size": question.size, "rows": found}


def as_row(values: Sequence[Any], names: Sequence[str]) -> Row:
    """Return a row of the table `episodes` as values by column. Columns without a value are left
    out.

    `names` are the columns of `values`, which ends with `is_branch` and `note`.
    """
    row = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in zip(names, values[:-2], strict=True)
        if value is not None
    }
    return row | {"is_branch": bool(values[-2]), "note": values[-1]}


def _add_figures(reader: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        figures = reader.execute(
            "SELECT name, value FROM figures WHERE episode = ? ORDER BY name", (row["episode"],)
        )
        row["figures"] = dict(figures.fetchall())


def figure_names(database: Database, limit: int = 200) -> list[str]:
    """Return at most `limit` different names of rewards and facts that episodes have, such as
    `fact:NAME`.
    """
    statement = """WITH RECURSIVE each (name) AS (
        SELECT min(name) FROM figures
        UNION ALL SELECT (SELECT min(name) FROM figures WHERE name > each.name) FROM each
        WHERE each.name IS NOT NULL)
    SELECT name FROM each WHERE name IS NOT NULL LIMIT ?"""
    return [name for (name,) in database.rows(statement, (limit,))]


def columns() -> list[Row]:
    """Return the columns of the table of episodes as objects for JSON: name, kind, explanation and
    unit.
    """
    return [_describe(column) for column in COLUMNS]


def _describe(column: Column) -> Row:
    return {
        "name": column.name,
        "kind": column.kind,
        "about": column.about,
        "unit": column.unit,
    }
