"""Old log-probabilities and weights of text that was placed into replies (`objective.placed`).

    pi(y|c) / mu(y|c')  =  D * Gamma * S,    Gamma = pi_v(y|c) / pi_v(y|c')

c is the recorded context of the text y, and c' the context in which version v sampled it. mu is the
engine's policy in c'. For FOREIGN text with a known source nu, c' is c, D is 1, and Gamma is
pi_v(y|c) / nu(y|c). D and S are those of each token, as for sampled text. Gamma is the product over
all text of a sequence with a known source, because a factor for each token would give another
gradient. It also weights the sequence's sampled tokens, because their advantage depends on the
text.

`guided` gives the text the old log-probability log pi_v(y|c) and the weight D min(Gamma, cap).
`anchor` gives it the weight 1, and log pi(y|c) under the weights before the first optimizer step on
the batch.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unstale.old_logps import OldLogps
from unstale.records import Batch, PlacedTokens, Provenance, token_positions
from unstale.trainer.rules import LossSpec


class PlacedScores(NamedTuple):
    """Old log-probabilities and weights of a batch's placed text.

    Placed text was not sampled in its context.
    """

    old_logp: Tensor
    """Old log-probability of each token of the text, `[T]`."""
    factor: Tensor
    """Weight of each token of the text, `[T]`, which corrects the discrepancy D. 0 if it was
    dropped.
    """
    log_gamma: Tensor
    """Logarithm of each sequence's Gamma (see the module), `[N]`. 0 if no sampled text of the
    sequence had its context edited, and no foreign text has a known source.
    """


def guided(batch: Batch, placed: PlacedTokens, route: OldLogps, rules: LossSpec) -> PlacedScores:
    """Compute old log-probabilities and weights of placed text, for `objective.placed` "guided".

    `route` is the method that computes `old_logp`. It does so in the recorded context and in the
    one in which the text was sampled, both under the version that sampled it. D is corrected as for
    sampled tokens.
    """
    empty = torch.empty(0)
    as_sampled = _as_sampled(batch, placed)
    here, index = as_sampled.select(as_sampled.sequences_with(as_sampled.sampled))
    logp = route.logps(here, empty)[0]
    old_logp = torch.zeros(len(batch.tokens), dtype=logp.dtype).index_put((index,), logp)
    foreign = placed.trained & (batch.provenance == Provenance.FOREIGN)
    factor = foreign.to(old_logp.dtype)
    source_logp = placed.source_logp.to(old_logp.dtype, copy=True)
    if any(placed.edits):
        source, places, origin = _in_source(as_sampled, placed)
        found = route.logps(source, empty)[0]
        factor[origin] = rules.correct(found, source).factor[places].to(factor.dtype)
        source_logp[origin] = found[places]
    log_ratio = (old_logp - source_logp).where(placed.trained, 0.0).double()
    log_gamma = torch.zeros(batch.num_sequences, dtype=torch.float64)
    log_gamma.index_add_(0, batch.sequence, log_ratio)
    return PlacedScores(old_logp, factor, log_gamma)


def _as_sampled(batch: Batch, placed: PlacedTokens) -> Batch:
    """Return the batch with its placed text as the sampled tokens.

    Its episodes get numbers below 0, so that no stored values of a route are used for them.
    """
    origin = torch.full_like(batch.provenance, int(Provenance.SAMPLED))
    return replace(
        batch,
        sampled=placed.trained,
        behavior_logp=placed.source_logp,
        version=placed.version,
        provenance=origin.where(placed.trained, batch.provenance),
        clean=torch.ones_like(batch.clean),
        episodes=tuple(-1 - i for i in range(batch.num_sequences)),
        stored=None,
        kept_sets=None,
    )


def _in_source(batch: Batch, placed: PlacedTokens) -> tuple[Batch, Tensor, Tensor]:
    """Return the placed text of a batch in the contexts in which it was sampled.

    There is one sequence for each edit of a sequence of the batch. The second result `[n]` has the
    places of the text's n tokens in these sequences, the third `[n]` their places in `batch`.
    """
    tokens: list[int] = []
    offsets, spans, origins = [0], [], []
    for (begin, end), places in zip(batch.spans(), placed.edits, strict=True):
        recorded = batch.tokens[begin:end].tolist()
        for edit in dict.fromkeys(edit for _, _, edit in places):
            own = [(start, stop) for start, stop, each in places if each == edit]
            move = len(tokens) + edit.shift
            tokens += edit.undo(recorded[: own[-1][1]])
            spans += [(move + start, move + stop) for start, stop in own]
            origins += [(begin + start, begin + stop) for start, stop in own]
            offsets.append(len(tokens))
    at, origin = token_positions(spans), token_positions(origins)

    def column(values: Tensor, other: float) -> Tensor:
        return torch.full((len(tokens),), other, dtype=values.dtype).index_put(
            (at,), values[origin]
        )

    count = len(offsets) - 1
    source = Batch(
        tokens=torch.tensor(tokens),
        offsets=tuple(offsets),
        sampled=column(batch.sampled, False),
        behavior_logp=column(batch.behavior_logp, 0),
        version=column(batch.version, -1),
        turn=column(torch.zeros_like(batch.turn), -1),
        provenance=column(batch.provenance, int(Provenance.ENVIRONMENT)),
        clean=column(batch.clean, True),
        advantage=column(batch.advantage, 0),
        episodes=tuple(-1 - batch.num_sequences - i for i in range(count)),
    )
    return source, at, origin
