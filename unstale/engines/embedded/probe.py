"""A test of a new runner: its logits must be the same as those of a plain forward pass.

Three short sequences are computed in parts, together and with a shared prefix. A fourth sequence
has one token, at the last position. It shows if the position of one sequence affects another, as
with rotary embeddings that are scaled by the longest position of a pass.

In float32 the logits must agree at all positions. In a model with experts they may differ at a
quarter of the positions, because rounding may change the choice of an expert. In bfloat16 the
runner is compared with the plain float32 pass. Its error may be little larger than that of a plain
bfloat16 pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.engines.embedded.runner import Chunk, Runner, Step
from unstale.model.packing_check import in_precision
from unstale.routed_experts import num_experts

SLOTS = 4
"""Number of cache slots that the test of a runner uses."""
FORWARD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The kinds of errors that a model's own code may raise in a pass of several packed sequences."""
_LENGTH = 24
_SHARE = 1e-4
"""Largest allowed difference between a runner's logit and that of a plain forward pass, as a share
of the position's largest logit in the plain pass.
"""
_NATS = 1e-3
"""Largest allowed difference between a runner's log-probability and that of a plain forward pass,
in nats. `_SHARE` is not enough, because logits can be large.
"""
_ROUNDINGS = 32.0
"""With `strict`, the largest allowed difference of log-probabilities, as a multiple of the rounding
error of a plain pass (its difference from float64).
"""
_OUTLIERS = 0.25
"""Share of positions at which logits of a model with experts may differ by more than allowed."""
_ROUNDING = 4.0
"""Largest allowed error of a runner in bfloat16, as a multiple of the error of a plain forward pass
in bfloat16. Both errors are random and of similar size.
"""
_LEAST_ROUNDING = 0.01
"""Error in bfloat16 that is allowed in addition to `_ROUNDING` times the plain pass's error, as a
share of a position's largest logit.
"""


