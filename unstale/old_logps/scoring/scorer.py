"""The interface of scorers, which compute log-probabilities under the weights of a given version.

Routes and the audit use a `Scorer`, never a model, so the weights may be in any process.
`local_scorer.LocalScorer` is for a model of this process, with past weights from a `VersionStore`
(`unstale/weights/store.py`). Each trainer rank also has a `LocalScorer` for its part of the model
(`cluster/ranks_worker.py`).
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unstale.model.forward import Scored
from unstale.model.policy import Placement
from unstale.model.prefix_tree import Packed
from unstale.model.versions import VersionGaps
from unstale.model.whole_weights import WholeWeights
from unstale.records import Batch

Weights = Callable[[int], Mapping[str, Tensor]]
"""A function that reads the weights of a past version from disk, by the version's number. It raises
LookupError if they were not kept.
"""


class WeightStore(Protocol):
    """A store of the weights of several versions, which loads one at a time into given tensors."""

    encode_s: float

    @property
    def versions(self) -> tuple[int, ...]: ...

    @property
    def at(self) -> int:
        """The version whose weights the tensors have at present, or -1 if they have none."""
        ...

    @property
    def bytes(self) -> int: ...

    @property
    def movable_bytes(self) -> int: ...

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def keep(self, live: Collection[int]) -> None:
        """Drop the weights of all versions that are not in `live`."""
        ...

    def move_to(self, version: int) -> None:
        """Load the weights of `version` into the tensors.

        Raises LookupError if the store does not have this version.
        """
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


MakeStore = Callable[[Mapping[str, Tensor]], WeightStore]
"""A function that creates a store of weights. The store loads versions into the given tensors. A
scorer on several devices calls the function once for each part of the model.
"""


class WeightAverage(Protocol):
    """A moving average of the trainer's weights, under which log-probabilities can be computed.

    See arXiv 2110.00641.
    """

    @property
    def weight(self) -> float:
        """The sum of the weights of all updates, which decay with age. 0 before the first."""
        ...

    @property
    def age(self) -> float:
        """The mean age of the averaged weights, counted in updates."""
        ...

    @property
    def bytes(self) -> int: ...

    def update(self, beta: float | None) -> None:
        """Update the average with the trainer's weights and the decay `beta`.

        If `beta` is None, set the average to the trainer's weights.
        """
        ...

    def score(self, batch: Batch | Packed, where: Tensor) -> Scored:
        """Return the log-probabilities `[T]` of the tokens of `batch` under the averaged weights.

        They are 0 for tokens that are not in the mask `where`.
        """
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Scorer(Protocol):
    """An object that computes log-probabilities under current weights, past versions, or averages.

    The weights may be in this process, on several devices or in another process. Each route, and
    the audit, needs a separate scorer, because a scorer has only one set of kept versions. Not
    thread-safe.
    """

    forward_tokens: int
    """Number of tokens in forward passes since the last call of `take_forward_tokens`. A route that
    computes log-probabilities in another process adds the number for that process.
    """

    @property
    def version(self) -> int:
        """The number of the version that was published last. Between a training step and the next
        publication: of the version that is published next.
        """
        ...

    @property
    def weights_match_version(self) -> bool:
        """True while the trainer has the weights of `version`.

        The next optimizer step makes it False.
        """
        ...

    @property
    def version_gaps(self) -> VersionGaps: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the log-probabilities: float64 for a float64 model, otherwise float32."""
        ...

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens in a forward pass. A single sequence may exceed it."""
        ...

    @property
    def model_bytes(self) -> int:
        """The size of one copy of the model in bytes."""
        ...

    @property
    def store(self) -> WeightStore | None:
        """The store of past versions. None if none are kept, or if they are in another process."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the number of batches trained on since each token was sampled by its `version`."""
        ...

    def score(self, batch: Batch | Packed, where: Tensor, version: int | None = None) -> Scored:
        """Return log-probabilities `[T]` of the tokens in the mask `where`, and 0 for other tokens.

        They are computed with the kept weights of `version`, or with the current weights for None.
        Raises LookupError if the weights of `version` were not kept.
        """
        ...

    def score_versions(self, batch: Batch, where: Tensor, *, use_trained: bool = False) -> Scored:
        """Return log-probabilities `[T]` of tokens, each under the version that sampled it.

        Only the tokens in the mask `where` are computed. The weights come from the store of past
        versions. With `use_trained`, the trainer's model computes the values of tokens of the
        current version, as long as no optimizer step has changed it.
        """
        ...

    def keep_versions(
        self, make_store: MakeStore | None = None, *, placement: Placement = "twin"
    ) -> None:
        """Keep the weights of past versions from this call on. Must not be called twice.

        The weights are kept in a `VersionStore`, or in the store that `make_store` returns. To
        compute log-probabilities, they are loaded into a second model, or with `placement` "own"
        into the trained model.
        """
        ...

    def put(self) -> None:
        """Keep a copy of the trainer's weights as the weights of the current version."""
        ...

    def keep(self, live: Collection[int]) -> None:
        """Drop kept versions that are not in `live`, except possibly the newest."""
        ...

    def begin_put(self, live: Collection[int]) -> None:
        """Start a thread that keeps the current weights, and drops versions that are not in `live`.

        The scorer must use a `VersionStore`. The next use of kept versions, and the next change of
        the weights, waits for the thread and raises its error.
        """
        ...

    def recover(self, live: Collection[int], weights: Weights) -> None:
        """Keep exactly the versions `live`, and drop others.

        If a version of `live` is not kept yet, its weights are read from disk, by `weights`.
        """
        ...

    def reading(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context in which `score` gets past versions from disk, read by `weights`."""
        ...

    def make_average(self, *, placement: Placement = "twin") -> WeightAverage:
        """Return an empty moving average of the trainer's weights.

        To compute log-probabilities, it is loaded into a further model. With `placement` "own", it
        is in main memory and is loaded into the trained model.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trainer's weights by name. The next optimizer step changes these tensors."""
        ...

    def whole_weights(self) -> WholeWeights:
        """Return the trainer's weights. Sharded ones are gathered from all ranks when read."""
        ...

    def export(self, folder: Path | str) -> dict[str, Any]:
        """Save the model in a folder, for a scorer in another process. LoRA adapters are left out.

        Return the argument of `LocalScorer.load` for that process, in JSON types.
        """
        ...

    def take_forward_tokens(self) -> int:
        """Return the number of tokens in forward passes since the last call."""
        ...

    def costs(self) -> Mapping[str, float]:
        """Return metrics of keeping past versions.

        Seconds are counted since the last call. Bytes are those in use at the time of the call.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the kept past versions of the weights, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
