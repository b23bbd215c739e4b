"""The tracker `lines`: one line per step in a file of the run folder."""

from collections.abc import Mapping
from pathlib import Path

from unstale.observe.trackers import RunOutcome, Sink, TrackedRun


class Lines:
    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.write(f"{step} {metrics['reward/mean']}\n")

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, outcome: RunOutcome) -> None:
        self.file.write(f"{outcome.kind}\n")
        self.file.close()


def open_lines(run: TrackedRun) -> Sink:
    return Lines(run.folder / "lines.txt")
