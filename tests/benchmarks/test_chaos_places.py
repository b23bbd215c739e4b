"""The places at which `make chaos` kills a run work with the functions of today."""

import sqlite3
from collections.abc import Iterable

import pytest

from benchmarks import chaos_child
from benchmarks.chaos_child import Place


class Writer:
    """Commits like `Journal`, whose records come from an iterator."""

    def commit(self, connection: sqlite3.Connection, records: Iterable[tuple[str, int]]) -> None:
        connection.execute("BEGIN")
        for statement, value in records:
            connection.execute(statement, (value,))
        connection.execute("COMMIT")


def test_a_transaction_is_killed_at_the_drawn_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    monkeypatch.setattr(chaos_child, "die", die)
    # `arm` replaces the method; monkeypatch restores it.
    monkeypatch.setattr(Writer, "commit", Writer.commit)
    Place(Writer, "commit", 2, inside=True).arm(2, 0.5)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE numbers (number INTEGER)")

    def insert(*numbers: int) -> Iterable[tuple[str, int]]:
        return iter([("INSERT INTO numbers VALUES (?)", number) for number in numbers])

    Writer().commit(connection, insert(1, 2, 3))
    with pytest.raises(Killed):
        Writer().commit(connection, insert(4, 5, 6))
    # Half of BEGIN, three statements and COMMIT: before the second statement.
    assert connection.execute("SELECT number FROM numbers").fetchall() == [(1,), (2,), (3,), (4,)]
