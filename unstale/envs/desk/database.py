"""The database of a customer-service desk: records by type and number, and their texts in tools."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar


class Record(Protocol):
    """An immutable record of the database. Its number is `id`."""

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=Record)


class DeskError(Exception):
    """Error of a tool call that is not possible. The agent receives its text."""


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
        """Raise `DeskError` unless the customer has the payment method with this number."""
        if number not in {payment.id for payment in self.payments}:
            raise DeskError(f"no payment method {number}")

    def payment_of(self, kind: str) -> str:
        """Return the id of the customer's first payment method whose kind is `kind`."""
        return next(payment.id for payment in self.payments if payment.kind == kind)

    def payment_rows(self) -> list[dict[str, Any]]:
        """Return the payment methods as a tool shows them."""
        return [{"payment_id": int(each.id), "kind": each.kind} for each in self.payments]


@dataclass(frozen=True, slots=True)
class Note:
    """Notes about the case with this number: refusals, and the transfer to a human."""

    id: str
    refused: tuple[str, ...] = ()
    """Reasons of the requests that were refused, sorted."""
    handed_over: bool = False


@dataclass(slots=True)
class Desk:
    """The database of one episode. The reward compares its end state with that which the rules
    require.

    `desk[Order]` is the table of all records of type `Order`, by number.
    """

    terse: bool = True
    """True if tools answer in short lines instead of JSON."""
    tables: dict[type, dict[str, Any]] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    """Names of the calls that changed the database, in order."""

    def __getitem__(self, kind: type[R]) -> dict[str, R]:
        return self.tables.setdefault(kind, {})

    def get(self, kind: type[R], number: str) -> R:
        """Return a record. Raises `DeskError` if the number does not exist."""
        if number not in self[kind]:
            raise DeskError(f"no {kind.__name__.lower()} {number}")
        return self[kind][number]

    def put(self, record: Record) -> None:
        """Add a record, or replace the one with the same number."""
        self[type(record)][record.id] = record

    def note(self, number: str) -> Note:
        """Return the notes about a case. They are empty if there are none yet."""
        return self[Note].get(number, Note(number))

    def copy(self) -> "Desk":
        """Return a copy whose list of writes is empty.

        It shares the records, which are immutable.
        """
        return Desk(self.terse, {kind: dict(table) for kind, table in self.tables.items()})

    def changes(self, other: "Desk") -> dict[tuple[type, str], tuple[Any, Any]]:
        """Return the records in which two databases differ, as `(mine, other)` by type and number.

        A record that does not exist is None.
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
    """Return the records with `changed` in place of the record that has the same number."""
    return tuple(changed if each.id == changed.id else each for each in records)


def numbered(text: str, what: str) -> str:
    """Return the number in a text of the customer. Raises `DeskError` unless it has 2 or 4 digits.

    `what` names the numbered thing in the error.
    """
    if not (len(text) in (2, 4) and text.isascii() and text.isdigit()):
        raise DeskError(f"no {what} {text}")
    return text


def short_line(record: Mapping[str, Any]) -> str:
    """Return a record in few tokens. None and False are left out.

    Each name and number follows a space, and a number follows its name. Calls and the customer's
    answers are written the same way. So the tokenizer makes the same token of a name or number
    everywhere, and the policy can copy it.

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
    """Return the names of a row's values that are True, then its texts, then its numbers."""
    marks = [key.replace("_", " ") for key, value in row.items() if value is True]
    texts = [value for value in row.values() if isinstance(value, str)]
    return marks + texts + [str(number) for number in row.values() if type(number) is int]
