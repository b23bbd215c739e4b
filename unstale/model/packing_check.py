"""A check that packing sequences into one forward pass does not change their log-probabilities.

Three properties are tested, on text of the model's own tokenizer:

1. Packed sequences do not affect each other. A dense model must give the same bits.
2. Each sequence has its own positions. In a wider precision, where rounding is small, packing must
   change logits far less than rounding to the model's precision does.
3. In the model's precision, the error of a packed pass is at most a few times the error of
   transformers with a single sequence.

No limit is absolute, because rounding errors differ between models: a trained network with massive
activations (arXiv 2402.17762) has a hundred times the error of a random one.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.config import ConfigError
from unstale.model.attention import checked_length
from unstale.model.forward import run_model
from unstale.model.loading import vocab_size
from unstale.model.prefix_tree import MIN_SHARED, ROUND, Packed, build_prefix_tree
from unstale.routed_experts import num_experts

MAX_ROUNDING = 8
"""Largest allowed error of a packed pass, as a multiple of the error of transformers in the same
precision. In measurements, summing in another order gave up to 4 times that error.
"""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The output of one packed pass: `[N, :]` for all tokens, and the same divided by sequence."""

    output: Tensor
    by_sequence: list[Tensor]


@dataclass(frozen=True, slots=True)
class Packability:
    """The results of a successful check of whether sequences can be packed for a model."""

    plain_head: bool
    """True if the logits are only the output head applied to the last hidden states."""
    noise: float
    """Largest change of a log-probability, in nats, that other sequences in a pass caused during
    the check.

    A dense model passes only if this is 0. On a CPU the change is then 0 in every pass. On a GPU,
    kernels may divide the sums of longer passes in other ways and round differently.
    """


@torch.no_grad()
def check_packing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> Packability:
    """Check that packing sequences into one pass does not change their log-probabilities.

    Return what was found out about the model. Without a tokenizer, small token ids replace text.
    Raises ConfigError, with the property that does not hold, if the model fails.
    """
    name = type(model).__name__
    sequences, changed = probe_sequences(tokenizer, vocab_size(model.get_input_embeddings()))
    try:
        packed = _run(model, sequences)
        with_other_neighbours = _run(model, changed)
    except NotImplementedError as error:
        raise ConfigError(f"policy: {name} cannot be packed: {error}") from error
    alone = logits_alone(model, sequences)
    dtype = packed.output.dtype
    require_finite(model, alone)
    with in_precision(model, wider(dtype)):
        packed_wide = _run(model, sequences).by_sequence
        alone_wide = logits_alone(model, sequences)
    has_experts = num_experts(model.config.to_dict()) > 0
    rounding = largest_error(alone, alone_wide, median=has_experts)

    # The middle two sequences are the same in both passes, the outer two are not.
    same = [(packed.by_sequence[i], with_other_neighbours.by_sequence[i]) for i in (1, 2)]
    influence = largest_error(*zip(*same, strict=True), median=has_experts)
    if influence > (_allowed(rounding, dtype) if has_experts else 0):
        raise ConfigError(
            f"policy: packed sequences affect each other in {name}: the logits of a sequence "
            f"differ by {influence:.2g} of their norm if others are packed with it. Its attention "
            "does not use transformers' attention interface, or a layer mixes adjacent tokens"
        )
    difference = largest_error(packed_wide, alone_wide, median=has_experts)
    if not difference <= allowed_wide(rounding, dtype):  # either may be NaN
        with in_precision(model, wider(dtype)):
            stretched = _run(model, sequences, stretch=2).by_sequence
        ignored = all(map(torch.equal, packed_wide, stretched))
        reason = (
            "It ignores position_ids" if ignored else "Its layers treat packed tokens otherwise"
        )
        raise ConfigError(
            f"policy: {name} does not give packed sequences the log-probabilities of single ones: "
            f"the logits differ by {difference:.2g} of their norm, which is not rounding "
            f"(at most {allowed_wide(rounding, dtype):.2g}). {reason}"
        )
    packed_error = largest_error(packed.by_sequence, alone_wide, median=has_experts)
    if not packed_error <= _allowed(rounding, dtype):
        raise ConfigError(
            f"policy: {name} rounds more in a packed pass than alone in {_short(dtype)}: the error "
            f"of its logits is {packed_error:.2g} of their norm, and {rounding:.2g} alone. "
            "Use another precision (engine.dtype, trainer.dtype)"
        )
    noise = max(float((a.log_softmax(-1) - b.log_softmax(-1)).abs().max()) for a, b in same)
    if model.base_model is model:  # as in Llama 4: hidden states cannot be had without logits
        return Packability(False, noise)
    hidden = _run(model, sequences, hidden=True).output
    return Packability(is_plain(model.get_output_embeddings(), hidden, packed.output), noise)


