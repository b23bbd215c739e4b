"""A vLLM worker extension that computes FP8 layers in bfloat16, for CPUs without AMX.

Only the products are replaced. vLLM itself quantises the weights, at the start and at each load.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from unstale.engines.vllm_worker import Extension


class _Kernel:
    """A product with weights that are multiplied by their scales first. Inputs are not rounded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        height, width = layer.weight.shape
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = (layer.weight.float() * scale[:height, :width]).to(x.dtype)
        return F.linear(x, weight, bias)


def _replace_products() -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    fp8.init_fp8_linear_kernel = lambda **_: _Kernel()


_replace_products()


class Emulated(Extension):
    """The extension of a run. Its module replaces the products of vLLM's FP8 layers."""
