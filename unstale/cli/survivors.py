"""Derive `survivors.json` from the journal, for reports."""

from pathlib import Path

from unstale.durability.journal import JOURNAL, Journal, JournalError, survivors
from unstale.durability.run_folder import SURVIVORS, Row, dumps, write_whole


def write_survivors(folder: Path) -> None:
    """Write `survivors.json` into a run folder, also while the run continues.

    Replaces an older file.
    If the journal cannot be read, the file holds the reason. Without a journal nothing is written.
    """
    if not (folder / JOURNAL).exists():
        return
    content: Row
    try:
        with Journal.read(folder) as journal:
            content = survivors(journal).row()
    except (JournalError, OSError) as error:
        content = {"missing": str(error)}
    write_whole(folder / SURVIVORS, dumps(content) + "\n")
