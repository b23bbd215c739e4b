"""The interface between the scheduler of requests and the model: forward passes with a KV cache."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from unstale.engines.embedded.adapters import VersionedAdapters
from unstale.model.packed_weights import RoundedWeights
from unstale.model.quantisation import quantised

if TYPE_CHECKING:
    from unstale.engines.embedded.pages import PagedCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt: the tokens `start` to `end` - 1 of the sequence in `slot`.

    All tokens before `start` must be in the cache. A slot is the part of the cache that holds one
    sequence.
    """

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one forward pass: R rows, then C chunks, with a total of T tokens.

    A row is the newest token of a sequence that is being sampled. A chunk is a part of a prompt.
    """

    rows: Tensor
    """`[R]`: the slot of each row. A slot is the part of the cache that holds one sequence."""
    chunks: tuple[Chunk, ...]
    tokens: Tensor
    """`[T]`: the token ids, first those of rows, then those of chunks."""
    positions: Tensor
    """`[T]`: the position of each token in its sequence."""
    versions: Tensor | None = None
    """`[T]`: the version of the LoRA adapters for each token. None without adapters."""

    @property
    def longest(self) -> int:
        """The length of the longest sequence that has a row, the row included. 0 without rows."""
        return int(self.positions[: len(self.rows)].max()) + 1 if len(self.rows) else 0

    def spans(self) -> list[tuple[Chunk, slice]]:
        """Return each chunk, with the slice of `tokens` that has its tokens."""
        spans = []
        start = len(self.rows)
        for chunk in self.chunks:
            end = start + chunk.end - chunk.start
            spans.append((chunk, slice(start, end)))
            start = end
        return spans


class Runner(Protocol):
    """A model with a KV cache, which computes forward passes for the embedded engine.

    A slot is the part of the cache that holds one sequence.
    """

    name: str
    """Name of the code that computes the model, such as "qwen3 decoder", for messages."""
    warning: str
    """A message to the user with the reason why decoding is slow. Empty if it is fast."""
    vocab_size: int
    keeps_beginnings: bool
    """True if the cache of a sequence can be cut to any of its beginnings. False with recurrent
    layers, which have only the state after the last token: then `keep` receives 0 or all cached
    tokens, and `copy_prefix` is not called.
    """

    @property
    def cache(self) -> "PagedCache | None":
        """The keys and values of all slots. None if they are not in pages."""
        ...

    @property
    def adapters(self) -> VersionedAdapters | None:
        """The LoRA adapters added to the outputs of layers. None if updates have full weights."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Compute a forward pass, and add the keys and values of its T tokens to the cache.

        Return float32 logits, `[R + C, V]`, for the R rows and C chunks of `step`. The first R are
        those of the token that follows each row. The other C are those of the token that follows
        each chunk.
        """
        ...

    def keep(self, slot: int, count: int) -> None:
        """Keep the first `count` cached tokens of `slot`. Memory of later ones may be freed."""
        ...

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` cached tokens from slot `source` to slot `target`."""
        ...

    def load(self, update: Mapping[str, Tensor]) -> None:
        """Load weights. Raises ValueError, and changes nothing, if names or shapes do not fit."""
        ...

    def take_experts(self) -> Tensor:
        """Return the k experts that the last forward pass chose for each token, `[T, layers, k]`.

        If the runner records experts, the caller must call this after each pass.
        """
        ...


def warning_with_gpu(architecture: str) -> str:
    """Return a warning that models of this architecture run on the CPU although there is a GPU.

    Return "" if there is no GPU.
    """
    if not torch.cuda.is_available():
        return ""
    return (
        f"the engine decodes {architecture} on the CPU: on a GPU it decodes only Qwen3. Use a "
        "server of vLLM or SGLang"
    )


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return the names of tied weights, each with the parameter whose memory it shares."""
    parameters = dict(model.named_parameters())
    names = {parameter.data_ptr(): name for name, parameter in parameters.items()}
    return {
        alias: names[tensor.data_ptr()]
        for alias, tensor in model.state_dict().items()
        if alias not in parameters and tensor.data_ptr() in names
    }


class ModelWeights:
    """The names and shapes of a model's parameters and buffers, by which `take` checks updates.

    Create it before a runner changes the shapes of the model's parameters. `quantise` is the number
    format to which weights are rounded (`unstale.model.quantisation`). Updates leave out the
    parameters that are named in `frozen`.
    """

    def __init__(self, model: nn.Module, quantise: str, frozen: Collection[str] = ()) -> None:
        saved = model.state_dict().keys()
        self._quantise = quantise
        self._parameters = {
            name: parameter for name, parameter in model.named_parameters() if name not in frozen
        }
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._tied = tied_parameters(model)
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}

    def take(self, update: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Copy the buffers of an update into the model. Yield its parameters.

        For each parameter, yield its name, the parameter, and the new value, rounded to `quantise`.
        An update may leave out buffers. Raises ValueError, and changes nothing, if names or shapes
        do not fit.
        """
        buffers = self._buffers.keys() & update.keys()
        shapes = self._shapes | {name: self._buffers[name].shape for name in buffers}
        check_update(update, shapes, self._tied)
        kind = "none" if isinstance(update, RoundedWeights) else self._quantise
        for name in buffers:
            self._buffers[name].copy_(update[name])
        for name, parameter in self._parameters.items():
            value = update[name].to(parameter.device, parameter.dtype)
            yield name, parameter, quantised(name, value, kind)


def check_update(
    update: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str]
) -> None:
    """Raise ValueError for weights that do not fit a model.

    `shapes` has the shape of every parameter. `tied` maps the name of each tied weight to the name
    of the parameter whose values it has. Tied weights may be left out of the update.

    >>> check_update({"a": torch.zeros(2)}, {"a": (2,), "b": (3,)}, {})
    Traceback (most recent call last):
    ValueError: the update does not fit the model: missing b
    """
    problems = []
    if missing := sorted(shapes.keys() - update.keys()):
        problems.append(f"missing {_first_names(missing)}")
    if unknown := sorted(update.keys() - shapes.keys() - tied.keys()):
        problems.append(f"unknown {_first_names(unknown)}")
    for name in sorted(update.keys() & shapes.keys()):
        shape = tuple(update[name].shape)
        if shape != tuple(shapes[name]):
            problems.append(f"{name} is {list(shape)}, the model has {list(shapes[name])}")
    if problems:
        raise ValueError("the update does not fit the model: " + "; ".join(problems[:6]))
    for alias, name in tied.items():
        if alias not in update:
            continue
        # Without NaN, which is unequal to itself: equal NaN on both sides is no conflict.
        if not torch.equal(update[alias].nan_to_num(), update[name].nan_to_num()):
            raise ValueError(
                f"the update has different values for {alias} and {name}, which are tied"
            )


def _first_names(names: Sequence[str], *, limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
