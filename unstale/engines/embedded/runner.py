"""What a model must do for the batcher: run packed chunks of many sequences, each over its own cached prefix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start:end` of the sequence in `slot`; everything before `start` is cached."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: rows of one token each, and longer chunks. `tokens` and `positions` hold rows, then chunks."""

    rows: Tensor
    """`[R]`, the slot of each one-token row."""
    chunks: tuple[Chunk, ...]
    tokens: Tensor
    """`[T]`, packed."""
    positions: Tensor
    """`[T]`, each token's place in its own sequence."""

    @property
    def longest(self) -> int:
        """Length of the longest sequence among the rows, this step's token included."""
        return int(self.positions[: len(self.rows)].max()) + 1 if len(self.rows) else 0

    def spans(self) -> list[tuple[Chunk, slice]]:
        """Each chunk, and where it lies in `tokens`."""
        spans, at = [], len(self.rows)
        for chunk in self.chunks:
            size = chunk.end - chunk.start
            spans.append((chunk, slice(at, at + size)))
            at += size
        return spans


class Runner(Protocol):
    """A model with a KV cache of `max_slots` sequences."""

    name: str
    """Which program runs the model."""
    warning: str
    """What whoever runs it should know about that; mostly nothing."""
    vocab_size: int

    def forward(self, step: Step) -> Tensor:
        """Float32 logits `[R + C, V]` after the last token of each row and chunk; caches every token of the step."""
        ...

    def keep(self, slot: int, count: int) -> None:
        """Of what is cached of `slot`, only the first `count` tokens will be needed."""
        ...

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Make the first `count` cached tokens of `target` those of `source`."""
        ...

    def load(self, update: Mapping[str, Tensor]) -> None:
        """Take these weights, all or none. Raises ValueError with what does not fit."""
        ...


def check_update(
    update: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str]
) -> None:
    """Refuse weights that do not fit: `shapes` names every parameter, `tied` maps an alias to the one it repeats.

    >>> check_update({"a": torch.zeros(2)}, {"a": (2,), "b": (3,)}, {})
    Traceback (most recent call last):
    ValueError: the update does not fit the model: missing b
    """
    problems = []
    if missing := sorted(shapes.keys() - update.keys()):
        problems.append(f"missing {_few(missing)}")
    if unknown := sorted(update.keys() - shapes.keys() - tied.keys()):
        problems.append(f"unknown {_few(unknown)}")
    for name in sorted(update.keys() & shapes.keys()):
        if tuple(update[name].shape) != tuple(shapes[name]):
            problems.append(
                f"{name} is {list(update[name].shape)}, the model has {list(shapes[name])}"
            )
    if problems:
        raise ValueError("the update does not fit the model: " + "; ".join(problems[:6]))
    for alias, name in tied.items():
        if alias in update and not torch.equal(
            update[alias].nan_to_num(), update[name].nan_to_num()
        ):
            raise ValueError(
                f"{alias} and {name} are tied in this model, but the update gives them different values"
            )


def _few(names: Sequence[str], *, limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )
