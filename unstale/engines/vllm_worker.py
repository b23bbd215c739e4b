"""What runs inside vLLM: how its worker takes weights, and the process that serves for as long as somebody listens.

This file alone imports vllm, and only there.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

from safetensors.torch import load_file

GOODBYE_S = 5
"""For the server to end by itself, before its processes are killed."""


class Extension:
    """`--worker-extension-cls`: vLLM mixes it into its worker."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def unstale_load(self, path: str) -> None:
        """Take all weights from a safetensors file on this host, by the names of the checkpoint."""
        self.reload_weights(
            weights_iterator=iter(load_file(path).items()), is_checkpoint_format=True
        )
        self.unstale_mend()

    def unstale_mend(self) -> None:
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
    """Ask the server to end, for what it has in shared memory outlives a kill; then kill its group of processes."""
    sys.stdin.buffer.read()
    try:
        subprocess.Popen(
            ["sh", "-c", f"sleep {GOODBYE_S}; kill -KILL 0"]
        )  # this process may be gone by then
    except OSError:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
