"""Forward passes of one sequence each, for models whose sequences cannot be packed into one pass.

Recurrent layers (Mamba, linear attention), convolutions, attention sinks and soft caps do not know
where a packed sequence begins. transformers computes such models here, one sequence at a time and
without padding. So a log-probability depends only on its own sequence, to the last bit. A prefix
that several sequences have in common is computed again for each of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.config import ConfigError
from unstale.model import fused
from unstale.model.attention import running
from unstale.model.forward import keep_states, run_model
from unstale.model.loading import vocab_size
from unstale.model.packing_check import (
    Packability,
    allowed_wide,
    in_precision,
    is_plain,
    largest_error,
    logits_alone,
    probe_sequences,
    require_finite,
    wider,
)
from unstale.model.pictures import PictureInputs, PictureProbe
from unstale.model.prefix_tree import PrefixTree, Segment
from unstale.routed_experts import num_experts


def run_apart(
    body: Any,
    run: PrefixTree,
    rows: Tensor,
    plain_head: bool,
    pictures: PictureInputs | None = None,
) -> Tensor:
    """Run a model on each sequence of a prefix tree, one after the other.

    The arguments and the result are those of `forward.run_model`. In the tree (packed sequences),
    no two sequences may share a prefix. Raises ValueError if two do. No index in `rows` may be that
    of a padding token.
    """
    found, places = [], []
    for segment in run.segments:
        if segment.start >= run.num_tokens:
            continue  # padding
        alone = _alone(run, segment)
        token = running.set(alone)
        try:
            if pictures:
                out = pictures.states(body, alone.tokens)
            else:
                out = body(input_ids=alone.tokens[None].to(rows.device), use_cache=False)
        finally:
            running.reset(token)
        states: Tensor = (out.last_hidden_state if plain_head else out.logits)[0]
        own = ((rows >= segment.start) & (rows < segment.end)).nonzero().squeeze(1)
        found.append(states[rows[own] - segment.start])
        places.append(own)
    chosen = torch.cat(found)[torch.cat(places).argsort()]
    keep_states(chosen)
    return chosen


def _alone(run: PrefixTree, segment: Segment) -> PrefixTree:
    """Return a prefix tree that has only the sequence of `segment`, without padding."""
    if segment.path:
        raise ValueError("a tree with shared prefixes cannot be run one sequence at a time")
    span, length = slice(segment.start, segment.end), segment.end - segment.start
    return replace(
        run,
        tokens=run.tokens[span],
        positions=run.positions[span],
        place=torch.arange(length),
        follows=torch.arange(length) > 0,
        segments=(Segment(0, length, length),),
        num_tokens=length,
        routed_experts=None if run.routed_experts is None else run.routed_experts[span],
        masks={},
        layouts={},
        kept_sets=None,
    )


@torch.no_grad()
def use(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Prepare a model for `run_apart`, in place: it runs the code of transformers from then on.

    Return the name of the attention implementation. It is "sdpa" (torch's fused attention) if this
    gives the logits of transformers' own code. Otherwise, as with sinks and soft caps, it is
    "eager", which holds the scores of all pairs of tokens in memory.
    """
    fused.undo(model)
    sequences, _ = probe_sequences(tokenizer, vocab_size(model.get_input_embeddings()))

    def logits(attention: str) -> list[Tensor]:
        model.set_attn_implementation(attention)
        return logits_alone(model, sequences)

    try:
        is_same = _agree(model, partial(logits, "eager"), partial(logits, "sdpa"))
    except (NotImplementedError, ValueError):  # the architecture does not offer it
        is_same = False
    attention = "sdpa" if is_same else "eager"
    set_attention(model, attention)
    return attention


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Prepare a model for `run_apart`, in place. `attention` is the name that `use` returned."""
    fused.undo(model)
    model.set_attn_implementation(attention)


@torch.no_grad()
def check_apart(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> Packability:
    """Check that no token of a sequence changes the logits of earlier tokens.

    An engine samples token by token. If later tokens changed logits, the trainer's
    log-probabilities would not be the engine's. The check also requires equal bits in a second
    pass. Raises ConfigError if the model fails.
    """
    sequences, _ = probe_sequences(tokenizer, vocab_size(model.get_input_embeddings()))
    logits = logits_alone(model, sequences)
    require_finite(model, logits)
    cuts = [max(len(each) // 2, 1) for each in sequences]

    def beginnings() -> list[Tensor]:
        whole = logits_alone(model, sequences)
        return [each[:cut] for each, cut in zip(whole, cuts, strict=True)]

    short = [each[:cut] for each, cut in zip(sequences, cuts, strict=True)]
    if not _agree(model, beginnings, partial(logits_alone, model, short)):
        raise ConfigError(
            f"policy: a token changes the logits of earlier tokens in {type(model).__name__}, also "
            "if each sequence has a forward pass of its own"
        )
    if not all(map(torch.equal, logits, logits_alone(model, sequences))):
        raise ConfigError(
            f"policy: {type(model).__name__} gives a sequence other logits in a second pass"
        )
    if model.base_model is model:  # hidden states cannot be had without logits
        return Packability(False, 0.0)
    tokens = sequences[1][None].to(next(model.parameters()).device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    return Packability(is_plain(model.get_output_embeddings(), hidden, logits[1]), 0.0)


@torch.no_grad()
def check_pictures(
    model: PreTrainedModel, pictures: PictureInputs, found: Packability, *, packed: bool = False
) -> None:
    """Check that the logits for a text with pictures equal those of transformers.

    They are computed in one pass and again in parts, with a key-value cache, or with `packed` in
    one packed pass. `found` is the result of the check with text only. Raises ConfigError if the
    logits differ by more than rounding, or if the output head is more than one linear map.
    """
    probe = PictureProbe(pictures)
    passes = [partial(probe.logits, model, parts) for parts in (1, 3)]
    if packed:
        passes = [partial(probe.packed, model, run_model)]
    same = (_agree(model, partial(probe.plain, model), each) for each in passes)
    if not (found.plain_head and all(same)):
        raise ConfigError(
            f"policy: pictures give {type(model).__name__} other logits than in transformers"
        )


@torch.no_grad()
def check_length_apart(
    model: PreTrainedModel, length: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ConfigError if a token at position `length` - 1 changes the logits of earlier tokens.

    This happens if a rotary embedding's frequencies depend on the longest position of a pass.
    """
    if "position_ids" not in signature(type(model).forward).parameters:
        return
    _, (sequence, *_) = probe_sequences(tokenizer, vocab_size(model.get_input_embeddings()))
    late = torch.arange(len(sequence))
    late[-1] = max(length, len(sequence)) - 1

    (usual,) = logits_alone(model, [sequence])
    (changed,) = logits_alone(model, [sequence], position_ids=late)
    if num_experts(model.config.to_dict()):
        # The last token may choose other experts, which changes how the products of others round.
        limit = math.sqrt(torch.finfo(usual.dtype).eps)
        unaffected = largest_error([changed[:-1]], [usual[:-1]], median=True) <= limit
    else:
        unaffected = torch.equal(usual[:-1], changed[:-1])
    if not unaffected:
        raise ConfigError(
            f"policy: {type(model).__name__} cannot be used with {length} tokens "
            "(engine.max_context): its position embedding depends on the longest position of a "
            "pass. Lower engine.max_context, or use another model"
        )


def _agree(
    model: PreTrainedModel,
    first: Callable[[], Sequence[Tensor]],
    second: Callable[[], Sequence[Tensor]],
) -> bool:
    """Return True if two computations of the same logits differ only by rounding.

    Both are repeated in a wider precision than the model's, in which rounding errors are small.
    """
    narrow = first()
    dtype = narrow[0].dtype
    has_experts = num_experts(model.config.to_dict()) > 0
    with in_precision(model, wider(dtype)):
        some, others = first(), second()
    rounding = largest_error(narrow, some, median=has_experts)
    return largest_error(others, some, median=has_experts) <= 8 * allowed_wide(rounding, dtype)
