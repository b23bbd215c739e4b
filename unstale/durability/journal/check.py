"""Check that a journal is consistent, and show a summary of it on a terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from unstale.durability.journal.reader import JournalReader
from unstale.durability.journal.tables import ATTEMPTS, JournalError
from unstale.durability.journal.token_rows import unpack_tokens
from unstale.durability.run_folder import Row, show_controls

MAX_LISTED = 20
"""Largest number of problems of one kind that `check` lists."""

CHECKS = (
    (
        "row {1} of {0} belongs to a row of {2} that is missing",
        'SELECT "table", rowid, parent FROM pragma_foreign_key_check',
    ),
    (
        "group {} was finished while its episode {} was open",
        f"""SELECT number, episode FROM {ATTEMPTS} JOIN finished USING (number)
        WHERE episode NOT IN (SELECT episode FROM trajectories UNION SELECT episode FROM failures
            UNION SELECT episode FROM restarts)""",
    ),
    (
        "episode {} has {} pieces, the last at position {}",
        """SELECT episode, count(*), max(position) FROM pieces GROUP BY episode
        HAVING min(position) != 0 OR max(position) != count(*) - 1""",
    ),
    (
        "episode {} ended with {} pieces, but {} are recorded",
        """SELECT episode, num_pieces, count(position)
        FROM trajectories LEFT JOIN pieces USING (episode)
        GROUP BY episode HAVING count(position) != num_pieces""",
    ),
    (
        "episode {}, position {}: the length of the piece is not {} tokens",
        """SELECT episode, position, num_tokens FROM pieces
        WHERE length(tokens) NOT IN (2 * num_tokens, 4 * num_tokens)
        OR version IS NOT NULL AND length(behavior_logp) IS NOT 4 * num_tokens""",
    ),
    (
        "episode {}, position {}: version {} comes after version {}",
        """SELECT * FROM (
            SELECT episode, position, version, lag(version) OVER each AS before FROM pieces
            WHERE version IS NOT NULL WINDOW each AS (PARTITION BY episode ORDER BY position))
        WHERE version < before""",
    ),
    (
        "version {} was sampled from but never published",
        "SELECT version FROM pieces EXCEPT SELECT version FROM versions",
    ),
    (
        "version {} was published after version {}",
        """SELECT * FROM (SELECT version, lag(version) OVER (ORDER BY id) AS before FROM versions)
        WHERE version <= before""",
    ),
)
"""Pairs of a message and an SQL query that finds one kind of problem. The query has a row for each
problem, whose columns fill the placeholders of the message.
"""


def check(journal: JournalReader) -> list[str]:
    """Return a sentence for each inconsistency in a journal.

    The list is empty for an undamaged journal, even of a killed run.
    """
    try:
        damage = [text for (text,) in journal.rows("PRAGMA integrity_check") if text != "ok"]
        problems = [f"the file is damaged: {text}" for text in damage]
        problems += journal.unsound()
        for message, question in CHECKS:
            cases = [case for case in journal.rows(question) if case[0] is not None]
            problems += [message.format(*case) for case in cases[:MAX_LISTED]]
            if len(cases) > MAX_LISTED:
                problems.append(f"and {len(cases) - MAX_LISTED} more of this kind")
        wrong = list(islice(_wrong_token_values(journal), MAX_LISTED))
        problems += wrong
    except JournalError as error:
        return [str(error)]
    return problems


def _wrong_token_values(journal: JournalReader) -> Iterator[str]:
    """Yield a sentence for each row of the table `trained_tokens` that is damaged or
    inconsistent.
    """
    if not journal.token_steps():
        return
    sampled = {
        (number, episode): num_tokens
        for number, episode, num_tokens in journal.rows(
            """SELECT number, episode, coalesce(sum(num_tokens), 0)
            FROM episodes LEFT JOIN pieces USING (episode)
            WHERE version IS NOT NULL GROUP BY episode"""
        )
    }
    for number, step, route, total, packed in journal.token_rows():
        row = f"group {number}, step {step}: the trained tokens"
        try:
            found = unpack_tokens(packed, group=number, route=route)
        except ValueError as error:
            yield f"{row} cannot be read: {error}"
            continue
        if sum(len(each.flags) for each in found) != total:
            yield f"{row} are not {total}"
        for each in found:
            expected = sampled.get((number, each.episode), 0)
            if len(each.flags) != expected:
                yield (
                    f"{row} of episode {each.episode} are {len(each.flags)}, but the group has "
                    f"{expected} sampled tokens of it"
                )


def content(journal: JournalReader) -> Row:
    """Return the numbers of groups, episodes, tokens, checkpoints and versions in a journal, by
    name.
    """
    groups = journal.groups()
    ends: Counter[str] = Counter(group.ended for group in groups)
    ((pieces, tokens, sampled),) = journal.rows(
        """SELECT count(*), coalesce(sum(num_tokens), 0),
        coalesce(sum(CASE WHEN version IS NOT NULL THEN num_tokens END), 0) FROM pieces"""
    )
    ((restarts,),) = journal.rows("SELECT count(*) FROM restarts")
    versions = journal.versions()
    checkpoints = journal.checkpoints()
    token_steps = journal.token_steps()
    return {
        "groups": len(groups),
        "groups_trained": ends["consumed"],
        "groups_waiting": ends["finished"],
        "groups_open": ends["open"],
        "groups_failed": ends["failed"],
        "groups_replayed": len(set(journal.replayed())),
        "groups_with_token_values": len(token_steps),
        "token_values": journal.num_token_values,
        "failed_attempts": sum(group.num_failures for group in groups),
        "restarted_attempts": restarts,
        "trajectories": sum(group.num_trajectories for group in groups),
        "pieces": pieces,
        "tokens": tokens,
        "sampled_tokens": sampled,
        "checkpoints": len(checkpoints),
        "last_checkpoint_step": checkpoints[-1].step if checkpoints else None,
        "versions": [versions[0], versions[-1]] if versions else [],
        "bytes": journal.num_bytes,
    }


def page(journal: JournalReader, problems: Sequence[str]) -> RenderableType:
    """Return a table for a terminal: the numbers in a journal (`content`), and `problems` from
    `check`.
    """
    found = content(journal)
    last = f", the last at step {found['last_checkpoint_step']}" if found["checkpoints"] else ""
    sampled = found["sampled_tokens"]
    rows = {
        "groups started": f"{found['groups']:,}",
        "  trained on, or left out of a batch": f"{found['groups_trained']:,}",
        "    again in a later step": f"{found['groups_replayed']:,}",
        "  finished, waiting to be trained on": f"{found['groups_waiting']:,}",
        "  open": f"{found['groups_open']:,}",
        "  failed: no episode finished": f"{found['groups_failed']:,}",
        "failed attempts at episodes": f"{found['failed_attempts']:,}",
        "restarted attempts": f"{found['restarted_attempts']:,}",
        "trajectories": f"{found['trajectories']:,}",
        "pieces": f"{found['pieces']:,}",
        "tokens": f"{found['tokens']:,}",
        "  sampled": f"{found['sampled_tokens']:,}",
        "token values of training steps": f"{found['token_values']:,}",
        "  of groups": f"{found['groups_with_token_values']:,}",
        "checkpoints": f"{found['checkpoints'] or 'none'}{last}",
        "versions": " to ".join(map(str, found["versions"])) or "none",
        "bytes on disk": f"{found['bytes']:,}",
        "  per sampled token": f"{found['bytes'] / sampled:.1f}" if sampled else "-",
    }
    title = escape(str(journal.path))
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    verdict = [f"[bold red]wrong:[/] {escape(show_controls(text))}" for text in problems]
    return Group(table, *(verdict or ["[green]no problems found[/]"]))
