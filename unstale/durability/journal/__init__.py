"""The journal: the durable record of a run, in one SQLite database in the run folder.

A group of episodes is committed before any step trains on it. A weight version is committed before
an engine loads it. Everything else is committed within `WINDOW_S` seconds. A reader sees the
journal as it was when it was opened, and never blocks the writer. docs/journal.md has the tables
and guarantees.
"""

from unstale.durability.journal.check import check, content, page
from unstale.durability.journal.conversations import conversation, trained_episodes
from unstale.durability.journal.export import export_rows, write_jsonl, write_parquet
from unstale.durability.journal.reader import (
    CheckpointRow,
    GroupRow,
    JournalReader,
    StoredEpisode,
    holds_journal,
    identity,
)
from unstale.durability.journal.survivors import survivors
from unstale.durability.journal.tables import (
    EPISODE_BUDGET,
    JOURNAL,
    TOKEN_SAMPLES,
    TURN_LIMIT,
    JournalError,
)
from unstale.durability.journal.token_rows import TrainedTokens
from unstale.durability.journal.writer import WINDOW_S, Journal

__all__ = [
    "EPISODE_BUDGET",
    "JOURNAL",
    "TOKEN_SAMPLES",
    "TURN_LIMIT",
    "WINDOW_S",
    "CheckpointRow",
    "GroupRow",
    "Journal",
    "JournalError",
    "JournalReader",
    "StoredEpisode",
    "TrainedTokens",
    "check",
    "content",
    "conversation",
    "export_rows",
    "holds_journal",
    "identity",
    "page",
    "survivors",
    "trained_episodes",
    "write_jsonl",
    "write_parquet",
]
