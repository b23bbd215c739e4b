"""Promise: ratios over mu's kept sets are unbiased, and D has only numerics.

Nothing is sampled. Vocabulary 5, length 3: all sequences are enumerated in float64. The engine's mu
is a perturbed policy of which top-p keeps a part. Sets, log-probabilities and gradients are those
of the engine and of the trainer; the true gradient is written out here.

- the product of pi / mu times the sequence's score has the gradient of J, the reward of pi
  renormalised over the sets, whatever stands in for `old_logp`;
- over the whole vocabulary instead, it has not;
- D is 1 in float64 for pi_old with mu's logits;
- pi_old over the set that it would keep itself has another D: a token at the edge of the set
  changes the sum, or has no probability at all.
"""

import itertools

import torch
from torch import Tensor, nn

from unstale.engines.embedded.sampling import truncated
from unstale.kept_sets import KeptSets, Truncation
from unstale.model.head import LogpQuery, query_head

VOCABULARY, LENGTH = 5, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
LIMITS = Truncation(top_p=0.8)
REWARD = torch.sin(3.0 * torch.arange(len(SEQUENCES), dtype=torch.float64))


def noise(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def logits_of(table: Tensor) -> Tensor:
    """Return the logits `[125 * 3, 5]` before every token, from a table `[1 + 5 + 25, 5]`."""
    code = [SEQUENCES[:, 0] * 0, 1 + SEQUENCES[:, 0], 6 + SEQUENCES[:, 0] * 5 + SEQUENCES[:, 1]]
    return table[torch.stack(code, 1).flatten()]


def kept_by(table: Tensor) -> KeptSets:
    rows = logits_of(table)
    return truncated(rows, torch.ones(len(rows)), [LIMITS] * len(rows))[1]


def members(kept: KeptSets) -> Tensor:
    """Return `[125 * 3, 5]`: True for the tokens of each set."""
    sizes, ids = kept.to_tensors()
    inside = torch.zeros(len(sizes), VOCABULARY, dtype=torch.bool)
    inside[torch.repeat_interleave(sizes), ids.long()] = True
    return inside


def logps(table: Tensor, kept: KeptSets | None) -> Tensor:
    """Return `[125, 3]` by the trainer's code, 0 for sequences that mu cannot sample."""
    targets = SEQUENCES.flatten()
    rows = logits_of(table)
    possible = POSSIBLE.repeat_interleave(LENGTH).nonzero().squeeze(1)
    query = LogpQuery(targets[possible], 1.0, kept_sets=kept and kept.at(possible))
    found, _ = query_head(nn.Identity(), rows[possible], query)
    return rows.new_zeros(len(rows)).index_put((possible,), found).view(-1, LENGTH)


MU = noise(1, 31, VOCABULARY)
KEPT = kept_by(MU)
INSIDE = members(KEPT)[torch.arange(len(SEQUENCES) * LENGTH), SEQUENCES.flatten()]
POSSIBLE = INSIDE.view(-1, LENGTH).all(1)
"""`[125]`: True for the sequences of which every token is in its set."""


def truth(table: Tensor) -> Tensor:
    """Return the gradient of J, with the sets written as masks of the logits."""
    table = table.clone().requires_grad_()
    masked = logits_of(table).masked_fill(~members(KEPT), -torch.inf)
    logp = masked.log_softmax(-1)[torch.arange(len(masked)), SEQUENCES.flatten()].view(-1, LENGTH)
    chances = logp[POSSIBLE].sum(1).exp()
    (chances * REWARD[POSSIBLE]).sum().backward()
    assert table.grad is not None
    return table.grad


def estimate(table: Tensor, old: Tensor, kept: KeptSets | None) -> Tensor:
    """Return the expectation over mu of D times S times the score times the reward."""
    table = table.clone().requires_grad_()
    behavior = logps(MU, KEPT)
    logp = logps(table, kept)
    log_d, log_s = (old - behavior).sum(1), (logp - old).sum(1)
    weight = (log_d + log_s).exp().detach() * behavior.sum(1).exp()
    (weight * logp.sum(1) * REWARD)[POSSIBLE].sum().backward()
    assert table.grad is not None
    return table.grad


PI = MU + 0.3 * noise(2, 31, VOCABULARY)
OLD = MU + 0.1 * noise(3, 31, VOCABULARY)


def test_the_estimate_over_the_kept_sets_has_the_gradient_of_the_objective() -> None:
    assert 10 < POSSIBLE.sum() < len(SEQUENCES)
    for old in (logps(OLD, KEPT), logps(MU, KEPT), logps(PI, KEPT).detach()):
        torch.testing.assert_close(estimate(PI, old, KEPT), truth(PI), atol=1e-12, rtol=0)


def test_over_the_whole_vocabulary_the_estimate_is_biased() -> None:
    wrong = estimate(PI, logps(OLD, None), None)
    assert (wrong - truth(PI)).abs().max() > 1e-3


def test_d_is_one_for_the_weights_that_sampled() -> None:
    """The engine's own value is computed apart: masked logits and one softmax."""
    masked = logits_of(MU).masked_fill(~members(KEPT), -torch.inf).log_softmax(-1)
    behavior = masked[torch.arange(len(masked)), SEQUENCES.flatten()].view(-1, LENGTH)
    log_d = (logps(MU, KEPT) - behavior)[POSSIBLE]
    assert log_d.abs().max() < 1e-15 * 10


def test_pi_old_over_its_own_set_mixes_truncation_into_d() -> None:
    """Two tokens are nearly as probable, at the edge of the set. Rounding exchanges them."""
    mu = torch.tensor([[1.0, 0.5, 0.0001, 0.0, -2.0]], dtype=torch.float64)
    rounded = mu + torch.tensor([[0.0, 0.0, -0.0002, 0.0, 0.0]], dtype=torch.float64)
    limits = [Truncation(top_k=3)]
    kept, own = (truncated(each, torch.ones(1), limits)[1] for each in (mu, rounded))
    assert kept.ids.tolist() == [0, 1, 2] and own.ids.tolist() == [0, 1, 3]

    def logp(rows: Tensor, sets: KeptSets, token: int) -> Tensor:
        return query_head(
            nn.Identity(), rows, LogpQuery(torch.tensor([token]), 1.0, kept_sets=sets)
        )[0]

    numerics = logp(rounded, kept, 0) - logp(mu, kept, 0)
    assert numerics.abs() < 1e-4  # the size of the rounding
    wider = truncated(rounded, torch.ones(1), [Truncation(top_k=4)])[1]
    mixed = logp(rounded, wider, 0) - logp(mu, kept, 0)
    assert mixed < -0.1  # one more token in the sum, not numerics
    assert 2 not in own.ids  # a token that mu drew has no probability over pi_old's own set
