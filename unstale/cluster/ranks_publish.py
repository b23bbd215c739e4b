"""Publication of weights that are divided among trainer ranks."""

from collections.abc import Collection

import torch

from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.weights.publish import DirectPublisher, VersionedWeights, WeightReceiver, cast
from unstale.weights.store import Update


class RankedPublisher(DirectPublisher):
    """A publisher of weights of which each trainer rank has its part.

    Each rank writes its part of a version to disk, as the difference from the version before, and
    returns it as an object in Ray's store. Engine hosts fetch these objects from `posts`. Without
    engine hosts, they change the driver's copy of the weights, which engines of this machine load
    in the precision `dtype`. No rank gathers whole weights for it.
    """

    def __init__(
        self,
        engine: WeightReceiver,
        trainer: RankedTrainer,
        *,
        dtype: torch.dtype,
        posts: WeightPosts | None = None,
    ) -> None:
        super().__init__(engine, dtype=dtype)
        self._trainer = trainer
        self._posts = posts

    def prepare(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        weights = self._trainer.policy.weights()
        step = self._trainer.post("publish", tuple(live), self._loaded)
        self.bytes = step.nbytes
        if self._posts:
            update: Update = self._posts.post_parts(step, weights)
        else:
            self._trainer.advance(weights, step)
            update = cast(weights, self._dtype)
        self._prepared = update, source.version
