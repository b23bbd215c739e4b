"""Exit codes of commands that run something."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def exit_code(work: Callable[[], object]) -> int:
    """Run something and return the exit code: 0, 1 if its machinery failed, 130 after Ctrl-C."""
    from unstale.cli.evaluate import RunFailed

    try:
        work()
    except RunFailed as failure:
        print_error("the run failed", failure)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def print_error(title: str, error: object) -> None:
    text = f"[bold red]{title}:[/] {escape(str(error))}"
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)
