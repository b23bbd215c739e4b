"""The error of a failed run, and functions that end a command with an error message."""

import errno
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from rich.markup import escape

from unstale.durability.console import Console
from unstale.durability.run_folder import show_controls
from unstale.stop_signals import end_process

OUT_OF_FILES, OUT_OF_MEMORY, OUT_OF_THREADS = "files", "memory", "threads"
_ERRNOS = {
    errno.EMFILE: OUT_OF_FILES,
    errno.ENFILE: OUT_OF_FILES,
    errno.ENOMEM: OUT_OF_MEMORY,
    errno.EAGAIN: OUT_OF_THREADS,
}
_TEXTS = {
    "Too many open files": OUT_OF_FILES,
    "can't start new thread": OUT_OF_THREADS,
    "Resource temporarily unavailable": OUT_OF_THREADS,
    "allocate memory": OUT_OF_MEMORY,
    "Cannot allocate": OUT_OF_MEMORY,
    "out of memory": OUT_OF_MEMORY,
    "error return without exception set": OUT_OF_MEMORY,
}
"""Parts of the messages of errors without an error number, such as those of torch and of threads.
They show which resource ran out.
"""

EXIT_S = 10.0
"""Seconds that Python waits, at the end of the process, for threads which user code started."""


class RunFailed(RuntimeError):
    """Error: a component of a run failed. Its `__cause__` is the first error of a component."""


def literal(text: object) -> str:
    """Return `text` as markup that rich prints literally. Control characters become escapes."""
    return escape(show_controls(str(text)))


def exit_after(title: str, error: object, *, code: int) -> NoReturn:
    """Print `title: error` on stderr, and exit with the exit code `code`."""
    print_failure(title, error)
    sys.exit(code)


def print_failure(title: str, error: object) -> None:
    """Print an error on stderr as `title: error`."""
    text = f"[bold red]{title}:[/] {literal(error)}"
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)


def exhausted(error: BaseException) -> str:
    """Return a sentence on the resource that ran out (files, memory or threads), and what helps.

    Empty if the error has another cause.

    >>> exhausted(RuntimeError("can't start new thread")).partition(":")[0]
    'no new thread or process can be started'
    >>> exhausted(FileNotFoundError(2, "No such file or directory"))
    ''
    """
    kind = OUT_OF_MEMORY if isinstance(error, MemoryError) else None
    if isinstance(error, OSError):
        kind = kind or _ERRNOS.get(error.errno or 0)
        if error.errno == errno.EAGAIN and _is_of_socket(error):
            return ""
    from unstale.envs.guard import error_text  # not at the start of every command

    said = error_text(error)
    kind = kind or next((kind for text, kind in _TEXTS.items() if text in said), None)
    if kind == OUT_OF_FILES:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"no more files can be opened: the limit is {limit}. Raise it with `ulimit -n 4096`"
    if kind == OUT_OF_THREADS:
        return (
            "no new thread or process can be started: raise the limit of processes (`ulimit -u`, "
            "or that of the container), or end other programs"
        )
    if kind == OUT_OF_MEMORY:
        return (
            "memory is used up: end other programs, raise the limit (`ulimit -v`, or that of the "
            "container), or choose a smaller model, trainer.max_tokens_per_microbatch or "
            "engine.max_running"
        )
    return ""


def _is_of_socket(error: BaseException) -> bool:
    """Return True if a module for sockets raised the error.

    An EAGAIN of a socket means that it has no data, not that threads ran out.
    """
    *_, last = [None, *traceback.extract_tb(error.__traceback__)]
    path = Path(last.filename) if last else Path()
    return path.stem in ("socket", "ssl", "selectors") or path.parent.name == "asyncio"


def end_despite_threads() -> None:
    """End the exiting process in `EXIT_S` seconds, even if threads run that are not daemons.

    Otherwise Python would wait for these without limit. The exit code is that of the current
    SystemExit. Does nothing if there are no such threads.
    """
    error = sys.exception()

    def end() -> None:
        time.sleep(EXIT_S)
        if names := _waiting_for():
            print_failure("unstale", f"threads of user code never end: {', '.join(names)}")
            end_process(exit_code(error))

    if _waiting_for():
        threading.Thread(target=end, name="exit", daemon=True).start()


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a Python process that ends with `error`.

    None means without an error.
    """
    code = error.code if isinstance(error, SystemExit) else 1 if error else 0
    return code if isinstance(code, int) else 1 if code else 0


def _waiting_for() -> list[str]:
    """Return the names of the threads, besides the main thread, for which Python waits at its
    end.
    """
    return [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