class Probe:
    """Test sequences for a runner, and the logits of plain forward passes on them.

    A plain pass computes one sequence without a cache.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int,
        exact: "Probe | None" = None,
        *,
        strict: bool = False,
    ) -> None:
        """Compute the logits of `model` in plain forward passes.

        `exact` is the probe of the same model in float32, or None if this model is in float32. With
        `strict`, a float32 runner may differ from the plain pass by at most `_ROUNDINGS` times the
        plain pass's rounding error.
        """
        config = model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        length = min(_LENGTH, max_context)
        shape = (3, length)
        self._tokens = torch.randint(int(config.vocab_size), shape, generator=generator)
        self._shared = length // 3
        self._tokens[2, : self._shared] = self._tokens[0, : self._shared]
        self._last = max_context - 1
        self._has_experts = num_experts(model.config.to_dict()) > 0
        self._exact = exact
        self._plain = [
            model(input_ids=row[None], use_cache=False).logits[0].float() for row in self._tokens
        ]
        self._nats = min(_NATS, _ROUNDINGS * self._rounding(model)) if strict else _NATS
        self.warning = ""
        """A message if a model with experts differed at some positions, but at few enough to pass.
        `error` sets it.
        """

    def _rounding(self, model: PreTrainedModel) -> float:
        """Return the largest rounding error of log-probabilities in a float32 plain pass, in
        nats.
        """
        with in_precision(model, torch.float64):
            exact = [model(input_ids=row[None], use_cache=False).logits[0] for row in self._tokens]
        errors = [
            (one.log_softmax(-1) - other.log_softmax(-1)).abs().max()
            for one, other in zip(exact, self._plain, strict=True)
        ]
        return max(float(error) for error in errors)

    @torch.no_grad()
    def error(self, runner: Runner) -> str:
        """Return a message if a runner's logits differ from those of the plain passes, else "".

        The runner must be new and have `SLOTS` slots. A message is also returned if logits are not
        finite.
        """
        end = self._tokens.shape[1] - 1
        cut = end // 2
        found: list[tuple[int, int, Tensor]] = []

        def run(rows: Sequence[tuple[int, int]], chunks: Sequence[Chunk]) -> None:
            """Run one forward pass. `rows` has pairs (cache slot, position of the token)."""
            parts = [(slot, torch.tensor([at])) for slot, at in rows]
            parts += [(chunk.slot, torch.arange(chunk.start, chunk.end)) for chunk in chunks]
            # Slot 3 has a token at the last position, whose context is empty.
            tokens = [self._tokens[slot, at] if slot < 3 else at * 0 for slot, at in parts]
            positions = [at for _, at in parts]
            slots = torch.tensor([slot for slot, _ in rows], dtype=torch.long)
            logits = runner.forward(
                Step(slots, tuple(chunks), torch.cat(tokens), torch.cat(positions))
            )
            for (slot, at), row in zip(parts, logits, strict=True):
                if slot < 3:
                    found.append((slot, int(at[-1]), row))

        run([], [Chunk(0, 0, cut), Chunk(1, 0, end - 1)])
        if runner.keeps_beginnings:
            runner.copy_prefix(0, 2, min(self._shared, cut))
            continued = Chunk(0, cut, end), Chunk(2, min(self._shared, cut), end)
            run([(1, end - 1), (3, self._last)], continued)
        else:  # a part of a prompt may follow a part, or a token that was sampled
            run([(0, cut), (1, end - 1)], [Chunk(2, 0, cut)])
            run([], [Chunk(0, cut + 1, end), Chunk(2, cut, end)])
        run([(0, end), (1, end), (2, end)], [])
        if not all(bool(row.isfinite().all()) for row in self._plain):
            return "a plain forward pass gives logits that are not finite"
        logits = torch.stack([row for _, _, row in found])
        if not bool(logits.isfinite().all()):
            return "logits are not finite, unlike those of a plain forward pass"
        plain = torch.stack([self._plain[slot][at] for slot, at, _ in found])
        if self._exact is None:
            return self._compared(logits, plain)
        exact = torch.stack([self._exact._plain[slot][at] for slot, at, _ in found])
        return self._rounded(logits, plain, exact)

    def _compared(self, logits: Tensor, plain: Tensor) -> str:
        """Return a message if a runner's float32 `logits` differ from those of plain passes
        (`plain`).

        Both are `[positions, V]`. Return "" if the difference is allowed.
        """
        nats = (logits.log_softmax(-1) - plain.log_softmax(-1)).abs().amax(-1)
        differs = (_shares(logits, plain) > _SHARE) | (nats > self._nats)
        count, total = int(differs.sum()), len(differs)
        text = (
            f"log-probabilities differ by {float(nats.max()):.1e} from those of a plain forward "
            f"pass, at {count} of {total} positions by too much"
        )
        if count > (_OUTLIERS * total if self._has_experts else 0):
            return text
        if count:
            self.warning = f"{text}: the probable cause is rounding, which changes chosen experts"
        return ""

    def _rounded(self, logits: Tensor, plain: Tensor, exact: Tensor) -> str:
        """Return a message if a runner's bfloat16 `logits` have much larger errors than plain
        passes.

        `plain` are the bfloat16 logits of plain passes. Errors are differences from `exact`, the
        logits of plain float32 passes. All are `[positions, V]`. Return "" if the errors are
        allowed.
        """
        rank = 1.0 - _OUTLIERS if self._has_experts else 1.0
        error, usual = (
            float(_shares(each, exact).quantile(rank, interpolation="lower"))
            for each in (logits, plain)
        )
        if error <= _ROUNDING * usual + _LEAST_ROUNDING:
            return ""
        return (
            f"bfloat16 logits differ by {error:.1e} of the largest from those in float32, and "
            f"those of a plain forward pass by {usual:.1e}"
        )


def _shares(logits: Tensor, exact: Tensor) -> Tensor:
    """Return each position's largest error of `logits`, as a share of its largest exact logit."""
    return (logits - exact).abs().amax(-1) / exact.abs().amax(-1).clamp_min(1e-30)
