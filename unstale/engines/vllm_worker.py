"""The code that runs inside vLLM's processes: loading of weights, and the server's entry point.

Only this file and `vllm_transfer.py` import vllm, inside functions.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

from safetensors.torch import load_file

TERMINATE_S = 5
"""Seconds between SIGTERM and the kill of the server's processes."""


class Extension:
    """Methods that vLLM's option `--worker-extension-cls` adds to its worker class."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def unstale_quantization(self) -> list[str | None]:
        """Return a list with one item: the server's `--quantization`, or None without it."""
        return [self.vllm_config.model_config.quantization]

    def unstale_load(self, path: str) -> None:
        """Load all weights from the safetensors file at `path`. Their names are those of a
        checkpoint.

        If the server was started with `--quantization`, vLLM quantises the weights layer by layer.
        """
        self.reload_weights(
            weights_iterator=iter(load_file(path).items()), is_checkpoint_format=True
        )
        self.unstale_repack()

    def unstale_repack(self) -> None:
        """Convert the weights of linear layers to vLLM's CPU format again. On a GPU, do nothing.

        vLLM's CPU build converts an output head that is tied to the embedding only when it creates
        the model. A load changes the embedding, but not the converted head.
        """
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
    """Run vLLM's server with the arguments of this process, until standard input closes."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    threading.Thread(target=end_with_parent, daemon=True).start()
    serve()


def end_with_parent() -> None:
    """Wait until standard input closes, which means that the parent has ended. Then end the server.

    SIGTERM is sent first, because a killed server leaves shared memory behind. `TERMINATE_S`
    seconds later a shell kills the process group, even if this process has ended by then.
    """
    sys.stdin.buffer.read()
    try:
        subprocess.Popen(["sh", "-c", f"sleep {TERMINATE_S}; kill -KILL 0"])
    except OSError:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
