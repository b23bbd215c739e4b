"""What a run writes down, and how it is read again: `RunLog` writes a run folder, `RunFolder` reads one.

Every file but the configuration is JSON lines, flushed a line at a time, so a run that is killed leaves whole lines and
at most one torn one at the end. Reading needs no torch: a report can be made on another machine.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from unstale.config import ConfigError

Row = dict[str, Any]

CONFIG, METRICS, EVENTS = "config.json", "metrics.jsonl", "events.jsonl"
TRAJECTORIES, SAMPLES, ERROR, REPORT = (
    "trajectories.jsonl",
    "samples.jsonl",
    "error.txt",
    "report.html",
)
AUDIT, SURVIVORS = "audit.json", "survivors.json"


def plain(value: Any) -> Any:
    """As JSON has it: non-finite numbers become None; dataclasses, paths, numpy and torch scalars what they stand for.

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
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def dumps(value: Any, indent: int | None = None) -> str:
    """Valid JSON on one line (or indented), whatever the numbers are."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and rename it. Nothing is written through a link that somebody put in its place."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
    fresh.replace(path)


class RunLog:
    """The files of one run, for writing. Also a `Sink`. Every line is on its way to disk when the call returns.

    `clock` is read for seconds; the run's own time begins at 0 when the log is made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._start = clock()
        self._files: dict[str, IO[str]] = {}

    @classmethod
    def create(
        cls, path: Path, config: Any = None, *, clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Make the run folder and write the configuration. Refuses a folder that already holds a run."""
        held = [
            name
            for name in (CONFIG, METRICS, EVENTS, TRAJECTORIES, SAMPLES)
            if (path / name).exists()
        ]
        if held:
            raise ConfigError(
                f"{path} already holds a run ({', '.join(held)}); choose another name or remove it"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder")
        path.mkdir(parents=True, exist_ok=True)
        log = cls(path, clock)
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(dumps({} if config is None else config, indent=2) + "\n")
        return log

    @classmethod
    def reopen(
        cls, path: Path, config: Any, *, clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Go on in a run folder. The run's time goes on; a line that was cut off is gone."""
        events = list(read_jsonl(path / EVENTS))
        write_whole(path / EVENTS, "".join(dumps(row) + "\n" for row in events))
        write_whole(path / CONFIG, dumps(config, indent=2) + "\n")
        (path / ERROR).unlink(missing_ok=True)
        log = cls(path, clock)
        log._start -= max((float(row.get("time", 0.0)) for row in events), default=0.0)
        return log

    def rewind(self, step: int, metrics: Iterable[Mapping[str, Any]]) -> None:
        """The metrics are these, the journal's; conversations and samples of steps after `step` will come again."""
        self.close()
        rows: dict[str, Iterable[Mapping[str, Any]]] = {METRICS: metrics}
        for name in (TRAJECTORIES, SAMPLES):
            rows[name] = [row for row in read_jsonl(self.path / name) if row["step"] <= step]
        for name, kept in rows.items():
            write_whole(self.path / name, "".join(dumps(row) + "\n" for row in kept))

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._clock() - self._start

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's reduced metrics. `time_s` is added when it is not among them."""
        self._append(METRICS, {"step": step, "time_s": round(self.seconds, 3), **metrics})

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, at the time it happened."""
        self._append(EVENTS, {"time": round(self.seconds, 3), "kind": kind, **fields})

    @contextmanager
    def span(self, lane: str, label: str = "") -> Iterator[None]:
        """An event of kind "span" that lasts as long as the block, also when the block raises."""
        start = self.seconds
        try:
            yield
        finally:
            self.event(
                "span", lane=lane, start=round(start, 3), end=round(self.seconds, 3), label=label
            )

    def trajectory(self, record: Mapping[str, Any]) -> None:
        """One finished episode: step, episode, task, reward, stop, turns, versions, num_tokens."""
        self._append(TRAJECTORIES, record)

    def points(self, points: Iterable[Mapping[str, Any]]) -> None:
        """A bounded sample of tokens: step, lag, log_d, log_s; audited ones with `true_log_d` and `true_log_s` too."""
        for point in points:
            self._append(SAMPLES, point)

    def failed(self, error: str) -> None:
        """Why the run failed, for whoever looks at the folder."""
        (self.path / ERROR).write_text(error.rstrip() + "\n", encoding="utf-8", errors="replace")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.path / name).open(
                "a", encoding="utf-8", errors="replace", newline="\n"
            )
        self._files[name].write(dumps(record) + "\n")
        self._files[name].flush()


class BrokenFile(ValueError):
    """A file of a run folder has a line in its middle that is not a JSON object."""


def read_jsonl(path: Path) -> Iterator[Row]:
    """The objects of a JSON-lines file. A last line that was cut off is skipped, and only the last.

    Nothing is read of a file that is not there. Raises `BrokenFile` at any other line that is not a JSON object.
    """
    if not path.is_file():
        return
    torn = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if torn:
                raise BrokenFile(torn)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                torn = f"{path.name}, line {number} is not a JSON object"


class RunFolder:
    """The files of one run, for reading: also of one that goes on, was cut off, or failed.

    `gaps` collects, in words, what was missing or broken in whatever has been read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gaps: list[str] = []
        if not path.is_dir():
            raise ConfigError(f"{path} is not a run folder: there is no such folder")
        if not any((path / name).exists() for name in (CONFIG, METRICS, EVENTS)):
            raise ConfigError(
                f"{path} is not a run folder: it has no {CONFIG}, {METRICS} or {EVENTS}"
            )

    def config(self) -> Row:
        """`config.json`, or an empty dict."""
        if not self._holds(CONFIG):
            self._gap(f"{CONFIG} is missing")
        return self._object(CONFIG)

    def audit(self) -> Row:
        """`audit.json`, or an empty dict: few runs are audited."""
        return self._object(AUDIT)

    def survivors(self) -> Row:
        """`survivors.json`, or an empty dict."""
        return self._object(SURVIVORS)

    def metrics(self) -> list[Row]:
        """One row per step."""
        return list(self.rows(METRICS))

    def rows(self, name: str) -> Iterator[Row]:
        """The objects of a JSON-lines file as far as they can be read."""
        if not self._holds(name):
            self._gap(f"{name} is missing")
            return
        try:
            yield from read_jsonl(self.path / name)
        except BrokenFile as error:
            self._gap(f"{error}; what follows it was not read")

    def error(self) -> str:
        """Why the run failed; empty when it did not."""
        file = self.path / ERROR
        return (
            file.read_text(encoding="utf-8", errors="replace").strip() if self._holds(ERROR) else ""
        )

    def _object(self, name: str) -> Row:
        """What a JSON file holds; an empty dict of none, or of one that is broken."""
        if not self._holds(name):
            return {}
        try:
            held = json.loads((self.path / name).read_bytes())
        except (ValueError, RecursionError):
            held = None
        if isinstance(held, dict):
            return held
        self._gap(f"{name} is not a JSON object")
        return {}

    def _holds(self, name: str) -> bool:
        """Whether a file is there. A link is none: a folder from somebody else could show files of yours."""
        if (self.path / name).is_symlink():
            self._gap(f"{name} is a link, and links are not followed")
            return False
        return (self.path / name).is_file()

    def _gap(self, text: str) -> None:
        if text not in self.gaps:
            self.gaps.append(text)
