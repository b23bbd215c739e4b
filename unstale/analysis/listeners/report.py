"""Write the report at the end of a run."""

from pathlib import Path


def run_ended(folder: Path) -> tuple[str, list[str]]:
    """Write the report of a run that has ended.

    Return a line for the terminal, and the warnings of the report.
    """
    from unstale.analysis.dashboard.frozen import write_and_warn

    report, warnings = write_and_warn(folder)
    return f"report     {report}", warnings
