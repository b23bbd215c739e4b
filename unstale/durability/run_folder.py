"""The files of a run folder except the journal: metrics, events, configuration and error.

`RunLog` writes them and `RunFolder` reads them. Metrics and events are JSON lines, and each line is
flushed. So a killed run leaves complete lines and at most one incomplete line at the end. Reading
the files does not import torch.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from unstale.config import ConfigError
from unstale.config.files import flush_to_disk
from unstale.config.names import present_names

Row = dict[str, Any]

CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
ERROR = "error.txt"
HANG = "hang.txt"
REPORT = "report.html"
AUDIT = "audit.json"
TOKENIZER = "tokenizer.json"
"""Name of the file with the policy's tokenizer, which turns the tokens in the journal into text."""

MAX_OBJECT_BYTES = 32 << 20
"""Largest size in bytes of a JSON file that is read. A run folder may come from an untrusted
source, so a larger file is refused.
"""

MAX_CONFIG_BYTES = 1 << 20
"""Largest size in bytes of a `config.json` that is read. A run writes about 10 kB."""

MAX_ERROR_BYTES = 100_000
"""Number of bytes at the end of a run's `error.txt` that are read."""


def plain(value: Any) -> Any:
    """Return a value in a form that JSON can express. NaN and infinity become None.

    >>> plain({1: float("nan"), "path": Path("runs"), "ok": (1, 2.5)})
    {'1': None, 'path': 'runs', 'ok': [1, 2.5]}
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def show_controls(text: str) -> str:
    r"""Return text with control characters as escapes, so that it cannot control a terminal.

    Tabs and line feeds are kept.

    >>> show_controls("\x1b[2J\rx\n")
    '\\x1b[2J\\rx\n'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_STEERING = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that JSON may contain unescaped but that control a terminal: codes from 0x7f to 0x9f,
