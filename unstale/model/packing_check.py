"""A check that sequences packed into one forward pass do not affect each other.

They would if a model's architecture ignored `position_ids` or the attention function it is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.model.forward import run_model
from unstale.model.loading import vocab_size
from unstale.model.prefix_tree import MIN_SHARED, Packed, build_prefix_tree


@dataclass(frozen=True, slots=True)
class _Pass:
    """The output `[N, :]` of one packed forward pass, and the rows that belong to each sequence."""

    output: Tensor
    by_sequence: list[Tensor]


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> bool:
    """Check that sequences packed together do not affect each other. Raise ConfigError if they do.

    Return True if the model's logits are its head applied to the last hidden state. Also raises
    ConfigError for a model that cannot be packed.
    """
    sequences, changed = _probes(vocab_size(model.get_input_embeddings()))
    try:
        packed = _run(model, sequences)
        with_other_neighbours = _run(model, changed)
    except NotImplementedError as error:
        raise ConfigError(f"policy: {type(model).__name__} cannot be packed: {error}") from error
    # The two middle sequences are the same in both passes, the outer two differ.
    unaffected = all(
        torch.equal(packed.by_sequence[i], with_other_neighbours.by_sequence[i]) for i in (1, 2)
    )
    if not unaffected or not _near_unpacked(model, sequences, packed):
        raise ConfigError(
            f"policy: {type(model).__name__} does not keep packed sequences apart: it does not use "
            "transformers' attention interface, or ignores position_ids"
        )
    hidden = _run(model, sequences, hidden=True).output
    head = model.get_output_embeddings()
    if hidden.shape[-1] != head.weight.shape[1]:
        return False
    # On as many rows as in the model, because products of another shape round differently.
    return torch.equal(head(hidden[None])[0], packed.output)


def _probes(vocabulary: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return four short sequences, and the same four with the first and the last one changed.

    The last two sequences share a prefix.
    """
    trunk = torch.arange(MIN_SHARED) % vocabulary
    first = trunk[:3]
    second = (5 - trunk[:5]) % vocabulary
    left = torch.cat([trunk, torch.full((2,), 2)])
    right = torch.cat([trunk, torch.full((3,), 3)])
    other_first = torch.full((3,), 7 % vocabulary)
    other_right = torch.cat([trunk, torch.full((3,), 1)])
    return [first, second, left, right], [other_first, second, left, other_right]


def _run(model: PreTrainedModel, sequences: Sequence[Tensor], *, hidden: bool = False) -> _Pass:
    """Run packed sequences. Return logits, or with `hidden` the last hidden states."""
    lengths = [len(sequence) for sequence in sequences]
    packed = Packed(torch.cat(list(sequences)), tuple(accumulate(lengths, initial=0)))
    tree = build_prefix_tree(packed, share=True)
    device = next(model.parameters()).device
    rows = torch.arange(len(tree.tokens), device=device)
    output = run_model(model.base_model if hidden else model, tree, rows, hidden)
    return _Pass(output, list(output[tree.place.to(device)].split(lengths)))


def _near_unpacked(model: PreTrainedModel, sequences: Sequence[Tensor], packed: _Pass) -> bool:
    """Return True if packed sequences have the same logits as alone, up to rounding."""
    device = next(model.parameters()).device
    relative = 0.03 if model.dtype == torch.bfloat16 else 1e-4
    for logits, sequence in zip(packed.by_sequence, sequences, strict=True):
        alone = model(input_ids=sequence[None].to(device), use_cache=False).logits[0]
        if not float((logits - alone).abs().max()) <= relative * float(alone.abs().max()):
            return False
    return True
