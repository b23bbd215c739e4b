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
"""The keys under which config.json may have the number of experts, depending on the model."""


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer, given a model's config.json. 0 for a dense model."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    return max(int(config.get(name) or 0) for name in _COUNTS)


def pack_experts(experts: Any, num_experts: int, *, routed: Sequence[bool] = ()) -> "Experts":
    """Return expert numbers `[tokens, layers, k]` in uint8 or, for many experts, int16.

    A row (token) with an invalid number, such as -1, is marked as missing. `routed` has a bool for
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
    """Return the number that marks a missing row (a token without a record) in an array."""
    import numpy as np

    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The recorded experts of tokens of an episode, under one version of the weights.

    An engine returns one such record with each reply. `before` is the record of the previous reply
    of the same version. If both have a row for a token, the earlier row is used, unless it is
    missing.
    """

    start: int
    """The position in the episode of the first token that has a row in `experts`."""
    experts: "Experts"
    """`[rows, layers, k]`: for each token and MoE layer, the numbers of the token's k experts."""
    before: "RoutedExperts | None" = None
    covered: int = field(init=False)
    """Number of tokens from the episode's start on that all have a row, here or in earlier
    records.
    """

    def __post_init__(self) -> None:
        count = self.before.covered if self.before else 0
        if self.start <= count < self.stop:
            absent = ~_recorded(self.experts[count - self.start :])
            count += int(absent.argmax()) if absent.any() else len(absent)
        object.__setattr__(self, "covered", count)

    @property
    def stop(self) -> int:
        """The position in the episode after the last token that has a row in `experts`."""
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

        The row of a token without a record is marked as missing.
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
    first: NDArray[np.bool_] = experts[:, 0, 0] != missing(experts.dtype)
    return first


def link(
    routed_experts: RoutedExperts | None, before: RoutedExperts | None, *, stop: int
) -> RoutedExperts | None:
    """Return a reply's routed experts before the token `stop`, linked to an earlier record.

    `before` is the previous record of the same version and episode, or None. If `routed_experts` is
    None, return `before`.
    """
    if routed_experts is None:
        return before
    return RoutedExperts(
        routed_experts.start, routed_experts.experts[: max(0, stop - routed_experts.start)], before
    )


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The routed experts of a batch: which experts each of its tokens used."""

    sequences: tuple[Mapping[int, RoutedExperts], ...]
    """For each sequence, its routed experts by the version of the weights."""
    complete: "Tensor"
    """`[T]` bool: True if all experts on which the token's log-probability depends were
    recorded.
    """

    def select(self, sequences: Sequence[int], index: "Tensor") -> "ExpertTable":
        """Return the table of some sequences, whose tokens are at the positions `index`."""
        return ExpertTable(tuple(self.sequences[i] for i in sequences), self.complete[index])

    def rows(self, batch: "Batch", where: "Tensor") -> "Tensor":
        """Return the experts to replay for each token in a forward pass, `[T, layers, k]`.

        The mask `where` `[T]` has the tokens whose log-probabilities are needed. The row of a token
        is from the version that sampled the next of these in its sequence. Rows without a record
        are marked as missing. If nothing was recorded, `layers` and `k` are 0.
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
    """Return `count` missing rows `[count, layers, k]`, with sizes and dtype of `example`.

    If `example` is None, `layers` and `k` are 0.
    """
    import torch

    if example is None:
        return torch.empty(count, 0, 0, dtype=torch.uint8)
    # Copied, because an array may be in memory that cannot be written.
    kind = torch.from_numpy(example.experts[:0].copy())
    return kind.new_full((count, *kind.shape[1:]), torch.iinfo(kind.dtype).max)