def is_plain(head: nn.Module, hidden: Tensor, logits: Tensor) -> bool:
    """Return True if `logits` `[T, V]` are only `head` applied to the hidden states `[T, H]`."""
    weight = cast(Tensor, head.weight)
    if hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        return False
    # Applied to as many rows as in the model: products of another shape round differently.
    return torch.equal(head(hidden[None])[0], logits)


def require_finite(model: PreTrainedModel, logits: Sequence[Tensor]) -> None:
    """Raise ConfigError if a logit of the model is not finite."""
    if not all(bool(each.isfinite().all()) for each in logits):
        raise ConfigError(
            f"policy: logits of {type(model).__name__} are not finite in "
            f"{_short(logits[0].dtype)}, packed or not. "
            "Use a dtype with a larger range, such as bfloat16"
        )


@torch.no_grad()
def check_bitwise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Check that the logits of a sequence have the same bits whatever else is in the pass.

    `unstale.model.bitwise.use` has prepared the model. Raises ConfigError if another sequence
    changes a bit, or if the error of the logits is too large for rounding.
    """
    sequences, changed = probe_sequences(tokenizer, vocab_size(model.get_input_embeddings()))
    packed, other = (_run(model, each).by_sequence for each in (sequences, changed))
    alone = logits_alone(model, sequences)
    dtype = next(model.parameters()).dtype
    with in_precision(model, wider(dtype)):
        alone_wide = logits_alone(model, sequences)
    error = largest_error(packed, alone_wide, median=False)
    rounding = largest_error(alone, alone_wide, median=False)
    same = all(torch.equal(packed[i], other[i]) for i in (1, 2))
    if not (same and error <= _allowed(rounding, dtype)):
        found = (
            f"the error of its logits is {error:.2g} of their norm, and {rounding:.2g} without"
            if same
            else "other sequences in a pass change bits"
        )
        raise ConfigError(
            f"engine.bitwise must be false with {type(model).__name__} in {_short(dtype)}: {found}"
        )


@torch.no_grad()
def check_length(
    model: PreTrainedModel, max_context: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ConfigError if sequences of up to `max_context` tokens cannot be packed.

    Layers must attend causally or within a sliding window. A late position in one sequence must not
    change other sequences. It does change them if rotary frequencies depend on the longest position
    of a pass.
    """
    vocabulary = vocab_size(model.get_input_embeddings())
    (other, short, *_), _ = probe_sequences(tokenizer, vocabulary)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(max_context, positions or max_context)
    token = checked_length.set(length)
    try:
        _run(model, [torch.arange(ROUND) % vocabulary])  # one sequence without padding
    except NotImplementedError as error:
        raise ConfigError(_too_long(model, length, str(error))) from error
    finally:
        checked_length.reset(token)
    usual, late = (
        _run(model, [short, other], last_position=last).by_sequence[0]
        for last in (len(other) - 1, max(length, len(other)) - 1)
    )
    if num_experts(model.config.to_dict()):
        # Other positions change the choice of experts, and thus how the products of others round.
        limit = math.sqrt(torch.finfo(usual.dtype).eps)
        unaffected = _error(late, usual, median=True) <= limit
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


