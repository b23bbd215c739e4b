"""The durable record of a run: one SQLite database in its folder, written while the run goes on.

A group is committed before it can be consumed, a version before an engine can load it; everything else is committed
within `WINDOW_S`. Who reads sees one moment of it and never disturbs who writes. Tables and guarantees: docs/journal.md.
"""

from afterimage.journal.check import check, page
from afterimage.journal.export import export
from afterimage.journal.reader import JournalReader, Kept, Handed
from afterimage.journal.tables import JOURNAL, JournalError, consumption
from afterimage.journal.writer import WINDOW_S, Journal

__all__ = [
    "JOURNAL",
    "WINDOW_S",
    "Handed",
    "Journal",
    "JournalError",
    "JournalReader",
    "Kept",
    "check",
    "consumption",
    "export",
    "page",
]
