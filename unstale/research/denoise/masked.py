"""Steps of masked diffusion. A step puts tokens into some masked places of a text or a plan.

Places are drawn one after another without replacement (Plackett-Luce), and the tokens of these
places independently. So the log-probability of a step is exact. It is the sum of the
log-probabilities of its places in their order, and of their tokens.
"""

import torch
from torch import Generator, Tensor

NEVER = -1e9
"""Logit of a place that cannot be drawn."""


def gumbel(random: Generator, places: int, tokens: int) -> Tensor:
    """Return the noise of one step: for places, and for the tokens of each place, `[places, 1 +
    tokens]`.
    """
    uniform = torch.rand(places, 1 + tokens, generator=random).clamp(min=1e-9)
    return -(-uniform.log()).log()


def drawn(
    tokens: Tensor, places: Tensor, sizes: Tensor, state: Tensor, noise: Tensor | None
) -> Tensor:
    """Fill some masked places of texts or plans, and return actions `[N, 2, P]`.

    Row 0 of an action is the state after it. Row 1 has 0, 1 and so on for the places in the order
    in which they were filled, and -1 for others.

    `tokens` are log-probabilities `[N, P, V]`, `places` logits `[N, P]`, `sizes` the numbers of
    places to draw `[N]`, and `state` is `[N, P]`. `noise` is a result of `gumbel`. Without noise,
    the likeliest places and tokens are taken.
    """
    if noise is not None:
        tokens, places = tokens + noise[:, :, 1:], places + noise[:, :, 0]
    order = places.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    order = torch.where(order < sizes[:, None], order, -1)
    return torch.stack([torch.where(order >= 0, tokens.argmax(2), state), order], 1)


def token_logp(tokens: Tensor, action: Tensor) -> Tensor:
    """Return the log-probabilities `[N]` of the tokens of actions `[N, 2, P]`."""
    after, order = action.unbind(1)
    chosen = after.clamp(max=tokens.shape[2] - 1)[:, :, None]
    return torch.where(order >= 0, tokens.gather(2, chosen).squeeze(2), 0.0).sum(1)


def place_logp(places: Tensor, action: Tensor) -> Tensor:
    """Return the log-probabilities `[N]` of the places of actions, in their order."""
    order = action[:, 1]
    total = torch.zeros_like(places[:, 0])
    for rank in range(int(order.max()) + 1):
        chosen = order == rank
        total = total + torch.where(chosen, places.log_softmax(1), 0.0).sum(1)
        places = places.masked_fill(chosen, NEVER)
    return total