def probe_sequences(
    tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return four short sequences, and the same four with the first and the last one changed.

    If packing keeps sequences apart, the logits of the middle two are the same in both lists. The
    third and the fourth share a prefix, which tests the sharing of prefixes.
    """
    texts = _texts(tokenizer) if tokenizer else []
    if any(len(set(text)) < 4 or max(text) >= vocabulary for text in texts):
        texts = []  # the tokenizer does not know English
    if not texts:
        ids = [token % vocabulary for token in range(MIN_SHARED)]
        texts = [ids[:3], [(5 - token) % vocabulary for token in ids[:5]], ids, [2, 2], [3, 3, 3]]
        texts += [[7 % vocabulary] * 3, [1, 1, 1]]
    first, second, trunk, left, right, other_first, other_right = map(torch.tensor, texts)
    # With other lengths, attention to a shared prefix would round otherwise.
    first, other_first = _cut_alike(first, other_first)
    right, other_right = _cut_alike(right, other_right)
    middle = [second, torch.cat([trunk, left])]
    return (
        [first, *middle, torch.cat([trunk, right])],
        [other_first, *middle, torch.cat([trunk, other_right])],
    )


def _cut_alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    length = min(len(one), len(other))
    return one[:length], other[:length]


def _texts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of seven short texts. The third is a chat prompt, which can be a prefix."""

    def encode(text: str, *, begins: bool = True) -> list[int]:
        return list(tokenizer(text, add_special_tokens=begins)["input_ids"])

    question = "What is the capital of France, and which river flows through it?"
    messages = [{"role": "user", "content": question}]
    try:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        trunk = encode(str(prompt), begins=False)
    except (TemplateError, ValueError):  # no template, or one that needs other messages
        trunk = encode(question)
    while len(trunk) < MIN_SHARED and trunk:
        trunk += encode(question, begins=False)
    return [
        encode("It is a small town near the sea."),
        encode("The weather was fine, so they walked along the river."),
        trunk,
        *(
            encode(text, begins=False)
            for text in ("The capital is Paris.", "It is Paris, and the river is the Seine.")
        ),
        encode("She has never seen so many birds."),
        encode("I do not know this country well.", begins=False),
    ]


def _run(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    *,
    hidden: bool = False,
    last_position: int | None = None,
    stretch: int = 1,
) -> _Pass:
    """Run packed sequences. Return logits, or with `hidden` the last hidden states.

    With `last_position`, the positions of the last sequence are shifted so that it ends at this
    position. All positions are multiplied by `stretch`.
    """
    lengths = [len(sequence) for sequence in sequences]
    packed = Packed(torch.cat(list(sequences)), tuple(accumulate(lengths, initial=0)))
    tree = build_prefix_tree(packed, share=True)
    positions = tree.positions * stretch
    if last_position is not None:
        positions[tree.place[-lengths[-1] :]] += last_position - lengths[-1] + 1
    tree = replace(tree, positions=positions)
    device = next(model.parameters()).device
    rows = torch.arange(len(tree.tokens), device=device)
    output = run_model(model.base_model if hidden else model, tree, rows, hidden)
    return _Pass(output, list(output[tree.place.to(device)].split(lengths)))


def logits_alone(
    model: PreTrainedModel, sequences: Sequence[Tensor], **options: Tensor
) -> list[Tensor]:
    """Return the logits `[T, V]` of each sequence, computed in a pass of its own.

    `options` are further arguments of each pass, such as positions `[T]`.
    """
    device = next(model.parameters()).device
    rows = {name: value[None].to(device) for name, value in options.items()}
    return [
        model(input_ids=sequence[None].to(device), use_cache=False, **rows).logits[0]
        for sequence in sequences
    ]


@contextmanager
def in_precision(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which the model computes in `dtype`, which is at least its own precision.

    The weights of a layer are converted only while the layer runs, to save memory.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for each in lists for layer in each for part in layer.modules()}
    layers = [layer for each in lists if id(each) not in inner for layer in each]
    in_layers = {id(tensor) for layer in layers for tensor in layer.parameters()}
    kept: dict[nn.Parameter, Tensor] = {}

    def convert(parameters: list[nn.Parameter]) -> None:
        for each in parameters:
            if each.is_floating_point() and each not in kept:
                kept[each] = each.data
                each.data = each.data.to(dtype)

    def restore(parameters: list[nn.Parameter]) -> None:
        for each in parameters:
            if each in kept:
                each.data = kept.pop(each)

    experts: str | None = getattr(model.config, "_experts_implementation", None)
    replaced = experts == "grouped_mm" and dtype == torch.float64
    if experts and replaced:
        model.set_experts_implementation("eager")  # torch multiplies groups in up to float32
    hooks = []
    for layer in layers:
        own = list(layer.parameters())
        hooks.append(layer.register_forward_pre_hook(lambda *_, own=own: convert(own)))
        hooks.append(
            layer.register_forward_hook(lambda *_, own=own: restore(own), always_call=True)
        )
    try:
        convert([each for each in model.parameters() if id(each) not in in_layers])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(list(kept))
        if experts and replaced:
            model.set_experts_implementation(experts)


def wider(dtype: torch.dtype) -> torch.dtype:
    narrow = torch.finfo(dtype).bits < 32
    return torch.float32 if narrow else torch.float64


def _allowed(rounding: float, dtype: torch.dtype) -> float:
    """Return the largest error of logits that rounding can explain, relative to their norm.

    `rounding` is the error of transformers in `dtype`.
    """
    return max(MAX_ROUNDING * rounding, MAX_ROUNDING * torch.finfo(dtype).eps)


def allowed_wide(rounding: float, dtype: torch.dtype) -> float:
    """Return the largest allowed difference of two results in a wider precision.

    The difference is relative to the norm of the logits. `rounding` is the error in `dtype`, the
    model's own precision. The result lies between the rounding errors of the two precisions,
    because some models compute parts in float32 even in a float64 pass. If `dtype` is float32, at
    least half of the digits must agree, because a model with discontinuous layers has a large
    rounding error even without packing.
    """
    eps = torch.finfo(torch.float32).eps
    if torch.finfo(dtype).bits >= 32:
        return min(max(rounding, 8 * eps), math.sqrt(eps))
    return rounding * math.sqrt(eps / torch.finfo(dtype).eps)


def largest_error(some: Sequence[Tensor], expected: Sequence[Tensor], *, median: bool) -> float:
    """Return the largest error of the logits of several sequences, relative to their norms.

    NaN counts as infinite. With `median`, the error of a sequence is the median over its tokens.
    The median of the errors of the sequences' first tokens then counts as well: a layer that mixes
    adjacent tokens changes the first token of every packed sequence but the first, while rounding
    changes few of them.
    """
    pairs = list(zip(some, expected, strict=True))
    errors = [_error(a, b, median=median) for a, b in pairs]
    if median:
        firsts = [_error(a[:1], b[:1], median=True) for a, b in pairs]
        errors.append(sorted(firsts)[(len(firsts) - 1) // 2])
    return max(math.inf if math.isnan(each) else each for each in errors)


def _error(logits: Tensor, expected: Tensor, *, median: bool) -> float:
    """Return the error of a sequence's logits `[T, V]`, relative to their norm.

    With `median`, return the median over the tokens. In a model with experts, rounding may change
    the choice of an expert, and so all logits of a few tokens.
    """
    difference = (logits.double() - expected.double()).norm(dim=-1)
    norm = expected.double().norm(dim=-1)
    if median:
        # A token whose embedding is 0, such as that of padding, may have logits that are all 0.
        return float(torch.where(difference == 0, 0.0, difference / norm).median())
    return 0.0 if not difference.any() else float(difference.norm() / norm.norm())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
