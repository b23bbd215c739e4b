"""Packing: distribute sequences over forward passes with a limited number of tokens."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from unstale.model.prefix_tree import Packed, build_prefix_tree
from unstale.records import token_positions

HEAD_ROWS = 4
"""Largest number of log-probabilities that a pass computes, as a multiple of its token limit. If
sequences share a token but continue it differently, this token needs several log-probabilities.
"""


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide sequences of these lengths into groups of at most `budget` tokens.

    Return the indices of the sequences in each group. Sequences are placed from the longest to the
    shortest, each in the first group with enough room. A sequence longer than the budget has a
    group to itself.

    >>> pack([3, 8, 5, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    groups: list[list[int]] = []
    left: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = next((g for g, free in enumerate(left) if lengths[i] <= free), None)
        if fits is None:
            groups.append([i])
            left.append(budget - lengths[i])
        else:
            groups[fits].append(i)
            left[fits] -= lengths[i]
    return groups


def pack_shared(packed: Packed, budget: int, wanted: Sequence[int]) -> list[list[int]]:
    """Divide sequences that share prefixes into groups of at most `budget` tokens, like `pack`.

    A shared token counts once, so siblings (sequences with the same prompt) stay together. `wanted`
    has the number of log-probabilities that each sequence needs. Siblings are split if they exceed
    the budget, or need more than `HEAD_ROWS * budget` log-probabilities. Each part then computes
    the shared prefix again. No sequence may be empty.
    """
    if not len(packed.tokens):
        return []
    place = build_prefix_tree(packed, share=True).place.numpy()
    places = [place[start:end] for start, end in packed.spans()]
    units: list[list[int]] = []
    costs: list[int] = []
    tokens = rows = 0
    previous = place[:0]
    # in the order in which the prefix tree stores them
    for i in sorted(range(len(places)), key=lambda i: int(places[i][-1])):
        length = min(len(places[i]), len(previous))
        shared = np.count_nonzero(places[i][:length] == previous[:length])
        new_tokens = len(places[i]) - int(shared)
        previous = places[i]
        shares = new_tokens < len(places[i])
        fits = tokens + new_tokens <= budget and rows + wanted[i] <= HEAD_ROWS * budget
        if units and shares and fits:
            units[-1].append(i)
            tokens += new_tokens
            rows += wanted[i]
            costs[-1] = _cost(tokens, rows)
        else:
            units.append([i])
            tokens = len(places[i])
            rows = wanted[i]
            costs.append(_cost(tokens, rows))
    groups = []
    for group in pack(costs, budget):
        groups.append([i for unit in group for i in units[unit]])
    return groups


def _cost(tokens: int, rows: int) -> int:
    """Return how many tokens of a pass's limit some sequences use up.

    It is the larger of two numbers: their `tokens`, and `rows`, the number of their
    log-probabilities, divided by `HEAD_ROWS`.
    """
    return max(tokens, -(-rows // HEAD_ROWS))


def wanted_spans(spans: Sequence[tuple[int, int]], where: Tensor) -> list[tuple[int, int]]:
    """Return those spans `(start, end)` that have a token in the mask `where` (`[T]` bool).

    Each span is cut after its last token in the mask.
    """
    wanted = where.nonzero().squeeze(1).cpu().numpy()
    cut_spans = []
    for start, end in spans:
        first, last = np.searchsorted(wanted, (start, end))
        if first < last:
            cut_spans.append((start, int(wanted[last - 1]) + 1))
    return cut_spans


def cut(packed: Packed, spans: Sequence[tuple[int, int]]) -> tuple[Packed, Tensor]:
    """Return only the tokens in `spans`, and their indices `[t]` in `packed`.

    Each span becomes one sequence.
    """
    index = token_positions(spans)
    offsets = accumulate((end - start for start, end in spans), initial=0)
    routed_experts = (
        packed.routed_experts if packed.routed_experts is None else packed.routed_experts[index]
    )
    kept_sets = packed.kept_sets.at(index) if packed.kept_sets else None
    return Packed(packed.tokens[index], tuple(offsets), routed_experts, kept_sets), index
