"""A check that sequences packed into one forward pass do not affect each other.

They would if a model's architecture ignored `position_ids` or the attention function it is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.expert_routes import num_experts
from unstale.model.attention import checked_length
from unstale.model.forward import run_model
from unstale.model.loading import vocab_size
from unstale.model.prefix_tree import MIN_SHARED, ROUND, Packed, build_prefix_tree

LIMITS = {torch.bfloat16: 0.08, torch.float16: 0.01}
"""Largest error by rounding, by dtype. In bfloat16, random models of 28 layers have up to 0.07, and
those that ignore positions 0.12 or more.
"""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The output `[N, :]` of one packed forward pass, and the rows that belong to each sequence."""

    output: Tensor
    by_sequence: list[Tensor]


@dataclass(frozen=True, slots=True)
class Packability:
    """Whether log-probabilities in a packed pass are those of each sequence alone, and why not."""

    plain_head: bool
    """Logits are the head applied to the last hidden state."""
    noise: float
    """Largest change in nats of a log-probability by other sequences in the passes of the check.

    A dense model is refused unless it is 0. On a CPU it is then 0 in every pass. On a GPU, kernels
    may divide the sums of longer passes in other ways, and then round otherwise.
    """


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> Packability:
    """Check that sequences packed together do not affect each other. Raise ConfigError if they do.

    With experts they may affect how sums round, because an expert's product then has other rows.
    Also raises ConfigError for a model that cannot be packed.
    """
    has_experts = num_experts(model.config.to_dict()) > 0
    sequences, changed = _probes(vocab_size(model.get_input_embeddings()))
    try:
        packed = _run(model, sequences)
        with_other_neighbours = _run(model, changed)
    except NotImplementedError as error:
        raise ConfigError(f"policy: {type(model).__name__} cannot be packed: {error}") from error
    # The middle two sequences are the same in both passes, the outer two are not.
    same = [(packed.by_sequence[i], with_other_neighbours.by_sequence[i]) for i in (1, 2)]
    noise = max(float((a.log_softmax(-1) - b.log_softmax(-1)).abs().max()) for a, b in same)
    limit = LIMITS.get(packed.output.dtype, 1e-4)
    if has_experts:
        unaffected = all(_error(a, b, on_average=True) <= limit for a, b in same)
    else:
        unaffected = all(torch.equal(a, b) for a, b in same)
    errors = _errors_of_packing(model, sequences, packed, on_average=has_experts)
    if not (unaffected and all(each <= limit for each in errors)):  # an error may be NaN
        raise ConfigError(
            f"policy: {type(model).__name__} does not keep packed sequences apart: it does not use "
            "transformers' attention interface, or ignores position_ids. Packed, its logits differ "
            f"by {max(errors):.2g} of their norm from those of single sequences, and "
            f"rounding by at most {limit:g}"
        )
    hidden = _run(model, sequences, hidden=True).output
    head = model.get_output_embeddings()
    if hidden.shape[-1] != head.weight.shape[1]:
        return Packability(False, noise)
    # Applied to as many rows as in the model: products of another shape round differently.
    return Packability(torch.equal(head(hidden[None])[0], packed.output), noise)


@torch.no_grad()
def check_length(model: PreTrainedModel, max_context: int) -> None:
    """Check that sequences of up to `max_context` tokens can be packed.

    Layers must attend causally or within a sliding window, and a late position in one sequence must
    not change others, as it does if rotary frequencies depend on the longest position of a pass.
    Raises ConfigError otherwise.
    """
    vocabulary = vocab_size(model.get_input_embeddings())
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(max_context, positions or max_context)
    tokens = torch.arange(ROUND) % vocabulary
    token = checked_length.set(length)
    try:
        _run(model, [tokens])
    except NotImplementedError as error:
        raise ConfigError(_too_long(model, length, str(error))) from error
    finally:
        checked_length.reset(token)
    short, other = (5 - tokens[:5]) % vocabulary, tokens[:3]
    usual, late = (
        _run(model, [short, other], last_position=last).by_sequence[0]
        for last in (len(other) - 1, max(length, len(other)) - 1)
    )
    limit = LIMITS.get(usual.dtype, 1e-4)
    if num_experts(model.config.to_dict()):
        unaffected = _error(late, usual, on_average=True) <= limit
    else:
        unaffected = torch.equal(usual, late)
    if not unaffected:
        reason = "its position embedding depends on the longest position of a pass"
        raise ConfigError(_too_long(model, length, reason))


def _too_long(model: PreTrainedModel, length: int, reason: str) -> str:
    return (
        f"policy: {type(model).__name__} cannot be packed with {length} tokens "
        f"(engine.max_context): {reason}. Lower engine.max_context, or use another model"
    )


def _probes(vocabulary: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return four short sequences, and the same four with the first and the last one changed.

    If packing keeps sequences apart, the results of the middle two are the same in both. The third
    and the fourth share a prefix, which tests the prefix tree.
    """
    trunk = torch.arange(MIN_SHARED) % vocabulary
    first = trunk[:3]
    second = (5 - trunk[:5]) % vocabulary
    left = torch.cat([trunk, torch.full((2,), 2)])
    right = torch.cat([trunk, torch.full((3,), 3)])
    other_first = torch.full((3,), 7 % vocabulary)
    other_right = torch.cat([trunk, torch.full((3,), 1)])
    return [first, second, left, right], [other_first, second, left, other_right]


def _run(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    *,
    hidden: bool = False,
    last_position: int | None = None,
) -> _Pass:
    """Run packed sequences. Return logits, or with `hidden` the last hidden states.

    With `last_position` the last sequence ends at this position.
    """
    lengths = [len(sequence) for sequence in sequences]
    packed = Packed(torch.cat(list(sequences)), tuple(accumulate(lengths, initial=0)))
    tree = build_prefix_tree(packed, share=True)
    if last_position is not None:
        positions = tree.positions.clone()
        positions[tree.place[-lengths[-1] :]] += last_position - lengths[-1] + 1
        tree = replace(tree, positions=positions)
    device = next(model.parameters()).device
    rows = torch.arange(len(tree.tokens), device=device)
    output = run_model(model.base_model if hidden else model, tree, rows, hidden)
    return _Pass(output, list(output[tree.place.to(device)].split(lengths)))


def _errors_of_packing(
    model: PreTrainedModel, sequences: Sequence[Tensor], packed: _Pass, *, on_average: bool
) -> list[float]:
    """Return the error of the logits of each packed sequence, against those alone."""
    device = next(model.parameters()).device
    errors = []
    for logits, sequence in zip(packed.by_sequence, sequences, strict=True):
        alone = model(input_ids=sequence[None].to(device), use_cache=False).logits[0]
        errors.append(_error(logits, alone, on_average=on_average))
    return errors


def _error(logits: Tensor, expected: Tensor, *, on_average: bool) -> float:
    """Return the largest error of a token's logits `[N, V]`.

    A token's error is the norm of its logits' differences, as a share of their norm. With experts
    only the mean error counts: rounding may change the choice of an expert, and with it a whole
    row.
    """
    difference = (logits - expected).norm(dim=-1, dtype=torch.float64)
    norm = expected.norm(dim=-1, dtype=torch.float64)
    # A token whose embedding is 0, such as that of padding, may have logits that are all 0.
    errors = torch.where((difference == 0) & (norm == 0), 0.0, difference / norm)
    return float(errors.mean() if on_average else errors.max())
