"""Send the metrics and sample texts of a run to experiment trackers, such as Weights & Biases.

Each tracker is a file of this folder with

    PACKAGE = "wandb"                                        # the module that it needs
    def open_sink(package: Any, run: TrackedRun) -> Sink: ...  # gets that module

The file's name is also the name of the tracker, and of the extra that installs its package. The
option `trackers` lists names of trackers. It may also list an entry point of another distribution,
or `module:factory`: a function `factory(run: TrackedRun) -> Sink`. In Python its value may be such
a function, a `Sink`, or a list of these.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from unstale.config import ConfigError, install, nearest
from unstale.config.given import Given
from unstale.config.plugins import Plugins, added_names, modules
from unstale.envs.registry import import_user_code, user_code

if TYPE_CHECKING:  # `records` imports torch
    from unstale.records import Group

TEXT_EVERY = 10
"""Number of steps between two episodes that are sent to trackers as text, from step 1 on."""
CLOSE_S = 120.0
"""Longest time in seconds for which the end of a run waits until trackers have sent all data."""


MAX_NAMES, MAX_NOTES = 500, 10
"""A tracker gets at most `MAX_NAMES` metrics with the same part before the `/` in their names. At
most `MAX_NOTES` notes about changed names are printed. MLflow's database takes 1 ms for each value.
"""
MAX_NAME = 200
"""Largest number of characters of a metric's name. MLflow accepts 250."""
_REFUSED = re.compile(r"[^/\w.\-]", re.ASCII)
"""Characters that a tracker may refuse or change in the name of a metric."""

