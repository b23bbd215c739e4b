"""Worker extensions with a fault, for the probe to catch."""

import torch

from unstale.engines.vllm_worker import Extension


class Unmended(Extension):
    """Leaves vLLM's CPU build as it is: with tied embeddings a load does not reach the head."""

    def unstale_repack(self) -> None:
        """Nothing."""


class Corrupting(Extension):
    """The second load loses a tensor."""

    def unstale_repack(self) -> None:
        super().unstale_repack()
        self.unstale_loads = getattr(self, "unstale_loads", 0) + 1
        if self.unstale_loads == 2:
            with torch.no_grad():
                self.model_runner.get_model().model.layers[
                    1
                ].post_attention_layernorm.weight.zero_()
