"""Publication of weights that are divided among trainer ranks."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from unstale.cluster.engine_host_weights import PostedStep, WeightPosts
from unstale.cluster.ranks import RankedTrainer
from unstale.cluster.ranks_worker import PublishedPart
from unstale.cluster.weight_objects import read_delta
from unstale.weights.codec import advance, words
from unstale.weights.publish import DirectPublisher, VersionedWeights, WeightReceiver, cast
from unstale.weights.store import Update

FETCH_S = 600.0
"""Longest time to fetch one rank's part of a version."""


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
        answers, objects = self._trainer.call_parts("publish", tuple(live), self._loaded)
        parts: list[PublishedPart] = answers
        weights = self._trainer.policy.weights()
        given = sum(part.words for part in parts)
        wanted = sum(words(tensor).numel() for tensor in weights.values())
        bases = {part.base for part in parts}
        if given != wanted or len(bases) != 1:
            raise RuntimeError(
                f"the trainer ranks published {given} of {wanted} words, as differences from the "
                f"versions {sorted(bases)}"
            )
        self.bytes = sum(part.nbytes for part in parts)
        deltas = [each for each, part in zip(objects, parts, strict=True) if part.words]
        step = PostedStep(bases.pop(), source.version, self.bytes, deltas)
        if self._posts:
            update: Update = self._posts.post_parts(step, weights)
        else:
            self._take(step, weights)
            update = cast(weights, self._dtype)
        self._prepared = update, source.version

    def _take(self, step: PostedStep, weights: Mapping[str, Tensor]) -> None:
        """Turn the weights of the step's base into those of its version, in place."""
        if step.base == -1:
            for tensor in weights.values():
                words(tensor).zero_()
        for delta in step.deltas:
            advance(weights, read_delta(self._trainer.ranks.fetch(delta, FETCH_S)))