OutcomeKind = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run: finished, stopped by the user (Ctrl-C, SIGTERM), or failed."""

    kind: OutcomeKind
    detail: str = ""
    """The cause as text, such as the error message."""


_ENDED_EARLY = RunOutcome("failed", "the run ended without giving a reason")


class Sink(Protocol):
    """A tracker that receives the metrics and sample texts of a run.

    All methods are called in one thread of the run that does nothing else, so they may wait. If a
    method raises an error, the tracker is closed, and the run continues with a warning. A resumed
    run writes the steps after its last checkpoint a second time.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, all of which are finite.

        docs/metrics.md lists their names.
        """
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text with its name, such as a sampled conversation."""
        ...

    def close(self, outcome: RunOutcome) -> None:
        """Write pending data, store how the run ended, and close. No method is called afterwards.

        If another method raised an error, `outcome` has the kind `failed`, even if the run
        continues.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A description of the run whose metrics a tracker gets."""

    folder: Path
    """The run folder. Its name is the name of the run."""
    config: Mapping[str, Any]
    """All options of the run, as in `config.json`."""
    note: Callable[[str], None] = lambda text: None
    """A function that prints a line on the terminal of the run."""
    first_step: int = 0
    """The first step that will be written. If the run is resumed, the tracker may have this step
    and later ones already.
    """

    def stored_id(self, tracker: str) -> str:
        """Return the identifier that `tracker` gave to this run before a resume, or ""."""
        path = self.folder / f"{tracker}.id"
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def store_id(self, tracker: str, identifier: str) -> None:
        """Store the identifier that `tracker` gave to this run, by which a resume continues its
        charts.
        """
        (self.folder / f"{tracker}.id").write_text(identifier + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class AcceptedNames:
    """Renames metrics for trackers that refuse some characters. Different names stay different.

    With unchanged names, MLflow would refuse a whole step because of one of them, and TensorBoard
    would write `a,b` and `a;b` into one chart.
    """

    tracker: str
    note: Callable[[str], None]
    _names: dict[str, str] = field(default_factory=dict)
    """The accepted name of each metric, by its original name. Empty if the metric is not sent."""
    _counts: Counter[str] = field(default_factory=Counter)

    def rename(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics by their accepted names.

        At most `MAX_NAMES` metrics with the same part before the `/` are returned. Notes are
        printed about the first changed names, and about metrics that are left out.
        """
        for name in metrics:
            if name not in self._names:
                self._names[name] = self._accept(name)
        return {sent: value for name, value in metrics.items() if (sent := self._names[name])}

    def _accept(self, name: str) -> str:
        component = name.partition("/")[0]
        self._counts[component] += 1
        if self._counts[component] > MAX_NAMES:
            if self._counts[component] == MAX_NAMES + 1:
                self.note(
                    f"warning: {self.tracker} gets the first {MAX_NAMES} metrics of {component}/ "
                    "only; metrics.jsonl has all of them"
                )
            return ""
        accepted = accepted_name(name)
        if accepted != name:
            self._counts["/changed"] += 1
            if self._counts["/changed"] <= MAX_NOTES:
                last = self._counts["/changed"] == MAX_NOTES
                self.note(
                    f"warning: {self.tracker} cannot have the name {name!r}, sent as {accepted}"
                    f"{'; further names change without a note' * last}"
                )
        return accepted


def accepted_name(name: str) -> str:
    """Return a metric's name in a form that every tracker accepts. Distinct names stay distinct.

    A changed name gets a suffix that depends only on the name, so a resumed run continues its
    chart.

    >>> accepted_name("reward/mean")
    'reward/mean'
    >>> accepted_name("reward/acc@1")
    'reward/acc_1_dd69cc'
    """
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip(".")]
    accepted = "/".join(parts)[:MAX_NAME]
    if name and accepted == name:
        return name
    suffix = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"{accepted or 'metric'}_{suffix}"


ADDED = Plugins("unstale.trackers", Callable)


def tracker_names() -> list[str]:
    own = modules(__name__)
    return [*own, *added_names(ADDED.group, own)]


def find_trackers(option: str) -> dict[str, Callable[[TrackedRun], Sink]]:
    """Return, for each tracker that the option `trackers` lists, the function that opens it.

    The result is a dict by the tracker's name. `option` is the value of the option. Raises
    `ConfigError` for an unknown name, or if a tracker's package is not installed.
    """
    if not isinstance(option, Given):
        return {name: _find(name) for name in re.split(r"[,\s]+", option) if name}
    found: dict[str, Callable[[TrackedRun], Sink]] = {}
    for each in option.value:
        if isinstance(each, str):
            found |= find_trackers(each)
        else:
            is_class = isinstance(each, type) or not hasattr(each, "write")
            name = getattr(each, "__qualname__", type(each).__qualname__)
            found[f"{name} ({len(found) + 1})"] = each if is_class else partial(_given, each)
    return found


def _given(sink: Sink, run: TrackedRun) -> Sink:
    return sink


def _find(name: str) -> Callable[[TrackedRun], Sink]:
    if name.partition(":")[2]:
        problem = f"trackers: {name} cannot be imported"
        return import_user_code(name, problem)
    if name not in tracker_names():
        known = [*tracker_names(), "MODULE:FACTORY"]
        raise ConfigError(f"trackers cannot hold {name!r}{nearest(name, known)}")
    if name not in modules(__name__):
        return ADDED.load(name)
    tracker = import_module(f"{__name__}.{name}")
    try:
        package = import_module(tracker.PACKAGE)
    except ImportError as error:
        raise ConfigError(f"trackers: {name} needs the package {name}: {install(name)}") from error
    return partial(tracker.open_sink, package)


@dataclass(slots=True)
class Trackers:
    """The open trackers of a run. A separate thread calls them, so a slow server delays no step."""

    sinks: dict[str, Sink] = field(default_factory=dict)
    _thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "trackers"), init=False
    )
    _calls: deque[tuple[str, Future[None]]] = field(default_factory=deque, init=False)
    """Calls of trackers that may still run, or whose errors were not read yet: the tracker's name
    and the call's future.
    """
    _is_closed: bool = field(default=False, init=False)

    @classmethod
    def open(cls, option: str, run: TrackedRun) -> Self:
        """Open the trackers that `option`, the value of the option `trackers`, lists.

        Raises `ConfigError` if a tracker cannot be opened.
        """
        sinks = {}
        with ExitStack() as opened:
            for name, make in find_trackers(option).items():
                with user_code(f"trackers: {name} cannot start"):
                    sinks[name] = make(run)
                opened.callback(sinks[name].close, RunOutcome("failed", "a tracker did not start"))
            opened.pop_all()
        return cls(sinks)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send a step's metrics to all trackers, except values that are not finite numbers."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "step" and math.isfinite(value)
        }
        self._call(lambda sink: sink.write(step, numbers))

    def sample(
        self, step: int, groups: "Sequence[Group]", decode: Callable[[list[int]], str]
    ) -> None:
        """Send one of a batch's episodes as text to all trackers, at step 1 and every `TEXT_EVERY`
        steps.

        `decode` turns tokens into text.
        """
        episodes = [episode for group in groups for episode in group.trajectories]
        if not self.sinks or not episodes or step % TEXT_EVERY != 1:
            return
        episode = episodes[0]
        about = f"task {episode.task.key}, reward {episode.reward:g}, stop: {episode.stop}"
        text = f"{about}\n\n{decode(list(episode.tokens))}"
        self._call(lambda sink: sink.text(step, "sample", text))

    def failures(self) -> Iterator[tuple[str, BaseException]]:
        """Yield the name and the error of each tracker that has failed since the last call.

        A failed tracker is closed and not used again. After `close`, trackers that could not be
        closed in time also count as failed.
        """
        while self._calls and self._calls[0][1].done():
            name, call = self._calls.popleft()
            error = call.exception()
            if not error or not (sink := self.sinks.pop(name, None)):
                continue
            if not self._is_closed:
                lost = RunOutcome("failed", f"later metrics were not sent: {error}")
                self._calls.append((name, self._thread.submit(sink.close, lost)))
            yield name, error
        if self._is_closed:
            for name in dict.fromkeys(name for name, _ in self._calls):
                if self.sinks.pop(name, None):
                    yield name, TimeoutError("it did not end in time, and some metrics may be lost")

    def close(self, outcome: RunOutcome = _ENDED_EARLY, timeout_s: float = CLOSE_S) -> None:
        """Close each tracker after it has written what was sent to it. `outcome` says how the run
        ended.

        Return after at most `timeout_s` seconds, even if trackers are not closed yet. A second call
        does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            calls = tuple(self._calls)
            for name, sink in self.sinks.items():
                self._calls.append((name, self._thread.submit(_close, name, sink, outcome, calls)))
            _, late = wait([call for _, call in self._calls], timeout_s)
            self._thread.shutdown(wait=not late)

    def _call(self, action: Callable[[Sink], None]) -> None:
        for name, sink in self.sinks.items():
            self._calls.append((name, self._thread.submit(action, sink)))


def _close(
    name: str, sink: Sink, outcome: RunOutcome, calls: Iterable[tuple[str, Future[None]]]
) -> None:
    """Close a tracker. `outcome` is replaced by "failed" if one of its earlier `calls` failed."""
    errors = (call.exception() for other, call in calls if other == name)
    if error := next(filter(None, errors), None):
        outcome = RunOutcome("failed", f"some metrics were not sent: {error}")
    sink.close(outcome)
