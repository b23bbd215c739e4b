"""Test that no text of a model, an environment or a run controls the terminal."""

import io
import subprocess
import sys

from rich.table import Table

from unstale.durability.console import Console

UNRAISABLE = """
import logging, threading, warnings
from unstale.durability.console import escape_logs, escape_tracebacks
escape_tracebacks()
escape_logs()
logging.getLogger("library").warning("of type %s", "\\x1b[2J in a log")
warnings.warn("\\x1b[2J in a warning")
class Dies:
    def __del__(self): raise ValueError("\\x1b[2J in del")
Dies()
def fails(): raise ValueError("\\x1b[2J in a thread")
thread = threading.Thread(target=fails); thread.start(); thread.join()
raise ValueError("\\x1b[2J in main")
"""


def test_text_of_others_is_escaped_and_styles_still_act() -> None:
    table = Table()
    table.add_row("\x1b[2Jrow", "\x9b1A")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    console.print("\x1b]0;title\x07", "[bold]bold[/]", table, highlight=False)
    shown = file.getvalue()
    assert "\\x1b[2" in shown and "\\x1b]0;title" in shown
    assert "\x1b[2J" not in shown and "\x9b" not in shown and "\x1b[1mbold" in shown


def test_tracebacks_that_python_prints_are_escaped() -> None:
    done = subprocess.run([sys.executable, "-c", UNRAISABLE], capture_output=True, text=True)
    assert done.returncode == 1 and "\x1b" not in done.stderr
    assert "of type \\x1b[2J in a log" in done.stderr
    assert "UserWarning: \\x1b[2J in a warning" in done.stderr
    for place in ("del", "a thread", "main"):
        assert f"ValueError: \\x1b[2J in {place}" in done.stderr
