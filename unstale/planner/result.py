"""What a simulated run comes to, in numbers and in a sentence. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from unstale.observe.report.words import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A run of some steps. Rates and shares are of the steps after `filling`, when the line is full."""

    steps_s: tuple[float, ...]
    """From each version's being taken up to the next one's."""
    filling: int
    """First steps that are left out: until they are over, the line fills up."""
    groups_per_step: int
    trained_tokens: int
    """Tokens of the batches after filling, and how many of them were sampled."""
    trained_sampled: int
    sampled_tokens: int
    """Tokens that engines sampled in the whole run, and those of engines that died before they gave them back."""
    lost_tokens: int
    failed_episodes: int
    """Attempts that a time-out ended."""
    deaths: int
    """Engines that died."""
    engine_busy_share: float
    """Of the time of engines that were up."""
    trainer_busy_share: float
    """Training, old log-probabilities and making versions ready."""
    trainer_wait_share: float
    """Waiting for groups. What is left is waiting until the engines have the version before."""
    old_logps_share: float
    staleness_histogram: Mapping[int, int]
    """Trained tokens by age in versions, over the whole run."""
    staleness_bound: int
    episode_s: float
    """Mean length of an episode's life, and the shares of it that engines (also full ones) and tools take."""
    engine_share: float
    tool_share: float
    ready_s: float
    """Mean time that a finished episode waits for the trainer: for its siblings, its place in line, and the step."""

    @property
    def steady_s(self) -> tuple[float, ...]:
        return self.steps_s[self.filling :]

    @property
    def mean_step_s(self) -> float:
        return sum(self.steady_s) / len(self.steady_s)

    @property
    def groups_per_s(self) -> float:
        return self.groups_per_step / self.mean_step_s

    @property
    def staleness_mean(self) -> float:
        count = sum(self.staleness_histogram.values())
        return sum(age * tokens for age, tokens in self.staleness_histogram.items()) / max(1, count)

    @property
    def staleness_max(self) -> int:
        return max(self.staleness_histogram, default=0)

    @property
    def bottleneck(self) -> str:
        """Who waits for whom, and what of the schedule would help."""
        scored = self.old_logps_share
        told = Waiting(
            trainer=self.trainer_wait_share,
            engine=max(0.0, 1 - self.engine_busy_share),
            work={
                "Training": self.trainer_busy_share - scored,
                "Scoring old log-probabilities": scored,
            },
            tools=self.tool_share,
            finished=self.ready_s / max(1e-9, self.ready_s + self.episode_s),
            synchronous=self.staleness_bound == 0,
        )
        return f"{told.sentence} {told.advice}" if "schedule." in told.advice else told.sentence
