"""The result of a simulated run, in numbers and in a sentence. This module does not import
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unstale.observe.words import Waiting


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The work of all engines together. Steps at the start, in which the queue of finished groups
    fills up, do not count.
    """

    steps: float
    """Number of decoding steps."""
    sampled: float
    """Number of sampled tokens."""
    prefilled: float
    """Number of context tokens whose keys and values were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Figures of a simulated run. Rates and shares do not count the first `filling` steps."""

    steps_s: tuple[float, ...]
    """Seconds of each step, from the loading of one version to that of the next."""
    filling: int
    """Number of steps at the start in which the queue of finished groups fills up."""
    groups_per_step: int
    trained_tokens: int
    """Number of tokens in the batches after the first `filling` steps."""
    trained_sampled: int
    """Number of sampled tokens in the batches after the first `filling` steps."""
    sampled_tokens: int
    """Number of tokens that engines sampled, over all steps."""
    lost_tokens: int
    """Number of sampled tokens that were lost because engines failed, and were sampled again."""
    failed_episodes: int
    """Number of times that an episode failed because a tool call timed out. Repeated attempts
    count.
    """
    deaths: int
    """Number of failures of engines."""
    engine_busy_share: float
    """Share of time in which an engine computes, as mean over the engines."""
    prefill_busy_share: float
    """Share of time in which engines of the prefill group compute. 0 without a prefill group."""
    decode_busy_share: float
    """Share of time in which engines of the decode group compute. Without groups, these are all
    engines.
    """
    first_token_s: float
    """Mean seconds from a request to the first token of its reply."""
    first_token_p99_s: float
    """The 99th percentile of the seconds from a request to the first token of its reply."""
    rejects: int
    """Number of times that the engine preferred for a request was full, so that another one was
    tried.
    """
    longest_queue: int
    """Largest number of replies that waited on one engine while it sampled."""
    trainer_busy_share: float
    """Share of the time in which the trainer trains, computes `old_logp` or prepares versions."""
    trainer_wait_share: float
    """Share of time in which the trainer waits for groups. The rest of its idle time is spent
    waiting for engines to load a version.
    """
    old_logps_share: float
    """Share of the time in which the trainer computes old log-probabilities."""
    staleness_histogram: Mapping[int, int]
    """Staleness in versions -> number of trained tokens, over all steps."""
    staleness_bound: int
    episode_s: float
    """Mean duration of an episode in seconds."""
    engine_share: float
    """Share of an episode's time in which it waits for a reply, or for a free engine."""
    tool_share: float
    """Share of an episode's time that is spent in tool calls."""
    ready_s: float
    """Mean seconds from the end of an episode until a step trains on it."""
    waiting: Waiting
    """Shares of time in which trainer and engines wait, from which the bottleneck follows."""
    work: EngineWork
    versions_mean: float = 1.0
    """Mean number of versions of the weights that sampled an episode."""
    reward_wait_s: float = 0.0
    """Mean seconds for which an episode's reward waits for a process."""
    reward_starts: int = 0
    """Number of reward processes that were started."""

    @property
    def steady_s(self) -> tuple[float, ...]:
        """Seconds of the steps after the first `filling` ones."""
        return self.steps_s[self.filling :]

    @property
    def mean_step_s(self) -> float:
        return sum(self.steady_s) / len(self.steady_s)

    @property
    def groups_per_s(self) -> float:
        return self.groups_per_step / self.mean_step_s

    @property
    def staleness_mean(self) -> float:
        tokens = sum(self.staleness_histogram.values())
        total = sum(age * count for age, count in self.staleness_histogram.items())
        return total / max(1, tokens)

    @property
    def staleness_max(self) -> int:
        return max(self.staleness_histogram, default=0)

    @property
    def bottleneck(self) -> str:
        """A sentence that names the bottleneck, followed by advice if options of the schedule can
        help.
        """
        if "schedule." in self.waiting.advice:
            return f"{self.waiting.sentence} {self.waiting.advice}"
        return self.waiting.sentence
