"""The result of a simulated run, in numbers and in a sentence. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from unstale.observe.words import Waiting


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The work of all engines together, after the steps in which the queue fills up."""

    steps: float
    """Number of decoding steps."""
    sampled: float
    """Number of sampled tokens."""
    prefilled: float
    """Number of context tokens whose keys and values were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of a simulation. Rates and shares leave out the first `filling` steps."""

    steps_s: tuple[float, ...]
    """Seconds of each step, from the loading of one version to that of the next."""
    filling: int
    """Number of steps at the start in which the queue fills up."""
    groups_per_step: int
    trained_tokens: int
    """Number of tokens in the batches after the first `filling` steps."""
    trained_sampled: int
    """Number of sampled tokens in the batches after the first `filling` steps."""
    sampled_tokens: int
    """Number of tokens that engines sampled in the whole run."""
    lost_tokens: int
    """Number of sampled tokens that were lost because engines failed, and were sampled again."""
    failed_episodes: int
    """Number of attempts at episodes that failed because a tool call timed out."""
    deaths: int
    """Number of times that an engine failed."""
    engine_busy_share: float
    """Mean share of the time in which an engine computes."""
    prefill_busy_share: float
    """Share of time in which the engines for prefill are busy. 0 if engines are not divided."""
    decode_busy_share: float
    """Share of time in which the engines for decoding are busy. These are all engines if they are
    not divided into prefill and decode groups.
    """
    first_token_s: float
    """Mean seconds from a request to the first token of its reply."""
    first_token_p99_s: float
    """The 99th percentile of the seconds from a request to the first token of its reply."""
    rejects: int
    """How often an engine would have been chosen for a request but had no free place."""
    longest_queue: int
    """Largest number of replies that waited on one engine while it sampled."""
    trainer_busy_share: float
    """Share of the time in which the trainer trains, computes `old_logp` or prepares versions."""
    trainer_wait_share: float
    """Share of the time in which the trainer waits for groups. When it neither works nor waits for
    groups, it waits until the engines have loaded a version.
    """
    old_logps_share: float
    """Share of the time in which the trainer computes old log-probabilities."""
    staleness_histogram: Mapping[int, int]
    """Number of trained tokens by staleness in versions, over the whole run."""
    staleness_bound: int
    episode_s: float
    """Mean duration of an episode in seconds."""
    engine_share: float
    """Share of an episode's time in which it waits for a reply or for a free engine."""
    tool_share: float
    """Share of an episode's time that is spent in tool calls."""
    ready_s: float
    """Mean seconds from the end of an episode to the step that trains on it."""
    waiting: Waiting
    """Shares of the time that decide which bottleneck a report names."""
    work: EngineWork
    versions_mean: float = 1.0
    """Mean number of versions that sampled an episode."""

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
        """A sentence that names the bottleneck, with advice if options of the schedule can help."""
        if "schedule." in self.waiting.advice:
            return f"{self.waiting.sentence} {self.waiting.advice}"
        return self.waiting.sentence
