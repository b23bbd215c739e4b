"""Step metrics."""

import torch
from torch import Tensor

from unstale.algorithms.corrections import Control
from unstale.records import Batch

MAX_POINTS = 256
"""(log D, log S, lag) points kept of one batch, evenly spread over its action tokens."""


class StepMetrics:
    """What one batch came to. Action tokens only."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.now_tokens = self.tokens = self.run_tokens = self.micro_batches = 0
        self.prepare_s = self.seconds = self.lr = 0.0
        self.num_parts = 0
        self._summed = {"objective/loss": 0.0}
        self.grad_norms: list[float] = []
        self._judged: list[dict[str, Tensor]] = []
        self._rows: list[dict[str, Tensor]] = []

    def add(self, name: str, value: float) -> None:
        """To a sum over the sequences of one optimizer step; reported as the mean over the steps of the batch."""
        self._summed[name] = self._summed.get(name, 0.0) + value

    def judge(
        self, batch: Batch, old_logp: Tensor, control: Control, *, exact: Tensor, lag: Tensor
    ) -> None:
        """What the route and the discrepancy control said, of every action token that has a gradient."""
        own = batch.sampled
        log_d = (old_logp - batch.behavior_logp)[own]
        row = {"log_d": log_d, "lag": lag[own], "keep": control.keep[own].double()}
        self._judged.append(
            row | {"weight": control.factor[own].double(), "exact": exact[own].double()}
        )

    def learn(
        self, batch: Batch, old_logp: Tensor, *, log_s: Tensor, lag: Tensor, clipped: Tensor
    ) -> None:
        """Of one micro-batch, when its loss was formed: the tokens that were run."""
        own = batch.sampled
        row = {"log_d": (old_logp - batch.behavior_logp)[own], "log_s": log_s[own]}
        self._rows.append(row | {"lag": lag[own], "clipped": clipped[own].double()})

    @property
    def kept_share(self) -> float:
        """Share of the action tokens judged so far that the discrepancy control kept."""
        return (
            torch.cat([row["keep"] for row in self._judged]).mean().item() if self._judged else 1.0
        )

    def metrics(self) -> dict[str, float]:
        figures = self.figures | {
            name: value / max(1, self.num_parts) for name, value in self._summed.items()
        }
        figures |= {
            "trainer/tokens_with_gradient": 0.0,
            "objective/clip_share": 0.0,
            "old_logps/prepare_s": self.prepare_s,
            "trainer/grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
            "trainer/lr": self.lr,
            "trainer/microbatches": float(self.micro_batches),
            "trainer/sequence_tokens": float(self.tokens),
            "trainer/forward_tokens": float(self.run_tokens),
            "trainer/update_s": self.seconds,
            "trainer/tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
        }
        if self._judged:  # an inline route is asked about nothing when every sequence is idle
            judged = _columns(self._judged)
            figures |= {
                "trainer/tokens_with_gradient": float(len(judged["lag"])),
                "old_logps/exact_share": judged["exact"].mean().item(),
                "correction/kept_share": judged["keep"].mean().item(),
                "correction/weight_mean": judged["weight"].mean().item(),
                **_sizes("correction/log_d", judged["log_d"], judged["lag"]),
            }
        if self._rows:
            column = _columns(self._rows)
            figures["objective/clip_share"] = (
                column["clipped"].sum().item() / figures["trainer/tokens_with_gradient"]
            )
            figures |= _sizes("objective/log_s", column["log_s"], column["lag"])
        return figures

    def points(self) -> list[dict[str, float]]:
        if not self._rows:
            return []
        column = _columns(self._rows)
        chosen = torch.linspace(
            0, len(column["lag"]) - 1, min(MAX_POINTS, len(column["lag"]))
        ).long()
        rows = zip(
            *(column[name][chosen].tolist() for name in ("log_d", "log_s", "lag")), strict=True
        )
        return [{"log_d": d, "log_s": s, "lag": lag} for d, s, lag in rows]


def _columns(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _sizes(name: str, log_ratio: Tensor, lag: Tensor) -> dict[str, float]:
    """Mean, mean size and its 99th percentile (nearest rank), and the mean size of each lag."""
    size = log_ratio.double().abs()
    figures = {
        f"{name}_mean": log_ratio.double().mean().item(),
        f"{name}_abs_mean": size.mean().item(),
        f"{name}_abs_p99": size.sort().values[round(0.99 * (len(size) - 1))].item(),
    }
    return figures | {
        f"{name}_abs_mean/lag_{age}": size[lag == age].mean().item()
        for age in lag.unique().tolist()
    }
