"""What the journal says of every group and attempt, kept in the run folder for reports, which need no torch."""

from pathlib import Path

from unstale.durability.journal import JOURNAL, Journal, JournalError, survivors
from unstale.durability.run_folder import SURVIVORS, Row, dumps, write_whole


def write_survivors(folder: Path) -> None:
    """Write `survivors.json` into a run folder, also while the run goes on; an older one is replaced as a whole.

    Of a journal that cannot be read it says why. A folder without one keeps what it has.
    """
    if not (folder / JOURNAL).exists():
        return
    found: Row
    try:
        with Journal.read(folder) as journal:
            found = survivors(journal).row()
    except (JournalError, OSError) as error:
        found = {"missing": str(error)}
    write_whole(folder / SURVIVORS, dumps(found) + "\n")
