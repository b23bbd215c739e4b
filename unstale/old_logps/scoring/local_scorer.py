"""The scorer for a model in this process: it computes log-probabilities of given tokens."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from unstale.model.forward import ForwardOptions, Scored
from unstale.model.head import wide
from unstale.model.loading import DTYPES
from unstale.model.lora import Lora
from unstale.model.policy import Placement, Policy
from unstale.model.prefix_tree import Packed
from unstale.model.versions import VersionGaps
from unstale.model.whole_weights import WholeWeights
from unstale.old_logps.scoring.average import Average
from unstale.old_logps.scoring.scorer import MakeStore, Scorer, Weights, WeightStore
from unstale.pictures import PictureStore
from unstale.records import Batch
from unstale.weights.store import VersionStore


def delta_store(scorer: Scorer | None) -> VersionStore | None:
    """Return the `VersionStore` in which a scorer keeps past weights. None if it has none."""
    store = scorer.store if scorer else None
    return store if isinstance(store, VersionStore) else None


class LocalScorer:
    """A scorer for a model in this process: it computes log-probabilities of given tokens.

    Past versions of the weights are loaded into a second model, and moving averages into a third.
    These models exist only if a route or the audit asks for them.
    """

    def __init__(self, policy: Policy, temperature: float, max_tokens: int) -> None:
        """Create a scorer of `policy`.

        Logits are divided by `temperature`, the sampling temperature. A forward pass has at most
        `max_tokens` tokens, unless a single sequence is longer.
        """
        self.policy = policy
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.store: WeightStore | None = None
        self._stored: Policy | None = None
        """The model into which past versions are loaded, one at a time. None if none are kept."""
        self._averaged: Policy | None = None
        """The model into which moving averages of the weights are loaded. None without averages."""
        self._loaded: LocalAverage | None = None
        """The average whose weights `_averaged` has at present. None for no average."""
        self._read: Callable[[int], Policy] | None = None
        """A function that returns a model with the weights of a version, read from disk. None
        except within the context `reading`.
        """
        self._placement: Placement = "twin"
        self._restore_s = 0.0
        self.forward_tokens = 0
        """Number of tokens in forward passes since the last call of `take_forward_tokens`."""

    @classmethod
    def load(cls, exported: Mapping[str, Any]) -> Self:
        """Create a scorer in another process. `exported` is the result of `export`."""
        lora = exported["lora"] and Lora(**exported["lora"])
        policy = Policy.load(
            exported["folder"],
            dtype=exported["dtype"],
            device=exported["device"],
            lora=lora,
            independent_rows=exported["independent_rows"],
            chat_template=exported["chat_template"],
            pictures=exported["pictures"] and PictureStore(Path(exported["pictures"])),
        )
        policy.check_length(exported["checked_length"])  # it may have to compute sequences apart
        if exported["replays_experts"]:
            policy.replay_experts()
        policy.set_forward_options(ForwardOptions(**exported["forward_options"]))
        policy.bias_logits(exported["logit_bias"])
        return cls(policy, exported["temperature"], exported["max_tokens"])

    @property
    def version(self) -> int:
        return self.policy.version

    @property
    def weights_match_version(self) -> bool:
        return self.policy.weights_match_version

    @property
    def version_gaps(self) -> VersionGaps:
        return self.policy.version_gaps

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.policy.dtype)

    @property
    def model_bytes(self) -> int:
        """The size in bytes of this process's model. On a trainer rank, the size of its part."""
        return self.policy.num_bytes

    def lag(self, version: Tensor) -> Tensor:
        return self.policy.lag(version)

    def score(self, batch: Batch | Packed, where: Tensor, version: int | None = None) -> Scored:
        return self._score(self._model(version), batch, where)

    def score_versions(self, batch: Batch, where: Tensor, *, use_trained: bool = False) -> Scored:
        current = self.version if use_trained and self.weights_match_version else None
        logp = torch.zeros(len(batch.tokens), dtype=self.dtype)
        forward_tokens = 0
        versions = set(batch.version[where].tolist())
        order = self._shortest_path(versions - {current})
        for version in [*order, *versions.intersection({current})]:
            of_version = where & (batch.version == version)
            scored = self.score(batch, of_version, None if version == current else version)
            logp = torch.where(of_version, scored.logp, logp)
            forward_tokens += scored.forward_tokens
        return Scored(logp, forward_tokens)

    def keep_versions(
        self, make_store: MakeStore | None = None, *, placement: Placement = "twin"
    ) -> None:
        self._placement = placement
        self._stored = self.policy.twin(placement)
        self.store = (make_store or VersionStore)(self._stored.weights())

    def put(self) -> None:
        self._require_store().put(self.version, self.policy.weights())

    def keep(self, live: Collection[int]) -> None:
        self._require_store().keep(live)

    def begin_put(self, live: Collection[int]) -> None:
        store = self._require_store()
        assert isinstance(store, VersionStore)
        # before the version as well, because dropped ones must not count against the memory limit
        store.begin_keep(live)
        store.begin_put(self.version, self.policy.weights())
        store.begin_keep(live)
        self.policy.lend_weights(store.wait)

    def recover(self, live: Collection[int], weights: Weights) -> None:
        store = self._require_store()
        # first, because a version to be dropped must not count against the memory limit
        store.keep(live)
        for version in sorted(set(live) - set(store.versions)):
            store.put(version, self.policy.parts_of(weights(version)))

    @contextmanager
    def reading(self, weights: Weights) -> Iterator[None]:
        model = self.policy.twin(self._placement)

        @lru_cache(maxsize=1)
        def read(version: int) -> Policy:
            model.load_weights(model.parts_of(weights(version)))
            return model

        self._read = read
        try:
            yield
        finally:
            self._read = None

    def make_average(self, *, placement: Placement = "twin") -> "LocalAverage":
        if placement == "own":
            return HostAverage(self)
        if self._averaged is None:
            self._averaged = self.policy.twin()
        return LocalAverage(self)

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def whole_weights(self) -> WholeWeights:
        return self.policy.whole_weights()

    def export(self, folder: Path | str) -> dict[str, Any]:
        policy = self.policy
        policy.save(folder, base=True)
        return {
            "folder": str(folder),
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == policy.dtype),
            "device": str(policy.device),
            "lora": policy.lora and asdict(policy.lora),
            "forward_options": asdict(policy.passes),
            "checked_length": policy.checked_length,
            "independent_rows": policy.independent_rows,
            "chat_template": policy.tokenizer.chat_template,
            "pictures": str(policy.pictures.store.folder) if policy.pictures else None,
            "replays_experts": policy.replays_experts,
            "logit_bias": policy.logit_bias,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

    def take_forward_tokens(self) -> int:
        forward_tokens, self.forward_tokens = self.forward_tokens, 0
        return forward_tokens

    def costs(self) -> Mapping[str, float]:
        store = self._require_store()
        versions = store.versions  # of a `VersionStore` whose thread is done
        spent = {
            "restore_s": self._restore_s,
            "encode_s": store.encode_s,
            "memory_bytes": float(store.bytes),
            "model_bytes": float(store.movable_bytes),
            "versions": float(len(versions)),
            "bytes_per_version": store.bytes / max(1, len(versions) - 1),
        }
        self._restore_s = store.encode_s = 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        return self._require_store().state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._require_store().restore(state)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def score_average(
        self, average: "LocalAverage", batch: Batch | Packed, where: Tensor
    ) -> Scored:
        """Return the log-probabilities `[T]` of a batch's tokens under an average of weights.

        They are 0 for tokens that are not in the mask `where`.
        """
        if isinstance(average, HostAverage):
            return self._score(self.policy.with_weights(average.tensors), batch, where)
        assert self._averaged is not None
        if self._loaded is not average:
            self._averaged.load_weights(average.tensors)
            self._loaded = average
        return self._score(self._averaged, batch, where)

    def unload(self, average: "LocalAverage") -> None:
        """Note that `average` has changed, so that it is loaded again before its next use."""
        if self._loaded is average:
            self._loaded = None

    def _score(self, model: Policy, batch: Batch | Packed, where: Tensor) -> Scored:
        scored = model.score(
            batch, where, temperature=self.temperature, max_tokens_per_microbatch=self.max_tokens
        )
        self.forward_tokens += scored.forward_tokens
        return scored

    def _model(self, version: int | None) -> Policy:
        """Return a model with the weights of `version`, or with the current weights for None."""
        if version is None:
            return self.policy
        if self._read is not None:
            return self._read(version)
        store = self._require_store()
        assert self._stored is not None
        began = time.perf_counter()
        store.move_to(version)
        self._restore_s += time.perf_counter() - began
        return self._stored

    def _shortest_path(self, versions: Collection[int]) -> list[int]:
        """Sort versions so that loading them one after the other applies the fewest differences.

        The store moves from version to version by differences. So the order is up or down,
        beginning with the end that is nearer to the version that is loaded.
        """
        path = sorted(versions)
        if path and self.store is not None:
            at = self.store.at
            if abs(path[-1] - at) < abs(path[0] - at):
                path.reverse()
        return path

    def _require_store(self) -> WeightStore:
        if self.store is None:
            raise LookupError("this scorer keeps no versions: call keep_versions first")
        return self.store


class LocalAverage(Average):
    """A moving average of the weights of a `LocalScorer`'s policy."""

    def __init__(self, scorer: LocalScorer, *, in_main_memory: bool = False) -> None:
        super().__init__(in_main_memory=in_main_memory)
        self._scorer = scorer

    def update(self, beta: float | None) -> None:
        weights = self._scorer.policy.weights()
        if beta is None:
            self.reset(weights)
        else:
            self.add(weights, beta=beta)
        self._scorer.unload(self)

    def score(self, batch: Batch | Packed, where: Tensor) -> Scored:
        return self._scorer.score_average(self, batch, where)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._scorer.unload(self)


class HostAverage(LocalAverage):
    """A moving average of the weights, kept in main memory instead of in a further model.

    To compute log-probabilities, the average is loaded into the trained model, whose own weights
    are in main memory meanwhile.
    """

    def __init__(self, scorer: LocalScorer) -> None:
        super().__init__(scorer, in_main_memory=True)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if self._scorer.policy.device.type == "cuda":
            self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