and characters that change the direction of text.
"""


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text. NaN and infinity become null.

    Control characters are escaped, so that a terminal can show the text.
    """
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file, or replace its content in one step. A symbolic link at `path` is replaced
    itself.

    With `durable`, wait until the disk has the content, so that it survives a power cut. Otherwise
    the file may be empty after one.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with partial.open("x", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
    if durable:
        flush_to_disk(partial)
    partial.replace(path)
    if durable:
        flush_to_disk(path.parent)


class RunLog:
    """A writer of a run's metrics, events, configuration and error.

    `clock` returns seconds. Times in the files are seconds since the run began.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._start = clock()
        self._files: dict[str, IO[str]] = {}
        self._before: frozenset[Path] | None = None
        """The entries that the folder had before `create`.

        None for a log that `reopen` returned.
        """
        self._is_new = False
        """True if the folder did not exist before `create`."""

    @classmethod
    def create(
        cls, path: Path, config: Any = None, *, clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Create a run folder and write `config`, the options of the run. Return its log.

        Raises `ConfigError` if the folder already has a run.
        """
        if present := [name for name in (CONFIG, METRICS, EVENTS) if (path / name).exists()]:
            raise ConfigError(
                f"{path} already holds a run ({', '.join(present)}); "
                "choose another name or remove it"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder")
        log = cls(path, clock)
        log._is_new = not path.exists()
        log._before = frozenset() if log._is_new else frozenset(path.iterdir())
        path.mkdir(parents=True, exist_ok=True)
        log._write_config({} if config is None else config)
        return log

    @classmethod
    def reopen(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Return a log that continues the log of a run folder, from the time of its last event.

        An incomplete last line, which a kill left, is removed. The files with the configuration and
        the error of the earlier run stay unchanged until `begin_again`.
        """
        events = list(read_jsonl(path / EVENTS))
        write_whole(path / EVENTS, "".join(dumps(row) + "\n" for row in events))
        log = cls(path, clock)
        log._start -= max((float(row.get("time", 0.0)) for row in events), default=0.0)
        return log

    def begin_again(self, config: Any) -> None:
        """Write the options of a resumed run, and remove the error with which the run ended before.

        Call it only after all checks of the options, because the next resume reads them from this
        file.
        """
        self._write_config(config)
        (self.path / ERROR).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove everything that was added to the folder since `create`, and the folder if `create`
        made it.

        Files that another program is still writing may remain.
        """
        assert self._before is not None, "only a log that `create` returned can be discarded"
        self.close()
        for path in set(self.path.iterdir()) - self._before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
        if self._is_new:
            with suppress(OSError):
                self.path.rmdir()

    def rewind(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Replace the content of `metrics.jsonl`. A resumed run gives the rows that its journal
        has.
        """
        self.close()
        write_whole(self.path / METRICS, "".join(dumps(row) + "\n" for row in metrics))

    @property
    def seconds(self) -> float:
        """Seconds since the run began. For a resumed run, the time until its last event is
        included.
        """
        return self._clock() - self._start

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step to `metrics.jsonl`.

        The run's time in seconds is added as `time_s` if `metrics` does not have it.
        """
        self._append(METRICS, {"step": step, "time_s": round(self.seconds, 3), **metrics})

    def event(self, kind: str, **fields: Any) -> None:
        self._append(EVENTS, {"time": round(self.seconds, 3), "kind": kind, **fields})

    def write_last_event(self, kind: str, **fields: Any) -> None:
        """Append an event to `events.jsonl` while the process is ending.

        The event is written without the open file object, because a signal may have interrupted its
        write.
        """
        row = dumps({"time": round(self.seconds, 3), "kind": kind, **fields})
        descriptor = os.open(self.path / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{row}\n".encode(errors="replace"))

    @contextmanager
    def span(self, lane: str, label: str = "") -> Iterator[None]:
        """Return a context that times an activity.

        At its end, an event of kind "span" is written, with the activity's start and end in
        seconds, even if the body fails. `lane` is the line of the timeline on which it is shown.
        """
        start = round(self.seconds, 3)
        try:
            yield
        finally:
            end = round(self.seconds, 3)
            self.event("span", lane=lane, start=start, end=end, label=label)

    def failed(self, error: str) -> None:
        """Write the error that ended the run to `error.txt`."""
        (self.path / ERROR).write_text(show_controls(error.rstrip()) + "\n", encoding="utf-8")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_config(self, config: Any) -> None:
        write_whole(self.path / CONFIG, dumps(config, indent=2) + "\n", durable=True)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.path / name).open(
                "a", encoding="utf-8", errors="replace", newline="\n"
            )
        self._files[name].write(dumps(record) + "\n")
        self._files[name].flush()


class BrokenFile(ValueError):
    """Error: a line of a JSON-lines file is not a JSON object. The last line is not checked,
    because a kill may have cut it.
    """


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file. A missing file has none.

    An incomplete last line, which a kill left, is skipped. Any other line that cannot be read
    raises `BrokenFile`.
    """
    if not path.is_file():
        return
    error = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if error:
                raise BrokenFile(error)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                error = f"{path.name}, line {number} is not a JSON object"


class RunFolder:
    """A reader of the files of one run, which may be active, killed or failed.

    `gaps` has a sentence for each part that was missing or damaged in the files read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gaps: list[str] = []
        if not path.is_dir():
            problem = "it is a file" if path.exists() else "it does not exist"
            raise ConfigError(f"{path} is not a run folder: {problem}")
        if not any((path / name).exists() for name in (CONFIG, METRICS, EVENTS)):
            raise ConfigError(
                f"{path} is not a run folder: it has no {CONFIG}, {METRICS} or {EVENTS}"
            )

    def config(self) -> Row:
        """Return the options in `config.json`. Options that were renamed have their current names.

        Empty if the file is missing or damaged.
        """
        if not self.holds(CONFIG):
            self.add_gap(f"{CONFIG} is missing")
        return present_names(self.read_object(CONFIG, max_bytes=MAX_CONFIG_BYTES))

    def metrics(self) -> list[Row]:
        """Return the metrics, one row per step."""
        return list(self.rows(METRICS))

    def rows(self, name: str) -> Iterator[Row]:
        """Yield the objects of the JSON-lines file `name` up to the first unreadable line."""
        if not self.holds(name):
            self.add_gap(f"{name} is missing")
            return
        try:
            yield from read_jsonl(self.path / name)
        except BrokenFile as error:
            self.add_gap(f"{error}; what follows it was not read")

    def error(self) -> str:
        """Return the text of the error that ended the run, or "" if there is none.

        Of a file with more than `MAX_ERROR_BYTES`, only the end is returned. A traceback ends with
        the error.
        """
        if not self.holds(ERROR):
            return ""
        with (self.path / ERROR).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_ERROR_BYTES:
                self.add_gap(f"{ERROR} has {size:,} bytes; its last {MAX_ERROR_BYTES:,} were read")
                file.seek(size - MAX_ERROR_BYTES)
            text = file.read(MAX_ERROR_BYTES)
        return text.decode(errors="replace").strip()

    def holds(self, name: str) -> bool:
        """Return True if the run folder has a regular file `name`.

        Symbolic links do not count, because those in an untrusted folder could show files from
        outside it.
        """
        if (self.path / name).is_symlink():
            self.add_gap(f"{name} is a link, and links are not followed")
            return False
        return (self.path / name).is_file()

    def add_gap(self, text: str) -> None:
        if text not in self.gaps:
            self.gaps.append(text)

    def read_object(self, name: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> Row:
        """Return the object in a JSON file. Empty if the file is missing, damaged or too large."""
        if not self.holds(name):
            return {}
        size = (self.path / name).stat().st_size
        if size > max_bytes:
            self.add_gap(f"{name} has {size:,} bytes; at most {max_bytes:,} are read")
            return {}
        try:
            value = json.loads((self.path / name).read_bytes())
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        self.add_gap(f"{name} is not a JSON object")
        return {}


def disk_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)
