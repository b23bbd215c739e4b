"""Find lines of user code: code that is neither in this package nor in an installed library."""

import linecache
import os
import re
import signal
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

PACKAGE = f"{Path(__file__).parent}{os.sep}"
PYTHON = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")})
INSTALLED = (
    *PYTHON,
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib")),
)
_MAX_SOURCE = 120
_MAX_TEXT = 1200
_LAST_WORDS = 1 << 18
"""Number of bytes at the end of a process's output that are searched for the cause of its end."""
_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def is_hidden(file: str, function: str) -> bool:
    """Return True for code that users are not shown: this package's, and generated code."""
    return _is_generated(file, function) or file.startswith((PACKAGE, "<frozen "))


def _is_generated(file: str, function: str) -> bool:
    return file == "<string>" and function.startswith("__")


def format_error(error: BaseException) -> list[str]:
    """Return the traceback of an error and its causes as strings, without generated code.

    Each string ends with a newline, as from `traceback.format_exception`.
    """
    shown = traceback.TracebackException.from_exception(error)
    parts = [shown]
    for each in parts:
        each.stack[:] = [
            frame for frame in each.stack if not _is_generated(frame.filename, frame.name)
        ]
        parts += [more for more in (each.__cause__, each.__context__) if more]
        parts += each.exceptions or ()
    return list(shown.format())


def _is_user(file: str, function: str) -> bool:
    return not (file.startswith(INSTALLED) or is_hidden(file, function))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code: `frame` itself, or one of its callers.

    Return None if there is none.
    """
    while frame and not _is_user(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back
    return frame


def show_frame(frame: FrameType | None) -> str:
    """Return the line of user code that is innermost among `frame` and its callers.

    It has the form of `show_line`. Return "" if there is none.
    """
    place = user_frame(frame)
    return (
        show_line(place.f_code.co_filename, place.f_lineno, place.f_code.co_name) if place else ""
    )


def show_line(file: str, line: int, function: str) -> str:
    """Return "FILE, line N, in FUNCTION: SOURCE" as one line of limited length."""
    with suppress(ValueError, OSError):
        file = str(Path(file).relative_to(Path.cwd()))
    source = one_line(linecache.getline(file, line))
    shown = f": {source[:_MAX_SOURCE]}" if source else ""
    name = f"in {one_line(function)[:_MAX_SOURCE]}"
    return f"{one_line(file)[-_MAX_SOURCE:]}, line {line}, {name}{shown}"


def one_line(text: str) -> str:
    """Return the first 1200 characters of a text in one line.

    Runs of whitespace become one space. Unprintable characters become escapes.
    """
    shown = " ".join(text[:_MAX_TEXT].split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def lines_of_dump(dump: str) -> list[str]:
    """Return each thread's innermost line of user code, from a dump that `faulthandler` wrote.

    Threads without user code, and repeated lines, are left out.
    """
    lines = []
    for thread in dump.split("(most recent call first):\n")[1:]:
        for file, line, function in _DUMPED.findall(thread):
            if _is_user(file, function):
                lines.append(show_line(file, int(line), function))
                break
    return list(dict.fromkeys(lines))


def outcome(code: int) -> str:
    """Return how a process ended, from its return code as `subprocess` gives it.

    >>> outcome(3), outcome(-9)
    ('exit code 3', 'SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def last_words(output: IO[bytes]) -> str:
    """Return why a process ended, from its output: its line of code at a crash, or its last line.

    The result is the end of a sentence, such as ": killed". It is "" if there is no output.
    """
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _LAST_WORDS))
    text = output.read().decode(errors="replace")
    if lines := lines_of_dump(text):
        return f" in {lines[-1]}"
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
