"""The durable record of a run: one SQLite database in its folder.

A group is committed before it can be trained on, a version before an engine can load it, everything
else within `WINDOW_S`. A reader sees one moment of the journal and never blocks the writer. Tables
and guarantees: docs/journal.md.
"""

from unstale.durability.journal.check import check, content, page
from unstale.durability.journal.conversations import conversation, trained_episodes
from unstale.durability.journal.export import export_rows, write_jsonl, write_parquet
from unstale.durability.journal.reader import (
    CheckpointRow,
    GroupRow,
    JournalReader,
    StoredEpisode,
)
from unstale.durability.journal.survivors import survivors
from unstale.durability.journal.tables import JOURNAL, TOKEN_SAMPLES, JournalError
from unstale.durability.journal.writer import WINDOW_S, Journal

__all__ = [
    "JOURNAL",
    "TOKEN_SAMPLES",
    "WINDOW_S",
    "CheckpointRow",
    "GroupRow",
    "Journal",
    "JournalError",
    "JournalReader",
    "StoredEpisode",
    "check",
    "content",
    "conversation",
    "export_rows",
    "page",
    "survivors",
    "trained_episodes",
    "write_jsonl",
    "write_parquet",
]
