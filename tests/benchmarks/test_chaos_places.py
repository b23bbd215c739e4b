"""A kill inside a transaction comes before the statement that was drawn."""

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


@pytest.mark.parametrize(
    ("moment", "inserted"),
    [(0.0, []), (0.4, [4]), (1.0, [4, 5, 6])],
    ids=["before BEGIN", "before the second record", "before COMMIT"],
)
def test_a_transaction_is_killed_at_the_drawn_statement(
    monkeypatch: pytest.MonkeyPatch, moment: float, inserted: list[int]
) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    monkeypatch.setattr(chaos_child, "die", die)
    # `arm` replaces the method; monkeypatch restores it.
    monkeypatch.setattr(Writer, "commit", Writer.commit)
    Place(Writer, "commit", 2, inside=True).arm(2, moment)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE numbers (number INTEGER)")

    def insert(*numbers: int) -> Iterable[tuple[str, int]]:
        return iter([("INSERT INTO numbers VALUES (?)", number) for number in numbers])

    Writer().commit(connection, insert(1, 2, 3))
    with pytest.raises(Killed):
        Writer().commit(connection, insert(4, 5, 6))
    rows = connection.execute("SELECT number FROM numbers").fetchall()
    assert [number for (number,) in rows] == [1, 2, 3, *inserted]
    assert connection.in_transaction == (moment > 0)
