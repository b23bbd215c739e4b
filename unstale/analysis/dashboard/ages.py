"""Count trained tokens by their place in the episode and their lag (staleness in versions)."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from unstale.durability.journal import JournalReader

TENTHS = 10
"""Number of parts of equal length into which every episode is divided."""

Run = tuple[int, int | None]
"""A run of tokens of an episode: its number of tokens, and the version of the policy that sampled
it. The version is None for context tokens.
"""


def count_ages(pieces: Sequence[Run], version: int) -> Counter[tuple[int, int]]:
    """Return the number of sampled tokens of an episode by (tenth of the episode from 0, lag).

    `version` is the version of the policy that was trained on the episode. The lag of a token is
    `version` minus the version that sampled it. Context tokens are not counted, but they are part
    of the episode's length.

    >>> sorted(count_ages([(10, None), (5, 3), (5, 4)], 4).items())
    [((5, 1), 2), ((6, 1), 2), ((7, 0), 1), ((7, 1), 1), ((8, 0), 2), ((9, 0), 2)]
    """
    total = sum(count for count, _ in pieces)
    # the tokens of a tenth are those from ceil(tenth * total / 10) on
    edges = [-(-tenth * total // TENTHS) for tenth in range(TENTHS + 1)]
    found: Counter[tuple[int, int]] = Counter()
    start = tenth = 0
    for count, own in pieces:
        end = start + count
        while start < end:
            while edges[tenth + 1] <= start:
                tenth += 1
            stop = min(end, edges[tenth + 1])
            if own is not None:
                found[tenth, version - own] += stop - start
            start = stop
    return found


def add_ages(writer: sqlite3.Connection, ages: Counter[tuple[int, int]]) -> None:
    """Add the counts that `count_ages` returns to the table `ages` of a run's index."""
    writer.executemany(
        "INSERT INTO ages VALUES (?, ?, ?) "
        "ON CONFLICT (tenth, lag) DO UPDATE SET tokens = tokens + excluded.tokens",
        [(tenth, lag, tokens) for (tenth, lag), tokens in ages.items()],
    )


def add_ages_of(
    journal: JournalReader, writer: sqlite3.Connection, episodes: Iterable[int], version: int
) -> None:
    """Count the tokens of several episodes in the journal, and add them to the table `ages`.

    `version` is that of the policy that was trained on them.
    """
    found: Counter[tuple[int, int]] = Counter()
    for episode in episodes:
        pieces = journal.rows(
            "SELECT num_tokens, version FROM pieces WHERE episode = ? ORDER BY position", episode
        )
        found.update(count_ages(pieces, version))
    add_ages(writer, found)
