"""A simulated pool of reward processes, with the rule of the pool of a run."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from unstale.analysis.planner.clock import SimulatedClock
from unstale.envs.elastic import PoolSize


@dataclass(eq=False)
class _Process:
    idle_since: float
    is_busy: bool = False


class SimulatedRewards:
    """A pool of processes that compute one reward after another on a simulated clock.

    `sizes` has (time, number of processes that run) for each change of this number.
    """

    def __init__(self, clock: SimulatedClock, size: PoolSize, *, start_s: float) -> None:
        """Create the pool without processes. Each start takes `start_s` seconds."""
        self.sizes: list[tuple[float, int]] = []
        self.starts = 0
        self.wait_s = 0.0
        """Sum over rewards of the time that they waited for a process."""
        self._clock = clock
        self._size = size
        self._start_s = start_s
        self._starting = 0
        self._processes: list[_Process] = []
        self._waiting: deque[tuple[float, float, Callable[[], None]]] = deque()
        """For each reward that waits: since when, how long it takes, and what to call then."""
        self._due = 0.0
        """Time of the last call of `_update` that is on the clock."""

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Compute a reward, which takes `seconds` in a process. Call `then` when it is known."""
        self._waiting.append((self._clock.now, seconds, then))
        self._update()

    def _update(self) -> None:
        """Hand out rewards, and start and end processes, as `ElasticPool` does."""
        now = self._clock.now
        for process in self._processes:
            if self._waiting and not process.is_busy:
                since, seconds, then = self._waiting.popleft()
                self.wait_s += now - since
                self._begin(process, seconds, then)
        while self._size.observe(
            now,
            waiting=len(self._waiting),
            running=len(self._processes),
            starting=self._starting,
        ):
            self._starting += 1
            self.starts += 1
            self._clock.at(now + self._start_s, self._started)
        left = self._size.next_start_s()
        for process in self._processes[::-1]:
            if not process.is_busy:
                number = len(self._processes) + self._starting
                idle_left = self._size.idle_s_left(now - process.idle_since, number)
                if idle_left <= 0:
                    self._processes.remove(process)
                    self.sizes.append((now, len(self._processes)))
                else:
                    left = min(left, idle_left)
        due = now + left
        if left < float("inf") and not now < self._due <= due:
            self._due = due
            self._clock.at(due, self._update)

    def _begin(self, process: _Process, seconds: float, then: Callable[[], None]) -> None:
        process.is_busy = True

        def end() -> None:
            process.is_busy, process.idle_since = False, self._clock.now
            self._update()
            then()

        self._clock.at(self._clock.now + seconds, end)

    def _started(self) -> None:
        self._starting -= 1
        self._size.start_s = self._start_s
        self._processes.append(_Process(self._clock.now))
        self.sizes.append((self._clock.now, len(self._processes)))
        self._update()
