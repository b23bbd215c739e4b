"""The failure of a run, and the exit of a command with an error message."""

import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape


class RunFailed(RuntimeError):
    """A component of a run failed. `__cause__` is the first error."""


def exit_after(title: str, error: object, *, code: int) -> NoReturn:
    """Print an error in one line on stderr, and exit with a code."""
    text = f"[bold red]{title}:[/] {escape(str(error))}"
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)
    sys.exit(code)
