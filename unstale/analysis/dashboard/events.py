"""Copy events of `events.jsonl` into the run's index. Activities (events with a start and an end)
have a table of their own.
"""

import sqlite3

from unstale.durability.run_folder import Row, dumps
from unstale.observe.words import number

MAX_EVENT = 100_000
"""Largest number of characters of an event's JSON that are kept. A line of the file may have 4
MiB.
"""

MAX_EVENT_TEXT = 4000
"""Largest number of characters of a text in an event of more than `MAX_EVENT` characters. Pages
show at most 2,000 of them.
"""


def add_event(writer: sqlite3.Connection, row: Row) -> None:
    """Add an event to a run's index. An activity whose times are not valid is left out."""
    kind = str(row.get("kind"))
    if kind == "span":
        start, end = number(row.get("start")), number(row.get("end"))
        if start is not None and end is not None and 0 <= start <= end:
            label = str(row.get("label") or "")[:200]
            writer.execute(
                'INSERT INTO spans (lane, start, "end", label) VALUES (?, ?, ?, ?)',
                (str(row.get("lane"))[:40], start, end, label),
            )
        return
    writer.execute(
        "INSERT INTO events (time, kind, fields) VALUES (?, ?, ?)",
        (number(row.get("time")), kind[:80], _event_json(row)),
    )


def _event_json(row: Row) -> str:
    """Return an event as JSON of at most `MAX_EVENT` characters.

    If the event is longer, its texts are cut, and fields that still do not fit are left out.
    """
    text = dumps(row)
    if len(text) <= MAX_EVENT:
        return text
    short: Row = {}
    left = MAX_EVENT - 2
    for name, value in row.items():
        kept = value[:MAX_EVENT_TEXT] if isinstance(value, str) else value
        size = len(dumps({name: kept}))
        if size <= left:
            short[name] = kept
            left -= size
    return dumps(short)
