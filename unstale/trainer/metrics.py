"""Metrics of one batch, over the tokens that the policy sampled.

Replayed tokens (already trained on in an earlier batch) have separate metrics, whose names begin
with `replay/`. `log_d` is `old_logp - behavior_logp`, and `log_s` is `logp - old_logp`. A metric
without tokens is NaN, so that every step has the same names. docs/metrics.md defines all metrics.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unstale.algorithms.corrections import LOG_LIMIT, CorrectionWeights, bounded_exp, has_behavior
from unstale.algorithms.objectives import Surrogate
from unstale.records import Batch, nearest_rank
from unstale.trainer.token_log import TokenLog

MAX_POINTS = 256
"""Largest number of points `(log_d, log_s, lag)` of one batch that are kept for plots. They are
evenly spaced over its tokens.
"""

ENTROPY_SAMPLE = 1024
"""Largest number of tokens of a batch for which the entropy is computed. An entropy is costly,
because it needs the logits of the whole vocabulary.
"""


_REPLAY = "replayed_"
"""Prefix of the names under which values of replayed tokens are recorded."""


class StepMetrics:
    """A collector of the metrics of one batch, which receives values while its steps run."""

    def __init__(
        self,
        *,
        action_tokens: int = 0,
        tokens_with_gradient: int = 0,
        replayed_with_gradient: int = 0,
        replays: bool = False,
        tokens: TokenLog | None = None,
    ) -> None:
        """Start the metrics of a batch.

        The first three arguments are numbers of sampled tokens: in all sequences, in sequences with
        a gradient, and in replayed sequences with a gradient. `replays` is True if the run trains
        on groups several times. `tokens` collects values of single tokens for the journal.
        """
        self.tokens = tokens or TokenLog()
        self.epochs = 1
        """Number of times that the batch is trained on. Clipped tokens are counted each time."""
        self.extra: dict[str, float] = {}
        """Metrics from other components, by name, which are reported with those of the batch."""
        self.action_tokens = action_tokens
        self.tokens_with_gradient = tokens_with_gradient
        self.replayed_with_gradient = replayed_with_gradient
        self.replays = replays
        self.places = False
        """True if the run trains on text that was placed into replies instead of being sampled
        there.
        """
        self.placed_tokens = 0
        """Number of tokens in replies that were not sampled in their context, with a loss or
        without.
        """
        self.expected_tokens = tokens_with_gradient
        """The number of tokens with a gradient in the whole batch. It is an estimate while only a
        part of the batch is known.
        """
        self.fresh_tokens = 0
        """Number of tokens, contexts included, in sequences that were not trained on in an earlier
        batch.
        """
        self.score_tokens = 0
        """Number of tokens in forward passes of the current weights that were needed for
        `old_logp`.
        """
        self.sequence_tokens = 0
        self.forward_tokens = 0
        """Number of tokens in forward passes of the loss. A prompt that sequences of one pass share
        counts once.
        """
        self.microbatches = 0
        self.num_steps = 0
        self.prepare_s = 0.0
        self.update_s = 0.0
        self.lr = 0.0
        self.losses: list[float] = []
        """The loss of each forward pass of this batch."""
        self.imbalance = 1.0
        """The division of the last optimizer step's tokens among ranks: the largest number of
        tokens that a rank ran, divided by the mean.
        """
        self.grad_norms: list[float] = []
        """The gradient norm of each optimizer step. NaN for a float16 gradient that overflowed."""
        self.skipped_steps = 0
        """Number of optimizer steps that changed no weight, because of an overflow, a technique or
        a critic's warm-up.
        """
        self._moved = torch.zeros(3, dtype=torch.float64)
        """The results of `Masters.moved`, summed over optimizer steps."""
        self._log_weights: list[float] = []
        """The logarithm of current policy / engine's policy, for each sequence of the current
        step.
        """
        self._taken = 0
        """Number of tensors of `log_s` that `take_kl` has already read."""
        self._values: defaultdict[str, list[Tensor]] = defaultdict(list)
        """Values of sampled tokens, by name. Each call that records values adds one tensor to a
        list.
        """
        self.tokens_run = 0
        """Number of sampled tokens in forward passes of the loss so far. `entropy_sample` uses it
        to choose every n-th token of the batch.
        """

    def add_correction(
        self,
        batch: Batch,
        old_logp: Tensor,
        correction: CorrectionWeights,
        *,
        exact: Tensor,
        lag: Tensor,
    ) -> None:
        """Record old log-probabilities and corrections of a batch's sampled tokens, `[T]` each.

        `exact` marks exact values of `old_logp`. `lag` is in batches.
        """
        self._add(
            batch,
            scored_log_d=old_logp - batch.behavior_logp,
            scored_lag=lag,
            keep=correction.keep.double(),
            weight=correction.factor.double(),
            exact=exact.double(),
        )

    def add_forward(
        self, batch: Batch, logp: Tensor, old_logp: Tensor, *, lag: Tensor, surrogate: Surrogate
    ) -> None:
        """Record values of the sampled tokens of one forward pass of the loss, `[T]` each."""
        self._add(
            batch,
            log_d=old_logp - batch.behavior_logp,
            log_s=logp - old_logp,
            lag=lag,
            clipped_low=surrogate.clipped_low,
            clipped_high=surrogate.clipped_high,
        )

    def add_log_weights(self, batch: Batch, logp: Tensor) -> None:
        """Record the logarithm of current policy / engine's policy of each sequence in `batch`.

        It is summed over the sequence's sampled tokens. `logp` `[T]` are the current
        log-probabilities.
        """
        log_ratio = logp.double() - batch.behavior_logp.double()
        log_ratio = torch.where(has_behavior(batch.provenance), log_ratio, 0.0)
        total = log_ratio.new_zeros(batch.num_sequences).index_add(0, batch.sequence, log_ratio)
        self._log_weights += total.tolist()

    def take_log_weights(self) -> list[float]:
        """Return the values that `add_log_weights` recorded since the last call."""
        taken, self._log_weights = self._log_weights, []
        return taken

    def take_kl(self) -> tuple[float, float]:
        """Return two k3 estimates of KL(pi_old || pi) per token, in nats.

        The first is over all tokens recorded since the last call, the second over those with a lag
        of one batch. NaN if there is no such token.
        """
        log_s = torch.cat([torch.empty(0), *self._values["log_s"][self._taken :]])
        lag = torch.cat([torch.empty(0), *self._values["lag"][self._taken :]])
        self._taken = len(self._values["log_s"])
        return kl_estimates(log_s)[1], kl_estimates(log_s[lag == 1])[1]

    def add_placed(self, kept: Tensor, log_gamma: Tensor, truncated: Tensor) -> None:
        """Record text that was placed into replies and has a loss.

        `kept` `[T]` bool has its tokens. For each of n sequences with such text, `log_gamma` `[n]`
        is the log of its factor Gamma (see `trainer.placed`), and `truncated` `[n]` is True if
        Gamma was capped.
        """
        self._values["placed_kept"].append(kept.sum().reshape(1))
        self._values["placed_log_gamma"].append(log_gamma.double())
        self._values["placed_truncated"].append(truncated.double())

    def add_reference(self, log_ratio: Tensor) -> None:
        """Record `reference_logp - logp` of sampled tokens, for the KL divergence metric."""
        self._values["reference_log_ratio"].append(log_ratio)

    def add_divergence(self, divergence: Tensor) -> None:
        """Record the divergence from a teacher at sampled tokens, in nats.

        It may be an estimate.
        """
        self._values["divergence"].append(divergence)

    def count(self, batch: Batch) -> None:
        """Count the tokens of a batch, or of some of its groups."""
        self.action_tokens += int(batch.sampled.sum())
        self.placed_tokens += int(batch.placed.given.sum()) if batch.placed else 0
        self.fresh_tokens += len((batch.select_fresh()[0] if batch.stored else batch).tokens)

    def count_gradient(self, trained: Batch) -> None:
        """Count the sampled tokens of `trained`, which has only sequences with a gradient."""
        self.tokens_with_gradient += int(trained.sampled.sum())
        self.replayed_with_gradient += int(trained.replayed.sum())
        self.expected_tokens = self.tokens_with_gradient

    def expect(self, times: float) -> None:
        """Set the expected number of tokens with a gradient: `times` the number counted so far."""
        self.expected_tokens = math.ceil(times * self.tokens_with_gradient)

    def add_moved(self, sums: Tensor) -> None:
        """Add the three sums that `Masters.moved` returned after an optimizer step."""
        self._moved += sums

    def _of_rounding(self) -> dict[str, float]:
        moved, due, sample = self._moved.tolist()
        if not sample:
            return {}
        return {
            "trainer/moved_weight_share": moved / sample,
            "trainer/due_weight_share": due / sample,
        }

    def add_entropy(self, entropy: Tensor, *, every: int = 1) -> None:
        """Record entropies in nats. Each represents `every` sampled tokens."""
        self._values["entropy"].append(entropy)
        self._values["entropy_every"].append(torch.full_like(entropy, every))

    @property
    def entropy_every(self) -> int:
        """The number n, if the entropy is computed for every n-th token with a gradient.

        It is chosen so that there are at most `ENTROPY_SAMPLE` such tokens in a batch.
        """
        return max(1, math.ceil(self.expected_tokens / ENTROPY_SAMPLE))

    def entropy_sample(self, sampled: Tensor) -> Tensor:
        """Return the tokens of a forward pass for which the entropy is computed, as a mask `[T]`.

        Every n-th token of `sampled` `[T]` is chosen, counted over all passes of the batch
        (`entropy_every`).
        """
        every = self.entropy_every
        positions = sampled.nonzero().squeeze(1)
        chosen = torch.zeros_like(sampled)
        chosen[positions[-self.tokens_run % every :: every]] = True
        self.tokens_run += len(positions)
        return chosen

    def of_passes(self) -> "StepMetrics":
        """Return an empty collector for the passes of an optimizer step, for `add_passes`."""
        tokens = self.tokens.of_passes(max(0, self.num_steps - 1))
        passes = StepMetrics(tokens_with_gradient=self.tokens_with_gradient, tokens=tokens)
        passes.expected_tokens = self.expected_tokens
        passes.tokens_run = self.tokens_run
        return passes

    def add_passes(self, ranks: "Sequence[StepMetrics]") -> None:
        """Add the metrics of an optimizer step's passes, one collector for each rank."""
        for passes in ranks:
            self.microbatches += passes.microbatches
            self.sequence_tokens += passes.sequence_tokens
            self.forward_tokens += passes.forward_tokens
            self.losses += passes.losses
            self._log_weights += passes._log_weights
            self.tokens.add_passes(passes.tokens)
            for name, recorded in passes._values.items():
                self._values[name] += recorded
        run = [passes.forward_tokens for passes in ranks]
        self.imbalance = max(run) * len(run) / max(1, sum(run))

    @property
    def kept_share(self) -> float:
        """The share of tokens that the correction kept, among those with an old log-probability.

        It is 1 if no token has an old log-probability.
        """
        keep = self._column("keep")
        return _mean(keep) if len(keep) else 1.0

    def _of_steps(self) -> dict[str, float]:
        """Return the metrics of optimizer steps: mean gradient norm, and shares of skipped steps.

        The norm is NaN if the gradients of all steps overflowed.
        """
        steps = max(1, len(self.grad_norms))
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        overflows = len(self.grad_norms) - len(finite)
        return {
            "trainer/grad_norm": math.nan
            if overflows == steps
            else sum(finite) / max(1, len(finite)),
            "trainer/skipped_step_share": self.skipped_steps / steps,
            "trainer/overflow_step_share": overflows / steps,
        }

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the batch by name."""
        num_steps = max(1, self.num_steps)
        column = self._column
        scored_log_d = column("scored_log_d")
        log_s = column("log_s").double()
        log_ds = column("log_d").double() + log_s
        fresh = self.tokens_with_gradient - self.replayed_with_gradient
        tokens = max(1, self.epochs * fresh)
        clipped_low = column("clipped_low").sum().item()
        clipped_high = column("clipped_high").sum().item()
        return {
            "trainer/action_tokens": float(self.action_tokens),
            "trainer/tokens_with_gradient": float(self.tokens_with_gradient),
            "trainer/sequence_tokens": float(self.sequence_tokens),
            "trainer/forward_tokens": float(self.forward_tokens),
            "trainer/microbatches": float(self.microbatches),
            **self._of_steps(),
            **self._of_rounding(),
            "trainer/lr": self.lr,
            "trainer/update_s": self.update_s,
            "trainer/tokens_per_s": self.sequence_tokens / self.update_s if self.update_s else 0.0,
            "old_logps/prepare_s": self.prepare_s,
            "old_logps/exact_share": _mean(column("exact")),
            "correction/kept_share": _mean(column("keep")),
            "correction/weight_mean": _mean(column("weight")),
            "correction/d_ess_share": effective_sample_size(scored_log_d),
            **_kl("correction/kl", scored_log_d),
            **_log_ratio("correction/log_d", scored_log_d, column("scored_lag")),
            "objective/loss": sum(self.losses) / num_steps,
            "objective/clip_share": (clipped_low + clipped_high) / tokens,
            "objective/clip_low_share": clipped_low / tokens,
            "objective/clip_high_share": clipped_high / tokens,
            "objective/s_ess_share": effective_sample_size(log_s),
            **_kl("objective/kl", log_s),
            **_log_ratio("objective/log_s", log_s, column("lag")),
            "policy/entropy_mean": _weighted_mean(column("entropy"), column("entropy_every")),
            "policy/ds_ess_share": effective_sample_size(log_ds),
            **_kl("policy/kl_behavior", log_ds),
            **_kl("policy/kl_reference", column("reference_log_ratio")),
            **self.extra,
            **(
                {"distil/divergence": _mean(column("divergence"))}
                if "divergence" in self._values
                else {}
            ),
            **(self._of_replayed() if self.replays else {}),
            **(self._of_placed() if self.places else {}),
        }

    def _of_placed(self) -> dict[str, float]:
        given, log_gamma = self.placed_tokens, self._column("placed_log_gamma").double()
        kept = self._column("placed_kept").sum().item()
        return {
            "placed/token_share": given / max(1, given + self.action_tokens),
            "placed/trained_share": kept / given if given else math.nan,
            "placed/gamma_mean": _mean(bounded_exp(log_gamma)),
            "placed/log_gamma_mean": _mean(log_gamma),
            "placed/truncated_share": _mean(self._column("placed_truncated")),
        }

    def _of_replayed(self) -> dict[str, float]:
        def column(name: str) -> Tensor:
            return self._column(f"{_REPLAY}{name}")

        clipped = column("clipped_low").sum() + column("clipped_high").sum()
        log_d, log_s = column("scored_log_d"), column("log_s").double()
        return {
            "replay/exact_share": _mean(column("exact")),
            "replay/kept_share": _mean(column("keep")),
            "replay/clip_share": clipped.item() / max(1, self.epochs * self.replayed_with_gradient),
            "replay/log_d_mean": _mean(log_d.double()),
            "replay/log_d_abs_mean": _mean(log_d.double().abs()),
            "replay/log_s_mean": _mean(log_s),
            "replay/log_s_abs_mean": _mean(log_s.abs()),
            "replay/s_ess_share": effective_sample_size(log_s),
        }

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of at most `MAX_POINTS` tokens, for plots.

        The lag is in batches.
        """
        columns = {name: self._column(name) for name in ("log_d", "log_s", "lag")}
        num_tokens = len(columns["lag"])
        chosen = torch.linspace(0, num_tokens - 1, min(MAX_POINTS, num_tokens)).long()
        return rows_of(columns, chosen)

    def _add(self, batch: Batch, **values: Tensor) -> None:
        """Record values `[T]` by name, but only those of a batch's sampled tokens."""
        kinds = {"": batch.fresh} | ({_REPLAY: batch.replayed} if batch.stored else {})
        for kind, where in kinds.items():
            index = where.nonzero().squeeze(1)  # several times as fast as a mask
            for name, tensor in values.items():
                self._values[kind + name].append(tensor[index])

    def _column(self, name: str) -> Tensor:
        recorded = self._values.get(name)
        return torch.cat(recorded) if recorded else torch.empty(0)


