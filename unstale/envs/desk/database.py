"""The database of a customer-service desk, and the texts in which tools show its records."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar


class Record(Protocol):
    """An immutable record of the database. `id` is its number."""

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Record)


class DeskError(Exception):
    """Error: a tool call is not possible. The policy gets the text as the call's result."""


@dataclass(frozen=True, slots=True)
class Payment:
    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class User:
    id: str
    name: str
    email: str
    account: str
    payments: tuple[Payment, ...] = ()

    def require_payment(self, number: str) -> None:
        """Raise `DeskError` unless the user has the payment method with this number."""
        if number not in {payment.id for payment in self.payments}:
            raise DeskError(f"no payment method {number}")

    def payment_of(self, kind: str) -> str:
        """Return the number of the user's payment method of this kind."""
        return next(payment.id for payment in self.payments if payment.kind == kind)

    def payment_rows(self) -> list[dict[str, Any]]:
        """Return the payment methods as JSON records, for the result of a tool."""
        return [{"payment_id": int(each.id), "kind": each.kind} for each in self.payments]


@dataclass(frozen=True, slots=True)
class Note:
    """A note of the agent about a case, which is the record with number `id`: a refusal, or a
    handover to a human.
    """

    id: str
    refused: tuple[str, ...] = ()
    """The reasons for which requests about the case were refused, sorted."""
    handed_over: bool = False


@dataclass(slots=True)
class Desk:
    """The database of one episode. The reward compares its last state with the one that the rules
    require.

    `desk[Order]` is number -> record, for the records of type `Order`.
    """

    terse: bool = True
    """True if tools answer in short lines, False if in JSON."""
    tables: dict[type, dict[str, Any]] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    """Names of the tool calls that changed the database, in order."""

    def __getitem__(self, kind: type[R]) -> dict[str, R]:
        return self.tables.setdefault(kind, {})

    def get(self, kind: type[R], number: str) -> R:
        """Return the record of a type with this number. Raises `DeskError` if there is none."""
        if number not in self[kind]:
            raise DeskError(f"no {kind.__name__.lower()} {number}")
        return self[kind][number]

    def put(self, record: Record) -> None:
        """Add a record, or replace the one of its type with the same number."""
        self[type(record)][record.id] = record

    def note(self, number: str) -> Note:
        """Return what was noted about the case with this number. Empty if nothing was."""
        return self[Note].get(number, Note(number))

    def copy(self) -> "Desk":
        """Return a copy with the same records, which are immutable, and without `writes`."""
        return Desk(self.terse, {kind: dict(table) for kind, table in self.tables.items()})

    def changes(self, other: "Desk") -> dict[tuple[type, str], tuple[Any, Any]]:
        """Return (type, number) -> (own record, record of `other`), where the two databases differ.

        A record is None if a database does not have it.
        """
        mine, theirs = (
            {(kind, key): row for kind, table in desk.tables.items() for key, row in table.items()}
            for desk in (self, other)
        )
        return {
            key: (mine.get(key), theirs.get(key))
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        }

    def text(self, record: Mapping[str, Any]) -> str:
        """Return a record as the agent reads it: JSON, or a short line if `terse` is set."""
        return short_line(record) if self.terse else json.dumps(record)


def with_record(records: Iterable[R], changed: R) -> tuple[R, ...]:
    """Return the records, with `changed` in place of the one with the same number."""
    return tuple(changed if each.id == changed.id else each for each in records)


def numbered(text: str, what: str) -> str:
    """Return `text` if it is a number of 2 or 4 digits. Otherwise raise `DeskError`.

    The error says that there is no `what` with this number.
    """
    if not (len(text) in (2, 4) and text.isascii() and text.isdigit()):
        raise DeskError(f"no {what} {text}")
    return text


def short_line(record: Mapping[str, Any]) -> str:
    """Return a record as a short line of text. None and False are left out.

    A name or number always follows a space, and a number follows its name, as in tool calls and in
    the customer's messages. So it has the same tokens everywhere, and the policy can copy it.

    >>> short_line({"fare": "flex", "bags": [{"id": 34, "name": "Ada", "paid": True}], "seat": 5})
    'flex; bags: paid Ada 34; seat 5'
    """
    parts, was_list = "", False
    for key, value in record.items():
        name = key.removesuffix("_id").replace("_", " ")
        is_list = isinstance(value, list)
        if is_list:
            rows = (" ".join(_words(row)) for row in value)
            words = [f"{name}: {', '.join(rows) or 'none'}"]
        else:
            words = [name, str(value)] if type(value) is int else _words({key: value})
        if words:
            parts += ("; " if is_list or was_list else ", ") + " ".join(words)
            was_list = is_list
    return parts[2:]


def _words(row: Mapping[str, Any]) -> list[str]:
    """Return a record's words: the names of the values that are True, then the texts, then the
    numbers.
    """
    marks = [key.replace("_", " ") for key, value in row.items() if value is True]
    texts = [value for value in row.values() if isinstance(value, str)]
    return marks + texts + [str(number) for number in row.values() if type(number) is int]
