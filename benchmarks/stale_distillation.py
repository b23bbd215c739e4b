"""How stale may distillation be? A small student and a teacher, in exact arithmetic.

    python -m benchmarks.stale_distillation

The student predicts the next of `VOCABULARY` tokens from the place and the last token; the teacher
also reads all earlier tokens, so the student cannot equal it. Every batch was sampled `lag` steps
ago, by an engine whose logits have a little noise (D). The result of a run is the KL of a whole
reply from student to teacher, summed over all replies without sampling.

Registered before the first run. The learning rate of a form is the best of `RATES` at lag 0, on
seeds of its own. A form tolerates a lag if its result, as a mean over `SEEDS` seeds, is at most 10%
above that of the same form at lag 0.

1. `sampled` with D S tolerates larger lags than `sampled` without a ratio.
2. `forward` tolerates larger lags than `sampled` with D S (AsyncOPD, arXiv 2606.24143).
3. `reverse` over the vocabulary tolerates every lag that `forward` does: neither has a ratio.
4. PPO's clip lowers what `sampled` reaches at a lag of 16.
"""

import itertools
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from unstale.algorithms.distillation import mixed_divergence, reverse_advantage
from unstale.algorithms.objectives import none, ppo_clip

VOCABULARY, LENGTH = 5, 4
BATCH, STEPS, SEEDS, PILOT = 64, 200, 12, 3
RATES = (1.0, 4.0, 16.0)
LAGS = (0, 4, 16, 64)
NOISE = 0.05
TOLERANCE = 1.1
REPLIES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIX = torch.stack(
    [
        REPLIES[:, :t] @ torch.tensor([VOCABULARY**i for i in range(t)], dtype=torch.long)
        for t in range(LENGTH)
    ],
    1,
)
LAST = torch.cat([torch.full((len(REPLIES), 1), VOCABULARY), REPLIES[:, :-1]], 1)
PLACE = torch.arange(LENGTH).expand(len(REPLIES), LENGTH)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the student's and teacher's distributions `[n, T, V]`, the tokens, `old_logp` and
`behavior_logp`. It returns the loss of each token, `[n, T]`.
"""


def chosen(distributions: Tensor, tokens: Tensor) -> Tensor:
    return distributions.gather(-1, tokens[..., None]).squeeze(-1)


def sampled(  # noqa: PLR0913 - the tensors of a loss
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor,
    old_logp: Tensor,
    behavior_logp: Tensor,
    *,
    weighted: bool = True,
    clip: bool = False,
) -> Tensor:
    """Return the loss with the advantage log q - log p. `weighted` weights by D and S."""
    logp = chosen(student, tokens)
    advantage = reverse_advantage(logp, chosen(teacher, tokens))
    if not weighted:
        return -advantage * logp
    surrogate = ppo_clip if clip else none
    return (old_logp - behavior_logp).exp() * surrogate(logp - old_logp, advantage).loss


def full(student: Tensor, teacher: Tensor, *_: Tensor, beta: float) -> Tensor:
    return mixed_divergence(student, teacher, beta=beta)


FORMS: dict[str, Loss] = {
    "sampled, D S": sampled,
    "sampled, D S, ppo_clip": partial(sampled, clip=True),
    "sampled, no ratio": partial(sampled, weighted=False),
    "reverse": partial(full, beta=1.0),
    "mixed, beta 0.5": partial(full, beta=0.5),
    "forward": partial(full, beta=0.0),
}


def result(logits: Tensor, taught: Tensor) -> float:
    """Return KL(student || teacher) of a reply, in nats."""
    logp = chosen(logits[PLACE, LAST].log_softmax(-1), REPLIES).sum(1)
    return float((logp.exp() * (logp - chosen(taught, REPLIES).sum(1))).sum())


def train(form: str, lag: int, rate: float, seed: int) -> float:
    """Return the result of one run. NaN counts as infinite."""
    random = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(LENGTH, VOCABULARY**LENGTH, VOCABULARY, generator=random).double()
    taught = table[PLACE, PREFIX].log_softmax(-1)
    logits = torch.randn(LENGTH, VOCABULARY + 1, VOCABULARY, generator=random).double()
    past = [logits.clone()] * (lag + 1)
    for _ in range(STEPS):
        old = past[0]
        engine = old + NOISE * torch.randn(old.shape, generator=random).double()
        behavior = chosen(engine[PLACE, LAST].log_softmax(-1), REPLIES)
        drawn = behavior.sum(1).exp().multinomial(BATCH, replacement=True, generator=random)
        where = PLACE[drawn], LAST[drawn]
        tokens = REPLIES[drawn]
        theta = logits.clone().requires_grad_()
        old_logp = chosen(old[where].log_softmax(-1), tokens)
        student = theta[where].log_softmax(-1)
        loss = FORMS[form](student, taught[drawn], tokens, old_logp, behavior[drawn]).mean()
        (slope,) = torch.autograd.grad(loss, theta)
        logits = logits - rate * slope
        past = [*past[1:], logits.clone()]
    found = result(logits, taught)
    return found if found == found else float("inf")


@cache
def rate_of(form: str) -> float:
    def mean(rate: float) -> float:
        return statistics.fmean(train(form, 0, rate, 1000 + seed) for seed in range(PILOT))

    return min(RATES, key=mean)


def main() -> None:
    torch.set_num_threads(1)
    write = sys.stdout.write
    write(f"| form | lr | {' | '.join(f'lag {lag}' for lag in LAGS)} | tolerates |\n")
    write("|---|" + "---|" * (len(LAGS) + 2) + "\n")
    for form in FORMS:
        rate, cells, means = rate_of(form), [], []
        for lag in LAGS:
            values = [train(form, lag, rate, seed) for seed in range(SEEDS)]
            means.append(statistics.fmean(values))
            error = statistics.stdev(values) / SEEDS**0.5
            cells.append(f"{means[-1]:.3f} ± {error:.3f}")
        within = [
            lag for lag, mean in zip(LAGS, means, strict=True) if mean <= TOLERANCE * means[0]
        ]
        write(f"| {form} | {rate:g} | {' | '.join(cells)} | {max(within)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
