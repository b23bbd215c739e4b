"""Scorers: log-probabilities at the weights of one version, wherever those weights are.

Routes and the audit hold a `Scorer` and no model. `local_scorer.LocalScorer` is the one over a
policy of this process; a sharded trainer brings its own.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unstale.model.forward import Scored
from unstale.model.prefix_tree import Packed
from unstale.model.versions import VersionGaps
from unstale.records import Batch

Weights = Callable[[int], Mapping[str, Tensor]]
"""Reads the forward weights of a past version from disk. LookupError if they were not kept."""


class WeightStore(Protocol):
    """Weights of several versions, and one set of tensors that is loaded with one of them."""

    encode_s: float

    @property
    def versions(self) -> tuple[int, ...]: ...

    @property
    def at(self) -> int:
        """The version that the tensors hold now, or -1."""
        ...

    @property
    def bytes(self) -> int: ...

    @property
    def encoded_bytes(self) -> int: ...

    @property
    def movable_bytes(self) -> int: ...

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def keep(self, live: Collection[int]) -> None:
        """Drop the versions that are not in `live`."""
        ...

    def move_to(self, version: int) -> None:
        """Copy the weights of `version` into the tensors. LookupError if it was dropped."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


MakeStore = Callable[[Mapping[str, Tensor]], WeightStore]
"""Makes a store that loads versions into the given tensors. A sharded scorer makes one a shard."""


class WeightAverage(Protocol):
    """A moving average of the trained weights, and scoring with it (arXiv 2110.00641)."""

    @property
    def weight(self) -> float:
        """The sum of the decayed weights; 0 before the first update."""
        ...

    @property
    def age(self) -> float:
        """The mean age, in updates, of the averaged weights."""
        ...

    @property
    def bytes(self) -> int: ...

    def update(self, beta: float | None) -> None:
        """Add the trained weights with decay `beta`, or start anew from them if it is None."""
        ...

    def score(self, batch: Batch | Packed, where: Tensor) -> Scored:
        """Return log-probabilities `[T]` by the average at `where`, and 0 elsewhere."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Scorer(Protocol):
    """Log-probabilities at the weights of the policy, of its past versions or of averages.

    The weights may be in this process, on several ranks or in another process. A scorer is for one
    consumer: what one route keeps, no other consumer sees. Not thread-safe.
    """

    forward_tokens: int
    """Tokens run forward since the last `take_forward_tokens`. A route that scores in a process of
    its own adds those."""

    @property
    def version(self) -> int:
        """The current version: the number of the weights published last."""
        ...

    @property
    def at_version(self) -> bool:
        """True until the first optimizer step after the publication of `version`."""
        ...

    @property
    def version_gaps(self) -> VersionGaps: ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of log-probabilities: float32, or float64 for a float64 model."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of one forward pass, unless one sequence is longer."""
        ...

    @property
    def model_bytes(self) -> int:
        """Bytes of one copy of the model."""
        ...

    @property
    def store(self) -> WeightStore | None:
        """The store of kept versions. None if there is none, or none in this process."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the staleness of `version`, in batches, for the current version."""
        ...

    def score(self, batch: Batch | Packed, where: Tensor, version: int | None = None) -> Scored:
        """Return log-probabilities `[T]` at `where` (`[T]` bool), and 0 elsewhere.

        They are by the kept weights of `version`, or by the current weights if `version` is None.
        LookupError if the weights of `version` are not kept.
        """
        ...

    def score_versions(self, batch: Batch, where: Tensor, *, use_trained: bool = False) -> Scored:
        """Return the log-probability `[T]` of each token at `where` by its own version's weights.

        These are kept weights. With `use_trained`, tokens of the current version are scored by the
        trained weights until the next optimizer step.
        """
        ...

    def keep_versions(self, make_store: MakeStore | None = None) -> None:
        """Keep weights of past versions from now on. Called at most once.

        They are kept in a `VersionStore`, or in a store from `make_store`.
        """
        ...

    def put(self) -> None:
        """Keep the trained weights as the current version."""
        ...

    def keep(self, live: Collection[int]) -> None:
        """Drop kept versions that are not in `live`. The newest may stay."""
        ...

    def recover(self, live: Collection[int], weights: Weights) -> None:
        """Keep the versions `live`: read from disk those that are missing, and drop all others."""
        ...

    def reading(self, weights: Weights) -> AbstractContextManager[None]:
        """Score versions that are not kept by weights from disk, until the end of the block."""
        ...

    def make_average(self) -> WeightAverage:
        """Return an empty average of the trained weights."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights by name, to be copied before the next optimizer step."""
        ...

    def export(self, folder: Path | str) -> dict[str, Any]:
        """Save the model without adapters.

        Return arguments of `LocalScorer.load`, as JSON types.
        """
        ...

    def take_forward_tokens(self) -> int:
        """Return the tokens run forward since the last call."""
        ...

    def costs(self) -> Mapping[str, float]:
        """Return the costs of kept versions: seconds since the last call, and bytes held."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the kept versions, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
