"""Publication of weights that are divided among trainer ranks."""

from collections.abc import Collection
from functools import partial

import torch

from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.weights.publish import (
    DeltaInParts,
    DirectPublisher,
    KeepVersions,
    VersionedWeights,
    WeightReceiver,
    cast,
)
from unstale.weights.store import Update


class RankedPublisher(DirectPublisher):
    """A publisher of weights that are divided among trainer ranks.

    Each rank writes its part of a version to disk, as the difference from the version before, and
    puts it into Ray's store. Engine hosts fetch these objects from `posts`. Without engine hosts,
    an engine that takes deltas applies them to the weights that it has. For any other engine, the
    deltas are applied to the weights in the run's main process, and the engine loads these in the
    precision `dtype`. No rank gathers whole weights.
    """

    def __init__(
        self,
        engine: WeightReceiver,
        trainer: RankedTrainer,
        *,
        dtype: torch.dtype,
        posts: WeightPosts | None = None,
        keep_versions: KeepVersions | None = None,
    ) -> None:
        super().__init__(engine, dtype=dtype, keep_versions=keep_versions)
        self._trainer = trainer
        self._posts = posts

    def begin(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        """Prepare the publication of the ranks' current weights, whose version `source` has.

        `live` are older versions that must be kept. Only the trainer's thread may call this,
        because it calls the ranks.
        """
        weights = self._trainer.policy.weights()
        step = self._trainer.post("publish", tuple(live), self._loaded)
        self.bytes = step.nbytes
        if self._posts:
            update: Update = self._posts.post_parts(step, weights)
        elif self._engine.takes_deltas and step.base == self._loaded >= 0:
            read = partial(self._trainer.parts, step)
            update = DeltaInParts(step.base, step.version, "", {}, read=read)
        else:
            self._trainer.advance(weights, step)
            update = cast(weights, self._dtype)
        self._prepared = update, source.version
