"""The GPUs of a run, and the share of their memory that its engines get."""

import torch

from unstale.config import RunConfig
from unstale.engines.vllm_server import gpu_share
from unstale.lint.policy_files import num_weights
from unstale.model.loading import DTYPES


def gpu_memory_utilization(config: RunConfig) -> float:
    """Return the share of GPU memory for a vLLM server that this run starts.

    The option `engine.gpu_memory_utilization` comes first. If it is 0, the server gets what the
    trainer leaves. The result is 0 if the run starts no server on a GPU. Raises `ValueError` if
    trainer and engine do not fit together.
    """
    options = config.engine
    elsewhere = options.urls or config.cluster.engine_hosts
    is_started = options.backend == "vllm" and not elsewhere and torch.cuda.is_available()
    if options.gpu_memory_utilization or not is_started:
        return options.gpu_memory_utilization
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    model = sizes[config.trainer.dtype]
    # 16 bytes: weights, gradient and two moments in float32
    optimizer = 0 if config.trainer.lora_rank else 16
    copies = 1 + config.old_logps.needs.own_process
    return gpu_share(
        num_weights(config.policy_folder),
        total=torch.cuda.mem_get_info()[1],
        trainer_bytes=optimizer + copies * model,
        engine_bytes=sizes[options.dtype],
    )
