"""Load the policy of a run, and decide how engines receive the weights."""

import math
import warnings

import torch

from unstale.config import ClusterConfig, ConfigError, RunConfig
from unstale.engines.pool import EnginePool
from unstale.engines.registry import engine_spec, packs_weights
from unstale.model.forward import ForwardOptions
from unstale.model.lora import Lora
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.weights.publish import KeepVersions

MOST_PADDED = 1.1
"""Largest ratio of padded to real experts for which there is no warning. FSDP pads the experts so
that all ranks have equally many.
"""


def lora_of(config: RunConfig) -> Lora | None:
    """Return rank, scale, layers and seed of a run's LoRA adapters. None if it trains all
    weights.
    """
    options = config.trainer
    if not options.lora_rank:
        return None
    return Lora(options.lora_rank, options.lora_alpha, options.lora_targets, config.seed)


def load_policy(
    config: RunConfig, peers: RankGroup | None = None, *, trained: bool = True
) -> Policy:
    """Load the model from which a run starts, with new adapters if the run trains LoRA.

    `peers` are the ranks among which the model is divided. Without `peers` the model is whole. A
    whole model stays in main memory if the run has trainer ranks, because only the ranks need GPUs.
    If `trained` is False, the policy can only score.
    """
    options = config.trainer
    device = "cpu" if config.cluster.trainers and peers is None else None
    policy = Policy.load(
        config.policy_folder,
        dtype=options.dtype,
        device=device,
        lora=lora_of(config),
        peers=peers or SINGLE_PROCESS,
        independent_rows=config.deterministic,
        trained=trained,
        chat_template=config.chat_template,
    )
    if policy.pictures:
        _require_pictures(config)
    policy.check_context(config.cluster.context)
    if peers is None:
        check_expert_ranks(config.cluster, policy.num_experts)
    policy.set_forward_options(ForwardOptions.of(config))
    try:
        policy.bias_logits(config.engine.biases)
    except ValueError as error:
        raise ConfigError(f"engine.logit_bias: {error}") from None
    if options.routing_replay:
        policy.replay_experts()
    if peers is None:
        warn_of_float32(config, on_gpu=policy.device.type == "cuda")
    return policy


def _require_pictures(config: RunConfig) -> None:
    """Raise `ConfigError` if a policy that reads pictures does not support an option of the run."""
    engine, techniques = config.engine, config.techniques.split()
    needed = {
        "engine.backend = embedded": engine.backend == "embedded",
        "engine.quantise = none": engine.quantise == "none",
        "engine.bitwise = false": not engine.bitwise,
        "cluster.trainers = 0": not config.cluster.trainers,
        "no cluster.engine_hosts": not config.cluster.engine_hosts,
        "a technique other than distil": "distil" not in techniques,
    }
    if lacking := [name for name, met in needed.items() if not met]:
        raise ConfigError(f"the policy reads pictures, which needs {', '.join(lacking)}")


def check_expert_ranks(cluster: ClusterConfig, experts: int) -> None:
    """Raise `ConfigError` if `cluster.expert_parallel` cannot divide the experts among trainer
    ranks.

    `experts` is the number of experts in a layer, 0 for a model without experts. Without that
    option, warn if FSDP would pad the experts by more than a tenth.
    """
    ranks = cluster.trainers // cluster.replicas
    if cluster.expert_parallel and not experts:
        raise ConfigError("cluster.expert_parallel must be false: the policy has no experts")
    if ranks < 2 or not experts:
        return
    divisors = [count for count in range(1, experts + 1) if experts % count == 0]
    lower = max(count for count in divisors if count <= ranks)
    near = " or ".join(
        str(c) for c in dict.fromkeys((lower, *[c for c in divisors if c > ranks][:1]))
    )
    of_copy = " for each copy of the model" * (cluster.replicas > 1)
    if cluster.expert_parallel and ranks not in divisors:
        raise ConfigError(
            f"cluster.expert_parallel cannot divide the {experts} experts of a layer among {ranks} "
            f"trainer ranks. Use {near}{of_copy}, or set it to false"
        )
    padded = math.ceil(experts / ranks) * ranks
    if padded > MOST_PADDED * experts:
        warnings.warn(
            f"{ranks} trainer ranks fill up the {experts} experts of a layer to {padded}: memory "
            f"and transfers of experts grow by {padded / experts - 1:.0%}. Set cluster.trainers to "
            f"{near}{of_copy}",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_of_float32(config: RunConfig, *, on_gpu: bool) -> None:
    """Warn if the passes of a run on GPUs are in float32, which is slow.

    `trainer.dtype = auto` means float32 if this machine has no GPU, even if the trainer ranks have.
    """
    if on_gpu and config.trainer.dtype == "float32":
        warnings.warn(
            "trainer.dtype = float32 on a GPU: passes lack the fused attention and take several "
            "times the time. Set trainer.dtype = bfloat16",
            RuntimeWarning,
            stacklevel=2,
        )


def shares_deltas(config: RunConfig) -> bool:
    """Return True if engines can receive the deltas that are made for `old_logp` or for the disk.

    A delta is the lossless difference between the weights of two versions. A shared delta is
    computed only once. With trainer ranks, each rank has the delta of its part in any case.
    """
    same_precision = config.engine.dtype == config.trainer.dtype
    if config.cluster.trainers:
        takes_parts = engine_spec(config.engine.backend).deltas_in_parts
        return takes_parts and same_precision and not config.trainer.lora_rank
    return config.old_logps.shares_deltas and (same_precision or config.trainer.lora_rank > 0)


def reads_old_versions(config: RunConfig) -> bool:
    """Return True if weights of versions before the newest may be read from disk, by a resume or an
    engine that starts again.
    """
    if config.audit.share or config.schedule.pin_versions or config.cluster.engine_hosts:
        return True
    route = getattr(config.old_logps, "makes", None)  # a route of another package may have none
    return route is None or route.recover is not OldLogps.recover


def keep_versions(config: RunConfig, engine: EnginePool) -> KeepVersions | None:
    """Return the function that makes engines drop LoRA adapters of old versions.

    It keeps all versions that running episodes use with `schedule.pin_versions`, else only the
    newest. None if adapters are merged into the weights.
    """
    if config.engine.adapters == "merged":
        return None
    if config.schedule.pin_versions:
        return engine.keep_versions
    return lambda _: engine.keep_versions(())


def loads_in_place(config: RunConfig) -> bool:
    """Return True if engines receive whole weights on a GPU, False if they do in main memory.

    The weights are sent by NCCL, or the embedded engine reads them on the trainer's GPU.
    """
    options, cluster = config.engine, config.cluster
    if config.trainer.lora_rank or packs_weights(config):
        return False
    is_here = not (cluster.trainers or cluster.engine_hosts or cluster.address)
    reads_gpu = engine_spec(options.backend).reads_gpu and torch.cuda.is_available()
    return options.transfer == "nccl" or (options.transfer == "auto" and is_here and reads_gpu)
