"""The tracker TensorBoard: event files in the folder `tensorboard` of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unstale.observe.trackers import AcceptedNames, RunOutcome, Sink, TrackedRun

PACKAGE = "torch.utils.tensorboard"


def open_sink(package: Any, run: TrackedRun) -> Sink:
    """Begin new event files in the run folder. Return the tracker.

    A resumed run writes the steps from `run.first_step` on again. TensorBoard hides these steps of
    older files.
    """
    folder = str(run.folder / "tensorboard")
    writer = package.SummaryWriter(folder, purge_step=run.first_step)
    return _TensorBoard(writer, AcceptedNames("tensorboard", run.note))


@dataclass(frozen=True, slots=True)
class _TensorBoard:
    writer: Any
    names: AcceptedNames

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in self.names.rename(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        # TensorBoard shows texts as Markdown. Indented lines are shown unchanged.
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self, outcome: RunOutcome) -> None:
        self.writer.close()
