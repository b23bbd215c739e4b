"""Numbers that other trainers computed from one small batch, and the same batch for this library.

`tools/peer_vectors.py` ran the peers' functions and wrote `tests/data/peers.json`, which names
their commits. The batch has five sequences of nine places: up to three turns, with text between
them and padding at the end. Numbers are float64, with 14 digits.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.records import Batch, Provenance
from unstale.techniques.distil import Distil, DistilConfig
from unstale.trainer.rules import LossSpec

_DATA = json.loads((Path(__file__).parents[1] / "data" / "peers.json").read_text())

SINGLE = {"rtol": 1e-6, "atol": 1e-6}
"""Tolerances where a peer computes in float32."""
DOUBLE = {"rtol": 1e-10, "atol": 1e-10}
UNCORRECTED = CorrectionConfig(mode="none")
BY_D = CorrectionConfig(mode="truncate", high=1e9)


def _tensor(values: Any) -> Tensor:
    found = torch.tensor(values)
    return torch.tensor(values, dtype=torch.float64) if found.is_floating_point() else found


def made_by(peer: str, name: str) -> dict[str, Tensor]:
    """Return what a peer's function returned, such as `loss` and `gradient`."""
    return {key: _tensor(values) for key, values in _DATA[peer][name].items()}


INPUTS = {name: _tensor(values) for name, values in _DATA["inputs"].items()}
TURN = INPUTS["turn"]
"""The turn of each token, `[5, 9]`, and -1 for text between turns and for padding."""
SAMPLED = TURN >= 0
COUNT = int(SAMPLED.sum())
SEQUENCE = torch.arange(len(TURN))[:, None].expand_as(TURN)
BEHAVIOR, OLD, NOW = (INPUTS[name] for name in ("behavior_logp", "old_logp", "logp"))
ADVANTAGE = INPUTS["advantage"][:, None].expand_as(NOW)


def the_batch(behavior_logp: Tensor = BEHAVIOR, advantage: Tensor = ADVANTAGE) -> Batch:
    rows, length = TURN.shape
    size, sampled = rows * length, SAMPLED.flatten()
    return Batch(
        tokens=torch.zeros(size, dtype=torch.long),
        offsets=tuple(range(0, size + 1, length)),
        sampled=sampled,
        behavior_logp=behavior_logp.flatten(),
        version=torch.where(sampled, 0, -1),
        turn=TURN.flatten(),
        provenance=torch.where(sampled, int(Provenance.SAMPLED), int(Provenance.ENVIRONMENT)),
        clean=torch.ones(size, dtype=torch.bool),
        advantage=torch.where(sampled, advantage.flatten(), 0.0),
        episodes=tuple(range(rows)),
    )


def our_loss(  # noqa: PLR0913 - three policies
    objective: ObjectiveConfig,
    *,
    correction: CorrectionConfig = UNCORRECTED,
    old_logp: Tensor = OLD,
    logp: Tensor = NOW,
    batch: Batch | None = None,
    distil: DistilConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return this library's loss, a mean over sampled tokens, and its gradient by `logp` `[5, 9]`.

    With `old_logp = BEHAVIOR`, it is the loss of the route `rollout`.
    """
    batch, rules = batch or the_batch(), LossSpec(correction, objective)
    old, logp = old_logp.flatten(), logp.clone().requires_grad_()
    of_tokens = logp.flatten()
    if distil:
        taught = INPUTS["teacher_logp"].flatten()
        batch = Distil(distil).rewarded(batch, taught, of_tokens.detach())
    found = rules.correct(old, batch)
    factor = rules.cap(found.factor, of_tokens.detach(), batch)
    norm = rules.norm(batch, found.keep)
    loss = (norm * factor * rules.surrogate(of_tokens, old, batch).loss).sum()
    (slope,) = torch.autograd.grad(loss, logp)
    return loss.detach(), slope


def corrected(
    correction: CorrectionConfig, *, old_logp: Tensor = OLD, behavior_logp: Tensor = BEHAVIOR
) -> tuple[Tensor, Tensor]:
    """Return which tokens a correction keeps, and the weight of each, 0 if dropped: `[5, 9]`."""
    batch = the_batch(behavior_logp)
    found = LossSpec(correction, ObjectiveConfig()).correct(old_logp.flatten(), batch)
    return found.keep.reshape(TURN.shape), found.factor.reshape(TURN.shape)


def close(ours: Tensor, theirs: Tensor, tolerance: dict[str, float] = DOUBLE) -> None:
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, **tolerance)
