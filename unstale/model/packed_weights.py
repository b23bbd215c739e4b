"""Packed weights: rounded weights as values and scales of a number format such as FP8.

A packed weight has one byte for each value, and a scale for each block of values. Few values change
from one version of the weights to the next. So the difference of two packed versions is smaller
than the difference of two bfloat16 versions.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from unstale.model.quantisation import FORMATS, is_quantised

SCALES = ".scales"
"""The suffix that turns a weight's name into the name of its scales."""


class RoundedWeights(Mapping[str, Tensor]):
    """A mapping from names to weights that unpacks a weight when it is read."""

    def __init__(self, packed: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> None:
        """Create the mapping from the result of `pack` for the number format `kind`.

        Unpacked weights have the precision `dtype`.
        """
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
    """Return weights as the values and scales of the number format `kind`, by name.

    All weights are converted to `dtype` first. Weights that the format does not round
    (`is_quantised` False) are only copied. If `weights` is packed already, it is returned
    unchanged.
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
