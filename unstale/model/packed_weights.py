"""Packed weights: values and scales of a number format, for an engine that rounds weights to it.

A rounded weight is stored as its values, one byte each, and the scales of its blocks. Few values
change from one version to the next, so a difference of packed versions is smaller than one of
bfloat16 weights.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from unstale.model.quantisation import FORMATS, is_quantised

SCALES = ".scales"
"""The suffix that turns the name of a weight into the name of its scales."""


class RoundedWeights(Mapping[str, Tensor]):
    """A mapping from names to weights, each of which is unpacked when it is read."""

    def __init__(self, packed: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> None:
        """Create the mapping from weights that `pack` returned for the format `kind`.

        The unpacked weights have the precision `dtype`.
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
    """Return weights as values and scales of the format `kind`.

    Weights that this format does not round (`is_quantised`) are copied. All weights are converted
    to `dtype` first. Weights that are packed already are returned unchanged.
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
