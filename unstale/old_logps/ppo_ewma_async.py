"""The route `ppo_ewma_async`: compute `old_logp` with moving averages of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from unstale.config.checks import ConfigError, PositiveInt, Range, Share
from unstale.config.routes import (
    HasPlacement,
    Meaning,
    Needs,
    OldLogpsConfig,
    RouteDocs,
    age_of_average,
    meaning_of_average,
)
from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch

BETA_MAX = 0.95
"""Largest decay of a moving average. The mean age of the averaged weights is then 19 versions."""


class PpoEwmaAsync(OldLogps):
    """A method that computes `old_logp` with moving averages of weights about as old as the tokens.

    No `old_logp` counts as exact (arXiv 2605.12070). A version's weights are added to an average
    when the first batch after its publication is scored. The lag of a token is the number of
    batches trained on since it was sampled. The decay of an average is chosen so that its age comes
    closest to the mean lag of the sampled tokens. This mean also counts earlier batches
    (`lag_memory`), so that one batch of fresh tokens does not remove all older weights from the
    average. The option `beta` sets a fixed decay instead.

    With several averages, the tokens are sorted by lag and divided into equal parts, one for each
    average. A token is scored by the average whose age is nearest to its lag.

    All averages are set to the current weights if the correction keeps too few tokens in several
    batches in a row (`reset_below`, `reset_patience`, `reset_cooldown`).
    """

    needs = Needs(resident_models=1, averages=1, forwards="one")

    def __init__(self, scorer: Scorer, options: PpoEwmaAsyncSpec) -> None:
        self.needs = options.needs
        self.averages = [
            scorer.make_average(placement=options.placement) for _ in range(options.averages)
        ]
        self._scorer = scorer
        self._options = options
        self._targets: list[float] = []
        """The age, in batches, that each average should have. Empty before the first batch."""
        self._version: int | None = None
        self._judged: int | None = None
        """The version of the last batch for which `trained` recorded the share of kept tokens. None
        before the first.
        """
        self._low: list[float] = []
        """The shares of kept tokens in the last batches in a row that were below `reset_below`."""
        self._since_reset = options.reset_cooldown
        self._due = ""
        """The reason for resetting the averages at the next batch. "" for no reset."""
        self._events: list[dict[str, Any]] = []

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        from unstale.algorithms.proximal import nearest_age

        if self._version != self._scorer.version:
            self._update(batch)
        lag = self._scorer.lag(batch.version)
        choice = nearest_age(lag, [average.age for average in self.averages])
        values = batch.behavior_logp.new_zeros(len(batch.tokens))
        for number, average in enumerate(self.averages):
            where = batch.sampled & (choice == number)
            if where.any():
                values = average.score(batch, where).logp.where(where, values)
        return values, batch.sampled & False

    def _update(self, batch: Batch) -> None:
        """Add the weights of the current version to the averages, before a step changes them."""
        from unstale.algorithms.proximal import beta_for_age

        if not self._scorer.weights_match_version:
            raise RuntimeError(
                f"version {self._scorer.version} is gone: "
                "its first batch was not scored before a step"
            )
        self._version = self._scorer.version
        lags = staleness_targets(self._scorer.lag(batch.version[batch.sampled]), len(self.averages))
        memory = self._options.lag_memory
        self._targets = [
            memory * earlier + (1 - memory) * lag
            for earlier, lag in zip(self._targets or lags, lags, strict=True)
        ]
        for average, target in zip(self.averages, self._targets, strict=True):
            if self._due or not average.weight:
                average.update(None)
                continue
            beta = self._options.beta
            if beta is None:
                beta = beta_for_age(average.weight, average.age, target=target, beta_max=BETA_MAX)
            average.update(beta)
        if self._due:
            self._events.append(
                {"kind": "ewma_reset", "version": self._version, "reason": self._due}
            )
            self._due = ""
            self._since_reset = 0

    def trained(self, kept: float) -> None:
        """Record the share of a batch's tokens that the correction kept, to decide on a reset.

        A batch is recorded once, even if it has several optimizer steps.
        """
        if self._judged == self._version:
            return
        self._judged = self._version
        self._since_reset += 1
        below, patience = self._options.reset_below, self._options.reset_patience
        self._low = [*self._low, kept] if kept < below else []
        if len(self._low) >= patience and self._since_reset >= self._options.reset_cooldown:
            shares = ", ".join(f"{share:.3f}" for share in self._low[-patience:])
            self._due = f"the discrepancy control kept {shares} of the tokens, under {below:g}"
            self._low = []

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "memory_bytes": float(sum(average.bytes for average in self.averages)),
            "ewma_age": self.averages[0].age,
        }
        spent |= {
            f"ewma_age_{number}": average.age
            for number, average in enumerate(self.averages)
            if number
        }
        return spent

    def events(self) -> list[dict[str, Any]]:
        happened, self._events = self._events, []
        return happened

    def state(self) -> Mapping[str, Any]:
        return {
            "averages": [average.state() for average in self.averages],
            "targets": list(self._targets),
            "version": self._version,
            "judged": self._judged,
            "low": list(self._low),
            "since_reset": self._since_reset,
            "due": self._due,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for average, held in zip(self.averages, state["averages"], strict=True):
            average.restore(held)
        self._targets = list(state["targets"])
        self._version = state["version"]
        self._judged = state["judged"]
        self._low = list(state["low"])
        self._since_reset = state["since_reset"]
        self._due = state["due"]


def staleness_targets(lag: Tensor, number: int) -> list[float]:
    """Divide tokens into `number` equal parts by their lag. Return the mean lag of each part.

    The lag is the number of batches trained on since the token was sampled. The part with the
    smallest lags comes first. If there are no tokens, every mean is 0.

    >>> import torch
    >>> staleness_targets(torch.tensor([3, 0, 1, 2]), 2)
    [0.5, 2.5]
    """
    if not len(lag):
        return [0.0] * number
    shares = lag.sort().values.float().tensor_split(number)
    return [float(share.mean()) if len(share) else float(lag.max()) for share in shares]


@dataclass(frozen=True, kw_only=True)
class PpoEwmaAsyncSpec(HasPlacement, OldLogpsConfig):
    """Options of the route `ppo_ewma_async`, whose averaged weights are about as old as tokens."""

    route: str = "ppo_ewma_async"
    makes: ClassVar[type[OldLogps]] = PpoEwmaAsync
    beta: Annotated[float | None, Range(0, 0.9999)] = None
    """Decay of the moving average. None means 0.5 for `ewma_prox`. For `ppo_ewma_async` it means a
    decay that follows the age of the tokens (their staleness).
    """
    averages: PositiveInt = 1
    """Only for `ppo_ewma_async`: number of moving averages of the weights. Each has another mean
    age of its weights. `old_logp` of a token is computed with the average whose age is nearest to
    the token's lag (the batches trained on since it was sampled).
    """
    lag_memory: Annotated[float, Range(0, 0.99)] = 0.8
    """Only for `ppo_ewma_async`: weight of the earlier batches in the mean age of tokens (lag) that
    the average follows; 0 uses only the current batch.
    """
    reset_below: Share = 0.0
    """Only for `ppo_ewma_async`: reset the averages to the current weights if the correction keeps
    a smaller share of tokens than this; 0 never resets.
    """
    reset_patience: PositiveInt = 3
    """Only for `ppo_ewma_async`: number of batches in a row below `reset_below` before a reset."""
    reset_cooldown: PositiveInt = 10
    """Only for `ppo_ewma_async`: smallest number of batches between two resets of the averages."""

    fixed: ClassVar = {"averages": "the checkpoint holds so many averages"}
    recipe: ClassVar = {"reset_below": 0.5}
    docs: ClassVar = RouteDocs(
        policy="averages of the weights, about as old as the data",
        exact="no",
        holds="one float32 copy per average, one scoring copy",
        costs="one forward pass; more with several averages",
        choose="if a copy of the weights is affordable and versions are not",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta is not None and self.averages > 1:
            raise ConfigError(
                "old_logps.averages must be 1 with a fixed old_logps.beta: "
                "all averages would have the same age"
            )

    @property
    def needs(self) -> Needs:
        # The lag of the whole batch decides the decay, unless it is fixed.
        return replace(super().needs, averages=self.averages, whole_batch=self.beta is None)

    @property
    def decay(self) -> float | None:
        return self.beta

    @property
    def resets(self) -> bool:
        return self.reset_below > 0

    def meaning(self, run: RunConfig) -> Meaning:
        age = "follows the mean lag of recent batches"
        if self.beta is not None:
            age = f"tends to {age_of_average(self, run):.2g}"
        return meaning_of_average(run, age=age, averages=self.averages, placement=self.placement)

    def variants(self, alphas: Sequence[float]) -> list[OldLogpsConfig]:
        return [type(self)(averages=2)]

    def make(self, scorer: Scorer, *, lockstep: bool) -> PpoEwmaAsync:
        return PpoEwmaAsync(scorer, self)
