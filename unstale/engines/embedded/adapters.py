"""LoRA adapters of several versions on one base model, for forward passes of the embedded engine.

The output of a layer is `W0 x + s B (A x)`, computed as PEFT computes it in the trainer: each of
the two products and their sum is rounded. The adapters of all versions are stacked, so that each
product is one matrix product. After the first product, a token's numbers for all versions but its
own are set to 0.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from unstale.model.lora import pairs_of, require_fit


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The adapters A and B of a layer, stacked for V versions of rank r: each `[V * r, width]`."""

    a: Tensor
    b: Tensor
    """The transposed matrices B. Transposed, the rows of one version are adjacent."""


class VersionedAdapters:
    """LoRA adapters of several versions, added by hooks to the outputs of a model's linear layers.

    Call `begin` before each forward pass. Before the first `add`, passes use only the base weights.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, scale: float) -> None:
        """Add hooks to the linear layers of `model`.

        `scale` is alpha / rank. Adapters are rounded to `dtype`.
        """
        self._linears = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self._dtype = dtype
        self._scale = scale
        self._held: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        """The adapters of each version, by layer name: the matrix A `[r, in]` and the transposed
        matrix B `[r, out]`.
        """
        self._hooked: set[str] = set()
        self._stacked: tuple[int, ...] = ()
        """The versions whose matrices are stacked in `_layers`. Only `keep` removes one, because
        any later pass may have tokens of it.
        """
        self._layers: dict[str, _Stacked] = {}
        self._rows = slice(0)
        """The slice of the rows of the stacked matrices in `_layers` that the current forward pass
        uses: the rows of one version, or all if the pass has tokens of several versions.
        """
        self._foreign: Tensor | None = None
        """`[T, V * r]` for T tokens and V versions of rank r: True where a row of the stacked
        matrices belongs to another version than the token. None if all tokens of the pass have the
        same version.
        """

    def add(self, version: int, adapters: Mapping[str, Tensor]) -> None:
        """Add a copy of the adapters of `version`.

        Raises ValueError, and changes nothing, if names or shapes do not fit the model, or if the
        adapters belong to other layers than those of earlier versions.
        """
        pairs = pairs_of(adapters)
        for name, pair in pairs.items():
            linear = self._linears.get(name)
            shape = None if linear is None else (linear.out_features, linear.in_features)
            require_fit(name, pair, shape)
        if self._hooked and self._hooked != pairs.keys():
            other = sorted(self._hooked ^ pairs.keys())
            raise ValueError(f"version {version} has adapters of other layers: {other[:4]}")
        for name in pairs.keys() - self._hooked:
            self._linears[name].register_forward_hook(partial(self._adapted, name))
        self._hooked = {*pairs}
        self._held[version] = {
            name: (self._own(a), self._own(b.t())) for name, (a, b) in pairs.items()
        }
        if version in self._stacked:
            self._stack(self._stacked)

    def keep(self, versions: Collection[int]) -> None:
        """Drop the adapters of all versions that are not in `versions`."""
        self._held = {each: held for each, held in self._held.items() if each in versions}
        self._stack([each for each in self._stacked if each in self._held])

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(self._held)

    def begin(self, versions: Tensor) -> None:
        """Set the version of each token of the next forward pass, `[T]`.

        Raises LookupError for a version that was never added, or was dropped.
        """
        used = versions.unique().tolist()
        if missing := set(used) - self._held.keys():
            raise LookupError(f"the adapters of {sorted(missing)} are not held")
        if not set(used) <= set(self._stacked):
            self._stack(sorted({*self._stacked, *used}))
        rank = len(next(iter(self._held[used[0]].values()))[0])
        if len(used) == 1:
            first = self._stacked.index(used[0]) * rank
            self._rows, self._foreign = slice(first, first + rank), None
            return
        self._rows = slice(0, len(self._stacked) * rank)
        is_own = versions[:, None] == torch.tensor(self._stacked)
        self._foreign = ~is_own.repeat_interleave(rank, 1)

    def _own(self, matrix: Tensor) -> Tensor:
        return matrix.to("cpu", self._dtype, copy=True).contiguous()

    def _stack(self, versions: Collection[int]) -> None:
        self._stacked = tuple(versions)
        held = [self._held[version] for version in self._stacked]
        self._layers = {
            name: _Stacked(*(torch.cat([each[name][part] for each in held]) for part in (0, 1)))
            for name in (self._hooked if held else ())
        }

    def _adapted(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layer = self._layers[name]
        x = inputs[0].flatten(0, -2)
        inner = x @ layer.a[self._rows].t()
        if self._foreign is not None:
            inner.masked_fill_(self._foreign, 0)
        output.view(len(x), -1).add_((inner @ layer.b[self._rows]).mul_(self._scale))
