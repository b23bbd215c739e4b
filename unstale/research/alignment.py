"""The alignment of distillation with success, at one token position.

At a prefix, pi_S is the student's distribution of the next token, pi_T the teacher's, and Q(a) the
success rate of the student if the next token is a. The gradient of the success by the student's
logits is pi_S (Q - sum pi_S Q). Distillation moves these logits by pi_T - pi_S if its loss is the
forward KL(pi_T || pi_S), and by -pi_S (log(pi_S / pi_T) - KL(pi_S || pi_T)) if it is the reverse
one. The cosine of gradient and movement is 1 if distillation raises the success as fast as
possible, and negative if it lowers it. From the abstract of "Unmasking On-Policy Distillation".

All functions take candidates for the next token in the last dimension, `[..., K]`.
Log-probabilities are first normalised over these candidates, as if there were no other tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor

Candidates = Float[Tensor, "*positions tokens"]
EQUAL = 1e-9
"""Largest absolute value at which a component of a direction counts as 0. The cosine of a direction
is NaN if all its components do.
"""


def success_direction(student_logp: Candidates, value: Candidates) -> Candidates:
    """Return the gradient of the expected `value` by the student's logits, `[..., K]`."""
    share = student_logp.softmax(-1)
    lowest = value.amin(-1, keepdim=True)
    relative = value - lowest  # exactly 0 if all values are equal
    return share * (relative - (share * relative).sum(-1, keepdim=True))


def forward_kl_direction(student_logp: Candidates, teacher_logp: Candidates) -> Candidates:
    """Return the negative gradient of KL(pi_T || pi_S) by the student's logits, `[..., K]`."""
    return teacher_logp.softmax(-1) - student_logp.softmax(-1)


def reverse_kl_direction(student_logp: Candidates, teacher_logp: Candidates) -> Candidates:
    """Return the negative gradient of KL(pi_S || pi_T) by the student's logits, `[..., K]`.

    All `teacher_logp` must be finite, so each candidate must be possible for the teacher.
    """
    student = student_logp.log_softmax(-1)
    ratio = student - teacher_logp.log_softmax(-1)
    share = student.exp()
    return -share * (ratio - (share * ratio).sum(-1, keepdim=True))


def teacher_advantage(
    student_logp: Candidates, teacher_logp: Candidates, value: Candidates
) -> Float[Tensor, "*positions"]:
    """Return the expected `value` of the teacher's next token minus that of the student's.

    The student continues after both.
    """
    return ((teacher_logp.softmax(-1) - student_logp.softmax(-1)) * value).sum(-1)


def cosine(one: Candidates, other: Candidates) -> Float[Tensor, "*positions"]:
    """Return the cosine of two directions `[..., K]` at each position; NaN where one is 0."""
    norms = one.norm(dim=-1) * other.norm(dim=-1)
    found = (one * other).sum(-1) / norms.clamp(min=torch.finfo(one.dtype).tiny)
    is_zero = (one.abs().amax(-1) <= EQUAL) | (other.abs().amax(-1) <= EQUAL)
    return torch.where(is_zero, torch.nan, found)
