"""Write `survivors.json`: statistics of trained and lost episodes."""

from pathlib import Path

from unstale.durability.journal import JOURNAL, Journal, JournalError, survivors
from unstale.durability.run_folder import SURVIVORS, Row, dumps, write_whole


def write_survivors(folder: Path) -> None:
    """Write `survivors.json` in a run folder, or replace it. The run may still be in progress.

    If the journal cannot be read, the file contains the reason. Without a journal nothing is
    written.
    """
    if not (folder / JOURNAL).exists():
        return
    content: Row
    try:
        with Journal.read(folder) as journal:
            content = survivors(journal)
    except (JournalError, OSError) as error:
        content = {"missing": str(error)}
    write_whole(folder / SURVIVORS, dumps(content) + "\n")
