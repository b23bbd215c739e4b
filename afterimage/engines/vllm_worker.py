"""What runs inside vLLM: how its worker takes weights, and the process that serves for as long as somebody listens.

This file alone imports vllm, and only there.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from afterimage.adapters import Base, Merging


class Extension:
    """`--worker-extension-cls`: vLLM mixes it into its worker."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    afterimage_base: Base | None = None

    def afterimage_load(self, path: str, merging: dict[str, Any] | None = None) -> None:
        """Take all weights from a safetensors file on this host, by the names of the checkpoint.

        With `merging` (the fields of a `Merging`) they are adapters of the model that the server was started with.
        """
        weights = load_file(path)
        if merging:
            model = self.vllm_config.model_config
            self.afterimage_base = self.afterimage_base or Base(Path(model.model), Merging(**merging))
            weights = {name: t.to(model.dtype) for name, t in self.afterimage_base.merged(weights).items()}
        self.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        self.afterimage_mend()

    def afterimage_mend(self) -> None:
        """Pack again what vLLM's CPU build has packed from a weight that another module loads: a tied head."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                if hasattr(module, "cpu_linear") and module.weight.numel():
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def main() -> None:
    """vLLM's server with the arguments of this process, until the other end of standard input is gone."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    serve()


def _end_with_the_other_side() -> None:
    """All processes of the server are one group."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
