"""Runs that kill themselves at a given call. `benchmarks/chaos.py` sends one JSON order per line.

Each order runs in a fork of this process, which has already imported everything and has no other
thread. The fork wraps functions of the package to count calls, and at the given call kills itself
(SIGKILL) or, from a thread, its engine's process.

The answer is one JSON line: how the run ended, the seconds it took, and processes left behind.
"""

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.chaos_forks import fork_by
from unstale.analysis.dashboard import frozen
from unstale.cli import main as cli
from unstale.cli import session
from unstale.durability import checkpoint, checkpoint_files
from unstale.durability.checkpoint import Checkpoints
from unstale.durability.journal import Journal
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.model.policy import Policy
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.rollout.transcript import Transcript
from unstale.trainer.local import LocalTrainer
from unstale.weights import child_process
from unstale.weights.bits import checksum
from unstale.weights.publish import DirectPublisher

ORPHAN_S = 10.0
"""Seconds within which the processes of a killed run must end."""
FROZEN_S = 60.0
"""Seconds in place of the package's few: an engine on a busy machine is not frozen."""
HUNG_S = 300.0
"""Seconds after which a run counts as hung."""

_CHILD_SUBREAPER = 36
"""Option of prctl: this process becomes the parent of processes whose parent died."""

Order = dict[str, Any]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(seconds: float) -> None:
    def wait() -> None:
        time.sleep(seconds)
        die()

    Thread(target=wait, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Place:
    """A function at which a run is killed."""

    owner: Any
    name: str
    calls: int
    """The run is killed at one of the first `calls` calls, drawn at random."""
    span_s: float = 0.0
    """Longest delay in seconds from the call to the kill, drawn evenly; 0 kills before the call."""
    inside: bool = False
    """For `Journal._commit`: kill between the statements of the transaction."""

    def __post_init__(self) -> None:
        if not hasattr(self.owner, self.name):
            raise ValueError(f"{self.owner.__name__} has no {self.name} to kill a run at")

    def arm(self, call: int, moment: float) -> None:
        """Prepare the kill at call number `call`, after the fraction `moment` of `span_s`."""
        function, calls = getattr(self.owner, self.name), 0

        def doomed(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != call:
                return function(*arguments, **named)
            if self.inside:
                journal, connection, found = arguments
                records = list(found)
                # BEGIN is 0, then the records, then the counts of rows, which count as one.
                last = len(records) + 2
                doomed_at = round(moment * last)
                doomed_connection = _Doomed(connection, doomed_at, at_commit=doomed_at == last)
                return function(journal, doomed_connection, records)
            if not self.span_s:
                die()
            die_in(moment * self.span_s)
            return function(*arguments, **named)

        setattr(self.owner, self.name, doomed)


@dataclass
class _Doomed:
    """A connection that kills its process before a statement."""

    connection: Any
    left: int
    """Number of statements before the kill."""
    at_commit: bool
    """Kill before COMMIT instead, whatever its number is."""

    def execute(self, statement: str, *arguments: Any) -> Any:
        if statement == "COMMIT" if self.at_commit else not self.left:
            die()
        self.left -= 1
        return self.connection.execute(statement, *arguments)


CLOCK = "any moment"
TARGETS: dict[str, tuple[Place, ...]] = {
    "start-up": (
        Place(session, "build_components", 1),
        Place(session, "build_components", 3, 0.5),
        Place(session, "init_run", 1, 0.3),
        Place(session, "load_resume_state", 2, 0.2),
        Place(session, "restore", 2, 0.2),
        Place(EmbeddedEngine, "start", 2, 2.0),
    ),
    "generation": (
        Place(Transcript, "append", 200),
        Place(EmbeddedEngine, "sample", 200, 0.1),
        Place(EmbeddedEngine, "interrupt", 5, 0.05),
    ),
    "scoring": (Place(SnapshotOld, "logps", 4, 0.2), Place(SnapshotOld, "on_published", 4, 0.02)),
    "optimizer step": (
        Place(LocalTrainer, "backward", 4, 0.3),
        Place(LocalTrainer, "step", 4, 0.03),
        Place(Journal, "commit", 4),
    ),
    "journal commit": (
        Place(Journal, "_commit", 100),
        Place(Journal, "_commit", 100, inside=True),
        Place(Journal, "_commit", 100, 0.004),
    ),
    "checkpoint": (
        Place(checkpoint, "write_checkpoint", 2, 0.3),
        Place(checkpoint_files, "read_back", 2),
        Place(Journal, "checkpoint", 2),
        Place(Journal, "checkpoint", 2, 0.01),
        Place(Checkpoints, "prune", 2),
        Place(Checkpoints, "prune", 2, 0.003),
    ),
    "publication": (
        Place(Checkpoints, "write_version", 4, 0.03),
        Place(DirectPublisher, "prepare", 5, 0.05),
        Place(DirectPublisher, "stage", 5, 0.1),
        Place(DirectPublisher, "publish", 5, 0.1),
        Place(Journal, "publishing", 5),
    ),
    "the end": (
        Place(Policy, "save", 1, 0.1),
        Place(frozen, "write_report", 1),
    ),
}
"""The functions at which runs are killed, by the component that they belong to."""


@dataclass
class Hunter:
    """A thread that kills or stops the engine processes of a run at random times, `kills` times."""

    kills: int
    span_s: float
    tell: Callable[..., None]
    draw: random.Random
    _sampling: Event = field(default_factory=Event)

    def watch(self) -> None:
        made, resume = child_process.Child.__init__, EmbeddedEngine.resume

        def born(child: child_process.Child, name: str, *arguments: Any, **named: Any) -> None:
            made(child, name, *arguments, **named)
            self._sampling.clear()
            self.tell("born", pid=child.pid)
            if self.kills:
                self.kills -= 1
                Thread(target=self._hunt, args=(child.pid,), daemon=True).start()

        async def resumed(engine: EmbeddedEngine) -> None:
            await resume(engine)
            self._sampling.set()

        child_process.Child.__init__ = born  # type: ignore[method-assign,assignment]
        EmbeddedEngine.resume = resumed  # type: ignore[method-assign,assignment]

    def _hunt(self, pid: int) -> None:
        starting = self.draw.random() < 0.2
        if not starting:
            self._sampling.wait()
        time.sleep(self.draw.uniform(0, 2.0 if starting else self.span_s))
        how = signal.SIGSTOP if self.draw.random() < 0.15 else signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(pid, how)
            self.tell("killed", pid=pid, how=how.name, while_starting=starting)


class Witness:
    """A writer of a run's events, for the comparison.

    It writes each line at once, so that the line survives a kill.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._began = time.monotonic()

    def tell(self, kind: str, **fields: Any) -> None:
        self._file.write(
            json.dumps({"kind": kind, "seconds": time.monotonic() - self._began, **fields}) + "\n"
        )
        self._file.flush()

    def watch(self) -> None:
        """Record each version that an engine loads, each version number, and the first step."""
        prepare, assign_new_version, step, told = (
            DirectPublisher.prepare,
            Policy.assign_new_version,
            LocalTrainer.step,
            False,
        )

        def prepared(publisher: DirectPublisher, policy: Policy, live: Any = ()) -> None:
            self.tell("meaning", version=policy.version, sum=checksum(policy.weights()))
            prepare(publisher, policy, live)

        def renumbered(policy: Policy, version: int) -> None:
            self.tell("renumbered", lost=version - 1 - policy.version)
            assign_new_version(policy, version)

        def stepped(trainer: LocalTrainer) -> None:
            nonlocal told
            step(trainer)
            if not told:
                told = True
                self.tell("trained")

        DirectPublisher.prepare = prepared  # type: ignore[method-assign,assignment]
        Policy.assign_new_version = renumbered  # type: ignore[method-assign,assignment]
        LocalTrainer.step = stepped  # type: ignore[method-assign,assignment]


def live(order: Order) -> None:
    """Run or resume in this fork. Raises `SystemExit` if it returns."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    witness = Witness(Path(order["told"]))
    witness.watch()
    if forks := order.get("forks"):
        fork_by(forks, witness.tell)
    if hunt := order.get("hunt"):
        Hunter(hunt["kills"], hunt["span_s"], witness.tell, random.Random(hunt["seed"])).watch()
    else:
        child_process.FROZEN_S = FROZEN_S
    if after_s := order.get("after_s"):
        die_in(after_s)
    if target := order.get("target"):
        TARGETS[target][order["place"]].arm(order["call"], order["moment"])
    cli.main(order["arguments"])


def bury(pid: int, began: float) -> Order:
    """Wait for the end of a run and of all processes that it started."""
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.01)
        if time.monotonic() - began > HUNG_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"hung": True, "code": 1, "seconds": HUNG_S, "orphans": _end_orphans()}
    seconds, until = time.monotonic() - began, time.monotonic() + ORPHAN_S
    with suppress(ChildProcessError):  # until there are none
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
    code = os.waitstatus_to_exitcode(ended[1])
    return {"hung": False, "code": code, "seconds": seconds, "orphans": _end_orphans()}


def _end_orphans() -> int:
    """End the processes that were left behind, and return their number."""
    left = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                left += rest.split()[0] != "Z"
                os.kill(int(name.split()[0]), signal.SIGKILL)
    return left


def adopt_orphans() -> None:
    """Make this process the parent of processes whose parent died. Only Linux can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    adopt_orphans()
    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            live(order)
        sys.stdout.write(json.dumps(bury(pid, began)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
