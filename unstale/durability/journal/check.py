"""Whether a journal keeps its promises, and what is in it, for a terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from unstale.durability.journal.reader import JournalReader
from unstale.durability.journal.tables import TRIED, JournalError

SHOWN = 20
"""Findings of one kind that are listed."""

CHECKS = (
    (
        "group {} was consumed and never handed out",
        "SELECT number FROM consumed EXCEPT SELECT number FROM groups",
    ),
    (
        "group {} was consumed and never finished",
        "SELECT number FROM consumed EXCEPT SELECT number FROM finished",
    ),
    (
        "group {} was consumed {} times",
        "SELECT number, count(*) FROM consumed GROUP BY number HAVING count(*) > 1",
    ),
    (
        "group {} was finished while its episode {} was open",
        f"""SELECT number, episode FROM {TRIED} JOIN finished USING (number)
        WHERE episode NOT IN (SELECT episode FROM trajectories UNION SELECT episode FROM failures
        UNION SELECT episode FROM restarts)""",
    ),
    (
        "episode {} belongs to no group",
        "SELECT episode FROM episodes WHERE number NOT IN (SELECT number FROM groups)",
    ),
    (
        "pieces of an unknown episode {}",
        "SELECT episode FROM pieces EXCEPT SELECT episode FROM episodes",
    ),
    (
        "episode {} has {} pieces, the last at position {}",
        """SELECT episode, count(*), max(position) FROM pieces GROUP BY episode
        HAVING min(position) != 0 OR max(position) != count(*) - 1""",
    ),
    (
        "episode {} ended with {} pieces, {} are there",
        """SELECT episode, num_pieces, count(position) FROM trajectories LEFT JOIN pieces USING (episode)
        GROUP BY episode HAVING count(position) != num_pieces""",
    ),
    (
        "episode {}, position {}: the length of the piece is not {} tokens",
        """SELECT episode, position, num_tokens FROM pieces WHERE length(tokens) NOT IN (2 * num_tokens, 4 * num_tokens)
        OR version IS NOT NULL AND length(behavior_logp) IS NOT 4 * num_tokens""",
    ),
    (
        "episode {}, position {}: version {} comes after version {}",
        """SELECT * FROM (SELECT episode, position, version, lag(version) OVER each AS before FROM pieces
        WHERE version IS NOT NULL WINDOW each AS (PARTITION BY episode ORDER BY position)) WHERE version < before""",
    ),
    (
        "version {} was sampled from and never published",
        "SELECT version FROM pieces EXCEPT SELECT version FROM versions",
    ),
    (
        "version {} was published after version {}",
        """SELECT * FROM (SELECT version, lag(version) OVER (ORDER BY id) AS before FROM versions)
        WHERE version <= before""",
    ),
)
"""What is wrong, in words, and a question whose answers are the cases."""


def check(journal: JournalReader) -> list[str]:
    """What is wrong; nothing, in a sound journal, whenever the run was cut off."""
    try:
        damage = [text for (text,) in journal.rows("PRAGMA integrity_check") if text != "ok"]
        wrong = [f"the file is damaged: {text}" for text in damage]
        wrong += journal.unsound()
        for words, question in CHECKS:
            wrong += _some(
                [words.format(*case) for case in journal.rows(question) if case[0] is not None]
            )
    except JournalError as error:
        return [str(error)]
    return wrong


def _some(found: Sequence[str]) -> list[str]:
    return [
        *found[:SHOWN],
        *([f"and {len(found) - SHOWN} more like it"] if len(found) > SHOWN else []),
    ]


def page(journal: JournalReader, wrong: Sequence[str]) -> RenderableType:
    """What is in it, and what is wrong with it."""
    groups = journal.groups()
    ends: Counter[str] = Counter(group.ended for group in groups)
    ((pieces, tokens, sampled),) = journal.rows(
        """SELECT count(*), coalesce(sum(num_tokens), 0),
        coalesce(sum(CASE WHEN version IS NOT NULL THEN num_tokens END), 0) FROM pieces"""
    )
    versions = journal.versions()
    table = Table(
        title=escape(str(journal.path)), title_justify="left", title_style="bold", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("groups handed out", f"{len(groups):,}")
    for end, words in (
        ("consumed", "consumed"),
        ("finished", "finished, not consumed"),
        ("open", "open"),
    ):
        table.add_row(f"  {words}", f"{ends[end]:,}")
    table.add_row("  failed: no episode finished", f"{ends['failed']:,}")
    table.add_row("failed attempts at episodes", f"{sum(group.num_failures for group in groups):,}")
    ((restarts,),) = journal.rows("SELECT count(*) FROM restarts")
    table.add_row("attempts that did not replay", f"{restarts:,}")
    table.add_row("trajectories", f"{sum(group.num_trajectories for group in groups):,}")
    table.add_row("pieces", f"{pieces:,}")
    table.add_row("tokens", f"{tokens:,}")
    table.add_row("  sampled", f"{sampled:,}")
    marks = journal.checkpoints()
    table.add_row(
        "checkpoints",
        f"{len(marks)}, the current one of step {marks[-1].step}" if marks else "none",
    )
    table.add_row("versions", f"{versions[0]} to {versions[-1]}" if versions else "none")
    table.add_row("bytes on disk", f"{journal.num_bytes:,}")
    table.add_row("  a sampled token", f"{journal.num_bytes / sampled:.1f}" if sampled else "-")
    verdict = [f"[bold red]wrong:[/] {escape(text)}" for text in wrong] or [
        "[green]nothing is wrong[/]"
    ]
    return Group(table, *verdict)
