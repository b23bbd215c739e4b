"""The size of the trainer's forward passes, chosen by the free memory."""

from unstale.config import RunConfig
from unstale.engines.vllm_server import ACTIVATIONS_SHARE
from unstale.model.forward import ForwardOptions
from unstale.model.pass_size import free_bytes, largest_pass, total_bytes
from unstale.model.policy import Policy
from unstale.model.sharding import local

_GRADIENT_BYTES = 4
_MOMENTS_BYTES = {"AdamW8bit": 2}
"""Bytes of optimizer moments for each trained weight, by optimizer. Optimizers that are not listed
have 8. The first optimizer step allocates them.
"""
_COPIES = 3
"""Number of copies of the weights, in the precision of passes, that a run may still allocate: for
the gradient of a pass, the second model of the route `old_logit_model`, and the weights to publish.
"""


def pass_tokens(policy: Policy, config: RunConfig, *, trains: bool) -> int:
    """Return the largest number of tokens in a forward pass of the trainer.

    This is the option `trainer.max_tokens_per_microbatch`. If the option is 0, it is the number
    that fits into memory. `trains` is True for a pass with gradient. All ranks of the policy must
    call this function, and receive the same number. If an engine of this run is on the same GPU, it
    leaves `ACTIVATIONS_SHARE` of the GPU's memory to activations.
    """
    options = config.trainer
    on_gpu = policy.device.type == "cuda"
    scoring = options.scoring_tokens(on_gpu=on_gpu)
    if chosen := options.max_tokens_per_microbatch if trains else scoring:
        return chosen
    word = policy.dtype.itemsize
    trained = sum(local(each).numel() for each in policy.model.parameters() if each.requires_grad)
    moments = _MOMENTS_BYTES.get(options.optimizer, 8)
    if options.offload_optimizer and on_gpu:
        moments = 0
    reserved = trained * (_GRADIENT_BYTES + moments + _COPIES * word)
    # The ranks may all be on this machine.
    free = free_bytes(policy.device, reserved=reserved, ranks=policy.peers.count)
    if on_gpu and _shares_gpu(config):
        free = min(free, ACTIVATIONS_SHARE * total_bytes(policy.device))
    own = largest_pass(
        policy.model,
        free=free,
        word=word,
        checkpointing=ForwardOptions.of(config).gradient_checkpointing,
        trains=trains,
    )
    context = policy.peers.context
    return min(policy.peers.gather(own)) * (context.size if context else 1)


def _shares_gpu(config: RunConfig) -> bool:
    engine, cluster = config.engine, config.cluster
    elsewhere = engine.urls or cluster.trainers or cluster.engine_hosts or engine.servers > 1
    return not elsewhere and engine.transfer != "nccl"