def rows_of(columns: Mapping[str, Tensor], chosen: Tensor) -> list[dict[str, float]]:
    """Return a dict for each index in `chosen`: the value at this index in each column, by name."""
    values = [column[chosen].tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def kl_estimates(log_ratio: Tensor) -> tuple[float, float]:
    """Return the k1 and k3 estimates of the divergence KL(q || p), in nats.

    `log_ratio` is r = log p - log q of tokens drawn from q. k1 is the mean of -r, and k3 the mean
    of exp(r) - 1 - r (joschu.net/blog/kl-approx.html).
    """
    r = log_ratio.double()
    return _mean(-r), _mean(bounded_exp(r) - 1 - r)


def effective_sample_size(log_ratio: Tensor) -> float:
    """Return the effective sample size of importance weights, divided by their number n.

    The weights are w = exp(`log_ratio`), limited as in the loss. The result is (sum w)^2 / (n sum
    w^2): 1 if all weights are equal, and 1/n if one token dominates. NaN without tokens.
    """
    if not len(log_ratio):
        return math.nan
    x = log_ratio.double().clamp(-LOG_LIMIT, LOG_LIMIT)
    share = (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp() / len(x)
    return share.item()


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _weighted_mean(values: Tensor, weights: Tensor) -> float:
    if not len(values) or (weights == weights[0]).all():
        return _mean(values)
    return ((weights * values).sum() / weights.sum()).item()


def _kl(name: str, log_ratio: Tensor) -> dict[str, float]:
    k1, k3 = kl_estimates(log_ratio)
    return {f"{name}_k1": k1, f"{name}_k3": k3}


def _log_ratio(name: str, log_ratio: Tensor, lag: Tensor) -> dict[str, float]:
    """Return metrics of a log-ratio: mean, mean absolute value, and its 99th percentile.

    `name` begins their names. The mean absolute value is also given for each lag (in batches), with
    the number of tokens of this lag.
    """
    size = log_ratio.double().abs()
    p99 = math.nan
    if len(size):
        p99 = size.kthvalue(nearest_rank(len(size), 0.99) + 1).values.item()
    metrics = {
        f"{name}_mean": _mean(log_ratio.double()),
        f"{name}_abs_mean": _mean(size),
        f"{name}_abs_p99": p99,
    }
    ages = lag.long()  # without tokens it is of another type
    lowest = int(ages.min()) if len(ages) else 0
    counts = (ages - lowest).bincount()
    sums = (ages - lowest).bincount(weights=size)
    for i in counts.nonzero().flatten().tolist():
        metrics[f"{name}_abs_mean/lag_{lowest + i}"] = (sums[i] / counts[i]).item()
        metrics[f"{name}_tokens/lag_{lowest + i}"] = float(counts[i])
    return metrics
