"""Everything the loop says about a run, on its way to the run folder, the terminal and TensorBoard."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from unstale.durability.run_folder import RunLog
from unstale.observe.metrics import Sink

if TYPE_CHECKING:  # the records bring torch along, and a report must not need it
    from unstale.records import Failure, Group, Piece


class Watcher(Protocol):
    """Somebody who looks on: the live display."""

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def phase(self, text: str, done: int = 0, total: int = 0) -> None: ...

    def note(self, text: str) -> None: ...


class Recorder:
    """The one thing the loop writes to. `decode` turns tokens into text for the stored conversations."""

    def __init__(
        self,
        log: RunLog,
        watcher: Watcher,
        decode: Callable[[Sequence[int]], str],
        *,
        sinks: Sequence[Sink] = (),
        told: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        """`told` hears of every event but spans."""
        self._log = log
        self._watcher = watcher
        self._decode = decode
        self._sinks = sinks
        self._told = told

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {"time_s": round(self._log.seconds, 3), **metrics}
        for sink in (self._log, *self._sinks):
            sink.write(step, row)
        self._watcher.update({"step": step, **row})

    def close(self) -> None:
        """Close the further sinks; the run folder's files belong to whoever made them."""
        for sink in self._sinks:
            sink.close()

    def event(self, kind: str, **fields: Any) -> None:
        self._log.event(kind, **fields)
        self._told(kind, **fields)

    def phase(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """What the run is busy with, for whoever looks on; not written down."""
        self._watcher.phase(text, done, total)

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """Something that lasts as long as the block."""
        with self._log.span(lane, label):
            yield

    def learnt(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None:
        """Some tokens of a batch, and what happened to the route meanwhile."""
        self._log.points({"step": step, **point} for point in points)
        for happened in events:
            self.event(step=step, **happened)

    def failure(self, episode: int, failure: "Failure", final: bool) -> None:
        """An attempt that its environment could not finish; `final` when the episode is not begun again."""
        self.event("episode_failed", episode=episode, final=final, **_words(failure))
        self._watcher.note(
            f"episode {episode} of {failure.task.key} failed in {failure.stage}: {failure.error}"
        )

    def restarted(self, episode: int, failure: "Failure") -> None:
        """An attempt that its environment did not replay to the same text: it is begun anew."""
        self.event("episode_restarted", episode=episode, **_words(failure))
        self._watcher.note(
            f"episode {episode} of {failure.task.key} was begun anew: {failure.error}"
        )

    def trajectories(self, step: int, groups: Iterable["Group"]) -> None:
        """The conversations that a step trained on."""
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory in (one for episode in episodes for one in (episode, *episode.branches)):
            self._log.trajectory(
                {
                    "step": step,
                    "episode": trajectory.episode,
                    "task": trajectory.task.key,
                    "reward": trajectory.reward,
                    "success": trajectory.success,
                    "stop": trajectory.stop,
                    "versions": sorted(trajectory.versions),
                    "num_tokens": len(trajectory),
                    "turns": self._turns(trajectory.pieces),
                }
            )

    def _turns(self, pieces: Sequence["Piece"]) -> list[dict[str, Any]]:
        """Runs of pieces by who spoke; within a reply one piece per version."""
        turns: list[dict[str, Any]] = []
        for piece in pieces:
            version = getattr(piece, "version", None)
            role = "environment" if version is None else "assistant"
            text = self._decode(piece.tokens)
            shown = {
                "text": text,
                "version": version,
                "provenance": piece.provenance.name,
                "num_tokens": len(piece.tokens),
            }
            if turns and turns[-1]["role"] == role:
                turns[-1]["text"] += text
                turns[-1]["pieces"].append(shown)
            else:
                turns.append({"role": role, "text": text, "pieces": [shown]})
        return turns


def _words(failure: "Failure") -> dict[str, Any]:
    told = ("stage", "error", "turns", "sampled_tokens")
    return {"task": failure.task.key, **{name: getattr(failure, name) for name in told}}
