"""A factor on the loss of float16 passes, so that small gradients are not rounded to 0.

As in `torch.amp.GradScaler`, the factor is halved when a gradient is not finite, and doubled after
many steps with finite gradients.
"""

from collections.abc import Mapping
from typing import Any

import torch

FIRST, LARGEST = 2.0**16, 2.0**24
LEAST = 1.0
"""Smallest factor on the loss. If a gradient is not finite at this factor, the run ends with an
error.
"""
GROWTH_STEPS = 200
"""Number of optimizer steps in a row with finite gradients after which the factor is doubled.
torch's default of 2000 is too many for runs of a few thousand steps.
"""


class LossScale:
    """The factor on the loss. It is always 1 unless forward passes are in float16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_used = dtype == torch.float16
        self.value = FIRST if self._is_used else 1.0
        self._finite_steps = 0

    def absorbs(self, norm_is_finite: bool) -> bool:
        """Update the factor after a gradient. Return True if this optimizer step must be skipped.

        A step is skipped if the factor on the loss made the gradient overflow. Return False if the
        gradient is finite, or if it is not finite for another reason.
        """
        if not self._is_used:
            return False
        if norm_is_finite:
            self._finite_steps += 1
            if self._finite_steps % GROWTH_STEPS == 0:
                self.value = min(LARGEST, 2 * self.value)
            return False
        if self.value <= LEAST:
            return False
        self.value, self._finite_steps = max(LEAST, self.value / 2), 0
        return True

    def metrics(self) -> dict[str, float]:
        return {"trainer/loss_scale": self.value} if self._is_used else {}

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "finite_steps": self._finite_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self._finite_steps = state["value"], state["finite_steps"]
