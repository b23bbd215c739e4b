"""Generalised advantage estimation (GAE) and the loss of its critic, as functions of tensors.

An action is one sampled token, or one turn. For each action, the critic reads the tokens before it,
and forecasts the discounted sum of the rewards from this action on. Tokens between actions that the
policy did not sample are not discounted. Tensors are `[T]`, with packed sequences end to end, or
`[n]` with one entry for each action.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def action_starts(
    sampled: Bool[Tensor, "T"],
    turn: Int[Tensor, "T"],
    *,
    sequence: Int[Tensor, "T"],
    over: str,
) -> Bool[Tensor, "T"]:
    """Return a mask `[T]` of the first token of each action.

    An action is a turn if `over` is "turn", otherwise a sampled token.
    """
    if over == "token":
        return sampled
    place = torch.stack([sequence, turn])
    begins = torch.ones_like(sampled)
    begins[1:] = (place[:, 1:] != place[:, :-1]).any(0)
    return sampled & begins


def gae_advantage(
    rewards: Float[Tensor, "n"],
    values: Float[Tensor, "n"],
    *,
    sequence: Int[Tensor, "n"],
    discount: float,
    lam: float,
) -> Float[Tensor, "n"]:
    """Return the advantage of each action (arXiv 1506.02438, equation 16), in float64.

    `values` V are the critic's forecasts. With the error `delta_k = r_k + discount * V_{k+1} -
    V_k`, the advantage is `A_k = delta_k + discount * lam * A_{k+1}`. V is 0 after the last action
    of a sequence. The advantage plus V is the target to which the critic is trained. With `lam` 1
    the target is the discounted sum of rewards, whatever the forecasts.

    >>> ones = torch.ones(3, dtype=torch.float64)
    >>> whole = torch.zeros(3, dtype=torch.long)
    >>> gae_advantage(ones, 0.5 * ones, sequence=whole, discount=1.0, lam=0.5).tolist()
    [1.625, 1.25, 0.5]
    """
    rewards, values = rewards.double(), values.double()
    if not len(rewards):
        return rewards
    _, row, count = sequence.unique_consecutive(return_inverse=True, return_counts=True)
    last = count.cumsum(0)[row] - 1
    place = torch.arange(len(rewards), device=rewards.device)
    following = torch.where(place == last, 0.0, values.roll(-1))
    # All sequences end in the last column, so one step of the loop serves all of them.
    column = place - last - 1
    errors = rewards.new_zeros(len(count), int(count.max()))
    errors[row, column] = rewards + discount * following - values
    for k in range(errors.shape[1] - 2, -1, -1):
        errors[:, k] += discount * lam * errors[:, k + 1]
    return errors[row, column]


def value_loss(
    value: Float[Tensor, "n"],
    before: Float[Tensor, "n"],
    target: Float[Tensor, "n"],
    *,
    clip: float,
) -> Float[Tensor, "n"]:
    """Return half of the squared error of each forecast, with PPO's clipping of values.

    `before` are the forecasts at the start of the batch. If a forecast differs from `before` by
    more than `clip`, the loss is also computed for `before` plus or minus `clip`, and the larger
    loss is returned. With `clip` 0 no forecast is clipped.
    """
    error = (value - target).square()
    if clip:
        held = torch.minimum(torch.maximum(value, before - clip), before + clip)
        error = torch.maximum(error, (held - target).square())
    return 0.5 * error
