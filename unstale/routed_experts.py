"""Routed experts: which experts of an MoE model each token used, as the engine recorded them.

A row has the experts of one token in every MoE layer. It belongs to one version of the weights:
after a weight update the engine computes the context again, and may choose other experts for it.
Training uses the recorded experts (R3, arXiv 2510.11370).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environments and the command line import records without torch and numpy
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from unstale.records import Batch

    Experts = NDArray[np.uint8] | NDArray[np.int16]
    """Expert indices `[rows, layers, k]` in the smaller dtype that holds them. A row filled with
    the dtype's largest value is missing: it was not recorded.
    """


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The keys for the number of experts in the config.json of different models."""


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer, from a model's config.json. 0 for a dense model."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    return max(int(config.get(name) or 0) for name in _COUNTS)


def pack_experts(experts: Any, num_experts: int, *, routed: Sequence[bool] = ()) -> "Experts":
    """Return expert numbers `[tokens, layers, k]` in uint8 or, for many experts, int16.

    A row (token) with an invalid number, such as -1, becomes a missing row. `routed` has a bool for
    each layer of the model: True if it has a router. If the array has all layers of the model, the
    numbers of layers without a router become 0. Raises ValueError for an array of another shape.
    """
    import numpy as np

    experts = np.asarray(experts)
    if experts.ndim != 3 or 0 in experts.shape[1:]:
        raise ValueError(f"routed experts must be [tokens, layers, k], got {list(experts.shape)}")
    if len(routed) == experts.shape[1]:
        experts = np.where(np.array(routed)[:, None], experts, 0)
    dtype = np.uint8 if num_experts < missing(np.uint8) else np.int16
    absent = ((experts < 0) | (experts >= num_experts)).any((1, 2))
    packed: Experts = experts.astype(dtype)
    packed[absent] = missing(dtype)
    return packed


def missing(dtype: Any) -> int:
    """Return the number that marks a missing row in an array of this dtype."""
    import numpy as np

    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The routed experts that one version of the weights computed for tokens of an episode.

    An engine returns one such record with each reply. `before` is the record of the previous reply
    of the same version. For a token with a row in both, the earlier record is used, unless its row
    is missing.
    """

    start: int
    """The position in the episode of the first token with a row in `experts`."""
    experts: "Experts"
    """`[rows, layers, k]`: the numbers of the k experts of each token in each MoE layer."""
    before: "RoutedExperts | None" = None
    covered: int = field(init=False)
    """Number of tokens, from the episode's first on, that all have a row here or in `before`."""

    def __post_init__(self) -> None:
        count = self.before.covered if self.before else 0
        if self.start <= count < self.stop:
            absent = ~_recorded(self.experts[count - self.start :])
            count += int(absent.argmax()) if absent.any() else len(absent)
        object.__setattr__(self, "covered", count)

    @property
    def stop(self) -> int:
        """The position in the episode after the last token of `experts`."""
        return self.start + len(self.experts)

    def chain(self) -> "list[RoutedExperts]":
        """Return the earlier records and this one, earliest first."""
        records: list[RoutedExperts] = []
        record: RoutedExperts | None = self
        while record is not None:
            records.append(record)
            record = record.before
        return records[::-1]

    def rows(self, count: int) -> "Experts":
        """Return the rows of the episode's first `count` tokens, `[count, layers, k]`.

        A token without a recorded row has a missing row.
        """
        import numpy as np

        rows: Experts = np.full(
            (count, *self.experts.shape[1:]), missing(self.experts.dtype), self.experts.dtype
        )
        for record in reversed(self.chain()):
            kept = record.experts[: max(0, count - record.start)]
            np.copyto(
                rows[record.start : record.start + len(kept)],
                kept,
                where=_recorded(kept)[:, None, None],
            )
        return rows


def _recorded(experts: "Experts") -> "NDArray[np.bool_]":
    """Return `[rows]` bool: True for the rows that are not missing."""
    first: NDArray[np.bool_] = experts[:, 0, 0] != missing(experts.dtype)
    return first


def link(
    routed_experts: RoutedExperts | None, before: RoutedExperts | None, *, stop: int
) -> RoutedExperts | None:
    """Return a reply's routed experts, cut before token `stop`, with `before` as earlier record.

    `before` is the earlier record of the same version and episode, or None. It is returned if the
    reply has no routed experts.
    """
    if routed_experts is None:
        return before
    return RoutedExperts(
        routed_experts.start, routed_experts.experts[: max(0, stop - routed_experts.start)], before
    )


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The routed experts of a batch: which experts each token used."""

    sequences: tuple[Mapping[int, RoutedExperts], ...]
    """For each sequence, the routed experts by version of the weights."""
    complete: "Tensor"
    """`[T]` bool: True if every row on which the token's log-probability depends was recorded."""

    def select(self, sequences: Sequence[int], index: "Tensor") -> "ExpertTable":
        """Return the table of some sequences. `index` has their tokens' positions in the batch."""
        return ExpertTable(tuple(self.sequences[i] for i in sequences), self.complete[index])

    def rows(self, batch: "Batch", where: "Tensor") -> "Tensor":
        """Return a row for each token, `[T, layers, k]`, for a forward pass that scores tokens.

        `where` `[T]` bool is True for the tokens to score. A token's row is of the version that
        sampled the next scored token in its sequence. So if one version sampled all scored tokens,
        all rows are of that version. Tokens without a record have a missing row. Without any record
        `layers` and `k` are 0.
        """
        import torch

        records = (
            routed_experts for versions in self.sequences for routed_experts in versions.values()
        )
        rows = no_rows(next(records, None), len(batch.tokens))
        for versions, (start, end) in zip(self.sequences, batch.spans(), strict=True):
            wanted = where[start:end].nonzero().squeeze(1)
            following = torch.searchsorted(wanted, torch.arange(end - start), right=True)
            # -1: no token of `where` follows.
            version_of = torch.cat([batch.version[start:end][wanted], torch.tensor([-1])])
            version = version_of[following]
            for number in version.unique().tolist():
                if number in versions:
                    chosen = version == number
                    recorded = torch.from_numpy(versions[number].rows(end - start))
                    rows[start:end][chosen] = recorded[chosen]
        return rows


def no_rows(example: RoutedExperts | None, count: int) -> "Tensor":
    """Return `count` missing rows, `[count, layers, k]`, with the sizes and dtype of a record.

    If `example` is None, `layers` and `k` are 0.
    """
    import torch

    if example is None:
        return torch.empty(count, 0, 0, dtype=torch.uint8)
    # Copied, because an array may be in memory that cannot be written.
    kind = torch.from_numpy(example.experts[:0].copy())
    return kind.new_full((count, *kind.shape[1:]), torch.iinfo(kind.dtype).max)
