"""The console of all commands. It shows control characters as escapes.

So text of a model, an environment or a run cannot control the user's terminal.
"""

import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import TracebackType
from typing import IO, Any, cast

from rich import console
from rich._null_file import NULL_FILE
from rich.segment import Segment

from unstale.durability.run_folder import show_controls

_outputs: dict[bool, tuple[IO[str], Any]] = {}
"""Standard output (key False) and standard error (key True), each with `_opened` of its file."""


def keep_outputs() -> None:
    """Store the current standard output and error, to which consoles write even if code replaces
    them.

    If other code closes one of the two, consoles write to the other.
    """
    for is_error, file in enumerate((sys.stdout, sys.stderr)):
        _outputs[bool(is_error)] = file, _opened(file)


def _opened(file: IO[str]) -> tuple[int, int] | None:
    """Return the device and inode of an open file, which identify it. None if it is closed.

    Its descriptor number does not, because it is reused after closing.
    """
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return status.st_dev, status.st_ino


class Console(console.Console):
    """A console of rich that shows control characters in text as escapes.

    rich's own control codes, such as colours, still work.
    """

    @property
    def file(self) -> IO[str]:
        if self._file or not _outputs:
            return super().file
        for is_error in (self.stderr, not self.stderr):
            file, opened = _outputs[is_error]
            if opened and _opened(file) == opened:
                return file
        return NULL_FILE

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render(
        self, renderable: Any, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(show_controls(segment.text), segment.style)


class _Escaped(io.TextIOBase):
    """A text stream that writes control characters as escapes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        return self._console.file.write(show_controls(text))

    def flush(self) -> None:
        self._console.file.flush()

    def fileno(self) -> int:
        return self._console.file.fileno()


@contextmanager
def escaped_prints() -> Iterator[None]:
    """Return a context in which printed control characters are shown as escapes.

    `rich.live` does this only on a terminal. But a log file may later be shown on a terminal.
    """
    if not _outputs:
        yield
        return
    printed, errors = _Escaped(Console()), _Escaped(Console(stderr=True))
    with redirect_stdout(cast(IO[str], printed)), redirect_stderr(cast(IO[str], errors)):
        yield


def escape_logs() -> None:
    """Show control characters in warnings and log messages of all libraries as escapes, from this
    call on.
    """
    make_record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def escaped_record(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        record.msg, record.args = show_controls(record.getMessage()), ()
        return record

    def escaped_warning(*arguments: Any, **options: Any) -> str:
        return show_controls(format_warning(*arguments, **options))

    logging.setLogRecordFactory(escaped_record)
    warnings.formatwarning = escaped_warning


def escape_tracebacks() -> None:
    """Show control characters in the tracebacks of unhandled errors as escapes, from this call on.

    This replaces Python's hooks for the main thread, other threads and `__del__`.
    """

    def show(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from unstale.envs.guard import traceback_text  # not at the start of every command

        text = traceback_text(error.with_traceback(trace)) if error else f"{kind.__name__}\n"
        sys.stderr.write(show_controls(text))

    def show_in_thread(about: threading.ExceptHookArgs) -> None:
        if about.exc_type is not SystemExit:
            name = about.thread.name if about.thread else "unknown"
            sys.stderr.write(show_controls(f"Exception in thread {name}:\n"))
            show(about.exc_type, about.exc_value, about.exc_traceback)

    def show_unraisable(about: "sys.UnraisableHookArgs") -> None:
        name = getattr(about.object, "__qualname__", type(about.object).__name__)
        reason = about.err_msg or "Exception ignored in"
        sys.stderr.write(show_controls(f"{reason}: {name}\n"))
        show(about.exc_type, about.exc_value, about.exc_traceback)

    sys.excepthook = show
    threading.excepthook = show_in_thread
    sys.unraisablehook = show_unraisable
