"""Metrics of one batch, over its action tokens.

`log_d = old_logp - behavior_logp` is the discrepancy, `log_s = logp - old_logp` the staleness. A
figure that no token defines is NaN, so that every name is in every row. docs/metrics.md lists all
names.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unstale.algorithms.corrections import LOG_LIMIT, Control, bounded_exp
from unstale.records import Batch

MAX_POINTS = 256
"""Points `(log_d, log_s, lag)` kept of one batch for plots, evenly spaced over its tokens."""

ENTROPY_SAMPLE = 1024
"""Most tokens of a batch for which entropy is computed.

It is costly: it needs all logits of a token.
"""

_NO_TOKENS = torch.empty(0)


class StepMetrics:
    """Collects the metrics of one batch while its optimizer steps run."""

    def __init__(self, *, action_tokens: int = 0, tokens_with_gradient: int = 0) -> None:
        """Count tokens of the whole batch, and of its sequences that have a gradient."""
        self.extra: dict[str, float] = {}
        """Further metrics by name."""
        self.action_tokens = action_tokens
        self.tokens_with_gradient = tokens_with_gradient
        self.score_tokens = 0
        """Tokens of forward passes for a route that needs current log-probabilities."""
        self.sequence_tokens = 0
        self.forward_tokens = 0
        """Like `sequence_tokens`, but a prompt that siblings share counts once for each pass."""
        self.microbatches = 0
        self.num_steps = 0
        self.prepare_s = 0.0
        self.update_s = 0.0
        self.lr = 0.0
        self.loss = 0.0
        self.grad_norms: list[float] = []
        self._corrected: list[dict[str, Tensor]] = []
        self._trained: list[dict[str, Tensor]] = []
        self._reference_ratios: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._tokens_run = 0

    def add_correction(
        self, batch: Batch, old_logp: Tensor, control: Control, *, exact: Tensor, lag: Tensor
    ) -> None:
        """Record old log-probabilities and the correction of every scored action token."""
        sampled = batch.sampled
        self._corrected.append(
            {
                "log_d": (old_logp - batch.behavior_logp)[sampled],
                "lag": lag[sampled],
                "keep": control.keep[sampled].double(),
                "weight": control.factor[sampled].double(),
                "exact": exact[sampled].double(),
            }
        )

    def add_forward(
        self, batch: Batch, logp: Tensor, old_logp: Tensor, *, lag: Tensor, clipped: Tensor
    ) -> None:
        """Record the action tokens of one forward pass of the loss."""
        sampled = batch.sampled
        self._trained.append(
            {
                "log_d": (old_logp - batch.behavior_logp)[sampled],
                "log_s": (logp - old_logp)[sampled],
                "lag": lag[sampled],
                "clipped": clipped[sampled].double(),
            }
        )

    def add_reference(self, log_ratio: Tensor) -> None:
        """Record `reference_logp - logp` of action tokens."""
        self._reference_ratios.append(log_ratio)

    def add_entropy(self, entropy: Tensor) -> None:
        """Record the entropies of some action tokens, in nats."""
        self._entropies.append(entropy)

    def entropy_sample(self, sampled: Tensor) -> Tensor:
        """Return `[T]` bool: the action tokens of a forward pass whose entropy is computed.

        Over a batch these are every n-th of its tokens with a gradient, at most `ENTROPY_SAMPLE`.
        """
        every = max(1, math.ceil(self.tokens_with_gradient / ENTROPY_SAMPLE))
        positions = sampled.nonzero().squeeze(1)
        chosen = torch.zeros_like(sampled)
        chosen[positions[-self._tokens_run % every :: every]] = True
        self._tokens_run += len(positions)
        return chosen

    @property
    def kept_share(self) -> float:
        """The share of scored action tokens that the correction kept, 1 before the first."""
        if not self._corrected:
            return 1.0
        return torch.cat([columns["keep"] for columns in self._corrected]).mean().item()

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name."""
        num_steps = max(1, self.num_steps)
        corrected = _concatenate(self._corrected, ("log_d", "lag", "keep", "weight", "exact"))
        trained = _concatenate(self._trained, ("log_d", "log_s", "lag", "clipped"))
        log_d, log_s = trained["log_d"].double(), trained["log_s"].double()
        clipped = trained["clipped"].sum().item()
        return {
            "trainer/action_tokens": float(self.action_tokens),
            "trainer/tokens_with_gradient": float(self.tokens_with_gradient),
            "trainer/sequence_tokens": float(self.sequence_tokens),
            "trainer/forward_tokens": float(self.forward_tokens),
            "trainer/microbatches": float(self.microbatches),
            "trainer/grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
            "trainer/lr": self.lr,
            "trainer/update_s": self.update_s,
            "trainer/tokens_per_s": self.sequence_tokens / self.update_s if self.update_s else 0.0,
            "old_logps/prepare_s": self.prepare_s,
            "old_logps/exact_share": _mean(corrected["exact"]),
            "correction/kept_share": _mean(corrected["keep"]),
            "correction/weight_mean": _mean(corrected["weight"]),
            "correction/d_ess_share": effective_sample_size(corrected["log_d"]),
            **_kl("correction/kl", corrected["log_d"]),
            **_log_ratio("correction/log_d", corrected["log_d"], corrected["lag"]),
            "objective/loss": self.loss / num_steps,
            "objective/clip_share": clipped / max(1, self.tokens_with_gradient),
            "objective/s_ess_share": effective_sample_size(log_s),
            **_kl("objective/kl", log_s),
            **_log_ratio("objective/log_s", trained["log_s"], trained["lag"]),
            "policy/entropy_mean": _mean(torch.cat([_NO_TOKENS, *self._entropies])),
            "policy/ds_ess_share": effective_sample_size(log_d + log_s),
            **_kl("policy/kl_behavior", log_d + log_s),
            **_kl("policy/kl_reference", torch.cat([_NO_TOKENS, *self._reference_ratios])),
            **self.extra,
        }

    def points(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of at most `MAX_POINTS` tokens."""
        trained = _concatenate(self._trained, ("log_d", "log_s", "lag"))
        num_tokens = len(trained["lag"])
        if not num_tokens:
            return []
        chosen = torch.linspace(0, num_tokens - 1, min(MAX_POINTS, num_tokens)).long()
        log_d, log_s, lag = (trained[name][chosen].tolist() for name in ("log_d", "log_s", "lag"))
        return [
            {"log_d": d, "log_s": s, "lag": age}
            for d, s, age in zip(log_d, log_s, lag, strict=True)
        ]


def kl_estimates(log_ratio: Tensor) -> tuple[float, float]:
    """Return the k1 and k3 estimates of KL(q || p), in nats.

    `log_ratio` is r = log p - log q of tokens drawn from q. k1 is the mean of -r and k3 the mean of
    exp(r) - 1 - r (joschu.net/blog/kl-approx.html).
    """
    r = log_ratio.double()
    return _mean(-r), _mean(bounded_exp(r) - 1 - r)


def effective_sample_size(log_ratio: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2) for the weights `w = exp(log_ratio)`, clamped as in the loss.

    It is 1 if all weights are equal and 1/n if one token dominates. NaN without tokens.
    """
    if not len(log_ratio):
        return math.nan
    x = log_ratio.double().clamp(-LOG_LIMIT, LOG_LIMIT)
    share = (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp() / len(x)
    return share.item()


def _concatenate(rows: list[dict[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    if not rows:
        return dict.fromkeys(names, _NO_TOKENS)
    return {name: torch.cat([row[name] for row in rows]) for name in names}


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _kl(name: str, log_ratio: Tensor) -> dict[str, float]:
    k1, k3 = kl_estimates(log_ratio)
    return {f"{name}_k1": k1, f"{name}_k3": k3}


def _log_ratio(name: str, log_ratio: Tensor, lag: Tensor) -> dict[str, float]:
    """Return mean, mean size, 99th percentile of the size (nearest rank), and mean size by lag."""
    size = log_ratio.double().abs()
    p99 = math.nan
    if len(size):
        p99 = size.sort().values[round(0.99 * (len(size) - 1))].item()
    metrics = {
        f"{name}_mean": _mean(log_ratio.double()),
        f"{name}_abs_mean": _mean(size),
        f"{name}_abs_p99": p99,
    }
    for age in lag.unique().tolist():
        metrics[f"{name}_abs_mean/lag_{age}"] = _mean(size[lag == age])
    return metrics
