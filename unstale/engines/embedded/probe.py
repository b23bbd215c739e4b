"""A test of a runner at its start: it must give the logits of a plain forward pass.

Three short sequences are computed in parts, together and with a shared prefix. Beside them runs one
token at the last position, which shows if the positions of one sequence change another, as with
rotary embeddings that are scaled by the longest position of a pass.
"""

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.engines.embedded.runner import Chunk, Runner, Step
from unstale.expert_routes import num_experts

SLOTS = 4
"""Number of slots that the probe uses."""
FORWARD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a model's own code in a forward pass for which it was not written."""
_LENGTH = 24
_TOLERANCE = 1e-4
"""Largest difference of logits from their plain values, as a share of the largest of these."""


class Probe:
    """Tokens to be computed by a runner, and the logits that a plain forward pass gives them."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        config = model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        length = min(_LENGTH, max_context)
        shape = (3, length)
        self._tokens = torch.randint(int(config.vocab_size), shape, generator=generator)
        self._shared = length // 3
        self._tokens[2, : self._shared] = self._tokens[0, : self._shared]
        self._last = max_context - 1
        self._has_experts = num_experts(model.config.to_dict()) > 0
        self._plain = [
            model(input_ids=row[None], use_cache=False).logits[0].float() for row in self._tokens
        ]

    @torch.no_grad()
    def error(self, runner: Runner) -> str:
        """Return how a new runner with `SLOTS` slots differs from the plain pass, or "".

        With experts only the median difference counts: rounding may change the choice of one.
        """
        end = self._tokens.shape[1] - 1
        cut = end // 2
        found: list[tuple[int, int, Tensor]] = []

        def run(rows: Sequence[tuple[int, int]], chunks: Sequence[Chunk]) -> None:
            """Run a step. `rows` are slots with positions."""
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
        runner.copy_prefix(0, 2, min(self._shared, cut))
        continued = Chunk(0, cut, end), Chunk(2, min(self._shared, cut), end)
        run([(1, end - 1), (3, self._last)], continued)
        run([(0, end), (1, end), (2, end)], [])
        differences, nats = [], 0.0
        for slot, at, logits in found:
            plain = self._plain[slot][at]
            differences.append(float((logits - plain).abs().max() / plain.abs().max()))
            error = (logits.log_softmax(-1) - plain.log_softmax(-1)).abs().max()
            nats = max(nats, float(error))
        largest = median(differences) if self._has_experts else max(differences)
        if largest < _TOLERANCE:
            return ""
        return f"log-probabilities differ by {nats:.1e} from those of a plain forward pass"
