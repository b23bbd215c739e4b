"""A tracker that a user could add, which keeps in memory what it receives."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from unstale import RunOutcome, Sink, TrackedRun


@dataclass
class Memory:
    fails: bool = False
    first_step: int = 0
    rows: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    texts: list[tuple[int, str, str]] = field(default_factory=list)
    outcome: RunOutcome | None = None
    interrupts: bool = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("no route to \x1b[2Jhost")
        self.rows.append((step, metrics))
        if self.interrupts and step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def close(self, outcome: RunOutcome) -> None:
        assert self.outcome is None, "it is closed once"
        self.outcome = outcome


OPENED: list[Memory] = []


def make_memory(run: TrackedRun) -> Sink:
    assert run.config["recipe"] == "toy" and run.folder.name == "run"
    OPENED.append(Memory(first_step=run.first_step))
    return OPENED[-1]


def make_interrupting(run: TrackedRun) -> Sink:
    """Return a tracker that sends Ctrl-C at step 1."""
    OPENED.append(Memory(interrupts=True))
    return OPENED[-1]


def make_obstructing(run: TrackedRun) -> Sink:
    """Return a tracker of a run whose policy cannot be saved: a folder has the name of its file."""
    (run.folder / "policy" / "model.safetensors").mkdir(parents=True)
    OPENED.append(Memory(interrupts=run.folder.name == "stopped"))
    return OPENED[-1]
