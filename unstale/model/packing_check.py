"""Check."""

from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.model.forward import run_model
from unstale.model.loading import vocab_size
from unstale.model.prefix_tree import MIN_SHARED, Packed, build_prefix_tree


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> bool:
    """Whether logits are the head applied to the last hidden state. Refuses a model that mixes packed sequences.

    Not every architecture asks the attention function that it was given, or reads `position_ids`; a model that does
    not would see its neighbours, so this is measured, on short sequences and on siblings, and never assumed.
    """
    device, size = next(model.parameters()).device, vocab_size(model.get_input_embeddings())
    trunk = torch.arange(MIN_SHARED) % size
    one, two, left, right = (
        trunk[:3],
        (5 - trunk[:5]) % size,
        *(torch.cat([trunk, trunk[:n] * 0 + n]) for n in (2, 3)),
    )
    other, elsewhere = one * 0 + 7 % size, torch.cat([trunk, right[MIN_SHARED:] * 0 + 1])

    def run(*sequences: Tensor, hidden: bool = False) -> tuple[Tensor, list[Tensor]]:
        """All that the pass made, and what each sequence gets of it."""
        lengths = [len(sequence) for sequence in sequences]
        grown = build_prefix_tree(
            Packed(torch.cat(sequences), tuple(accumulate(lengths, initial=0))), share=True
        )
        every = torch.arange(len(grown.tokens), device=device)
        made = run_model(model.base_model if hidden else model, grown, every, hidden)
        return made, list(made[grown.place.to(device)].split(lengths))

    try:
        logits, together = run(one, two, left, right)
        _, beside = run(other, two, left, elsewhere)
    except NotImplementedError as error:
        raise ConfigError(f"policy: {type(model).__name__} cannot be packed: {error}") from error
    near = True
    for found, sequence in zip(together, (one, two, left, right), strict=True):
        alone = model(input_ids=sequence[None].to(device), use_cache=False).logits[0]
        tolerance = (0.03 if model.dtype == torch.bfloat16 else 1e-4) * float(alone.abs().max())
        near = near and float((found - alone).abs().max()) <= tolerance
    if not near or not all(torch.equal(together[i], beside[i]) for i in (1, 2)):
        raise ConfigError(
            f"policy: {type(model).__name__} does not keep packed sequences apart: it does not use transformers' "
            "attention interface, or ignores position_ids"
        )
    hidden, _ = run(one, two, left, right, hidden=True)
    head = (
        model.get_output_embeddings()
    )  # on as many rows as in the model: other shapes round otherwise
    return hidden.shape[-1] == head.weight.shape[1] and torch.equal(head(hidden[None])[0], logits)
