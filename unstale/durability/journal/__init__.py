"""The durable record of a run: one SQLite database in its folder, written while the run goes on.

A group is committed before it can be consumed, a version before an engine can load it; everything else is committed
within `WINDOW_S`. Who reads sees one moment of it and never disturbs who writes. Tables, guarantees: docs/journal.md.
"""

from unstale.durability.journal.check import check, page
from unstale.durability.journal.export import write_jsonl, write_parquet
from unstale.durability.journal.reader import Handed, JournalReader, Kept, Marked
from unstale.durability.journal.survivors import Survivors, survivors
from unstale.durability.journal.tables import JOURNAL, JournalError
from unstale.durability.journal.writer import WINDOW_S, Journal

__all__ = [
    "JOURNAL",
    "WINDOW_S",
    "Handed",
    "Journal",
    "JournalError",
    "JournalReader",
    "Kept",
    "Marked",
    "Survivors",
    "check",
    "page",
    "survivors",
    "write_jsonl",
    "write_parquet",
]
