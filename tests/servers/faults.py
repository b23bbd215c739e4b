"""Faulty vLLM worker extensions that the probe must detect."""

import torch

from unstale.engines.vllm_worker import Extension


class Unmended(Extension):
    """A worker without the fix for tied embeddings, whose head a load does not update."""

    def unstale_repack(self) -> None:
        """Do nothing."""


class Corrupting(Extension):
    """A worker whose second load loses a tensor."""

    def unstale_repack(self) -> None:
        super().unstale_repack()
        self.unstale_loads = getattr(self, "unstale_loads", 0) + 1
        if self.unstale_loads == 2:
            with torch.no_grad():
                self.model_runner.get_model().model.layers[
                    1
                ].post_attention_layernorm.weight.zero_()
