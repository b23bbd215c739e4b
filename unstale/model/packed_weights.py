"""Weights in the bytes of a number format, in which they are sent to an engine that rounds.

A rounded weight is stored as its values, a byte each, and the scales of its blocks. Between two
versions few values change, so their differences are smaller than those of bfloat16 words.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from unstale.model.quantisation import FORMATS, is_quantised

SCALES = ".scales"
"""Added to the name of a weight in the name of its scales."""


class RoundedWeights(Mapping[str, Tensor]):
    """Weights that are already rounded, as a mapping. Each is computed when it is read."""

    def __init__(self, packed: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> None:
        """Use weights that `pack` returned for the format `kind`, in the precision `dtype`."""
        self._packed = packed
        self._format = FORMATS[kind]
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        scales = self._packed.get(name + SCALES)
        if scales is None:
            return self._packed[name].to(self._dtype)
        return self._format.unpack(self._packed[name], scales, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._packed if not name.endswith(SCALES))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def pack(weights: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights as values and scales of the format `kind`, if the engine rounds them.

    The others are copied. All are converted to `dtype` first. Weights that are packed already are
    returned unchanged.
    """
    if any(name.endswith(SCALES) for name in weights):
        return dict(weights)
    packed = {}
    for name, weight in weights.items():
        if is_quantised(name, weight) and weight.numel():
            rounded = weight.detach().to(dtype)
            packed[name], packed[name + SCALES] = FORMATS[kind].pack(rounded)
        else:
            packed[name] = weight.detach().to(dtype, copy=True)
    return packed
