"""Division of this machine's GPUs among trainer ranks and engines."""

import argparse
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unstale.config import ConfigError, RunConfig
from unstale.config.files import read_mapping
from unstale.engines.embedded.decoder import runs_on_gpu
from unstale.engines.vllm_server import gpu_share, gpus_here
from unstale.lint.policy_files import num_weights
from unstale.model.loading import DTYPES

_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
"""Options of a vLLM server for its parallel sizes, in two spellings. The product of the sizes is
the number of GPUs that the server takes.
"""


@dataclass(frozen=True, slots=True)
class GpuShares:
    """The GPUs for the trainer ranks and for the engines, named as in `CUDA_VISIBLE_DEVICES`.

    Both tuples are empty if all processes may use all GPUs.
    """

    trainers: tuple[str, ...] = ()
    """GPUs of the trainer ranks, and of the ranks of the second model, which computes old
    log-probabilities (`old_logps.route = old_logit_model`).
    """
    engines: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """True if trainer ranks and engines share no GPU."""
        return bool(self.trainers) and not set(self.trainers) & set(self.engines)


def divide_gpus(gpus: Sequence[str], *, trainers: int, scorers: int = 0, engines: int) -> GpuShares:
    """Divide GPUs: the first ones for the ranks, one each, and the others for the engines.

    The ranks are the `trainers` ranks of the trainer and the `scorers` ranks of the second model,
    which computes old log-probabilities (`old_logps.route = old_logit_model`). `engines` is the
    number of GPUs that the engines need. A single GPU is shared by one rank and one engine. Raises
    `ConfigError` if there are too few GPUs.

    >>> divide_gpus("0123", trainers=2, engines=1)
    GpuShares(trainers=('0', '1'), engines=('2', '3'))
    >>> divide_gpus("0", trainers=1, engines=1)
    GpuShares(trainers=('0',), engines=('0',))
    """
    if not gpus:
        return GpuShares()
    ranks = trainers + scorers
    if ranks == len(gpus) == 1 and engines <= 1:
        return GpuShares(tuple(gpus), tuple(gpus))
    if ranks + engines > len(gpus):
        most = len(gpus) - engines - scorers
        lower = f"Set cluster.trainers to at most {most}" if most > 0 else "Lower both"
        if most <= 0 and engines > 1:
            options = "engine.processes, engine.servers, engine.args"
            lower = f"Lower cluster.trainers and the engines' GPUs ({options})"
        users = [f"{trainers} trainer ranks (cluster.trainers)"]
        users += [f"{scorers} ranks of the second model (old_logps.ranks)"] * bool(scorers)
        users += [f"engines on {engines} GPUs"] * bool(engines)
        more = "use the machines of a cluster (cluster.address)"
        if engines:
            more = "sample on other GPUs (engine.urls, or cluster.engine_hosts in a cluster)"
        raise ConfigError(
            f"{' and '.join(users)} need {ranks + engines} GPUs, but this machine has "
            f"{len(gpus)}. {lower}, or {more}"
        )
    return GpuShares(tuple(gpus[:ranks]), tuple(gpus[ranks:]))


def run_gpus(config: RunConfig) -> GpuShares:
    """Return this machine's GPUs for trainer ranks and for engines, by the run's options.

    They are not divided if a cluster (`cluster.address`) places the trainer ranks. Without ranks
    they are divided only if there are several servers, or if a server gets weights by NCCL: such
    servers need GPUs of their own. Raises `ConfigError` if there are too few GPUs.
    """
    cluster = config.cluster
    engines = engine_gpus(config) * max(1, cluster.engine_hosts)
    over_nccl = config.engine.transfer == "nccl" and engines > 0
    if cluster.address or not (cluster.trainers or over_nccl or config.engine.servers > 1):
        return GpuShares()
    gpus = gpus_here()
    if not cluster.trainers and 0 < len(gpus) < 1 + engines:
        servers = config.engine.servers
        option = f"engine.servers = {servers}" if servers > 1 else "engine.transfer = nccl"
        remedy = "lower engine.servers" if servers > 1 else "set engine.transfer = file"
        raise ConfigError(
            f"{option} needs 1 GPU for the trainer and {engines} for servers, but this machine has "
            f"{len(gpus)}: let each server use fewer GPUs (engine.args), or {remedy}"
        )
    scorers = config.old_logps.scoring_ranks if cluster.trainers else 0
    trainers = max(1, cluster.trainers)
    return divide_gpus(gpus, trainers=trainers, scorers=scorers, engines=engines)


def host_gpus(config: RunConfig, number: int) -> tuple[str, ...]:
    """Return the GPUs for the engine host with this number on this machine. Empty if it may use
    all.
    """
    each = engine_gpus(config)
    return run_gpus(config).engines[number * each : (number + 1) * each]


def engine_gpus(config: RunConfig) -> int:
    """Return the number of GPUs that the engines of one host need, if the host has GPUs.

    An embedded engine needs one for each process, or none if it runs the policy on the CPU. Engines
    with `engine.urls` need none. Raises `ConfigError` if a parallel size in `engine.args` is not a
    number.
    """
    options = config.engine
    if options.urls:
        return 0
    if options.backend == "embedded":
        return options.processes if _decodes_on_gpu(config) else 0
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name, short in _PARALLEL:
        parser.add_argument(name, short, type=int, default=1)
    args = shlex.split(options.args)
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        args[i] = name.replace("_", "-") + equals + value
    try:
        found = parser.parse_known_args(args)[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"engine.args: {error}") from error
    product: int = (
        found.tensor_parallel_size * found.pipeline_parallel_size * found.data_parallel_size
    )
    return options.servers * product


def warn_of_shared_gpus(config: RunConfig) -> None:
    """Warn if some processes of the embedded engine on this machine share a GPU."""
    engine = config.engine
    gpus = run_gpus(config).engines or gpus_here()
    if engine.backend != "embedded" or not 0 < len(gpus) < engine.processes:
        return
    if _decodes_on_gpu(config):
        warnings.warn(
            f"engine.processes is {engine.processes}, but the number of GPUs for them is "
            f"{len(gpus)}, so some share one. For one each, set engine.processes to {len(gpus)}",
            RuntimeWarning,
            stacklevel=2,
        )


def _decodes_on_gpu(config: RunConfig) -> bool:
    """Return True if the embedded engine would run the policy on a GPU if there is one."""
    try:
        return runs_on_gpu(read_mapping(config.pretrained_folder / "config.json"))
    except (OSError, ValueError):
        return True  # loading the policy reports the error


def gpu_memory_utilization(config: RunConfig) -> float:
    """Return the share of GPU memory (0 to 1) for a vLLM server that this run starts.

    It is `engine.gpu_memory_utilization`, unless that is 0. Then it is the share that the trainer
    leaves. The result is 0 if the run starts no server on a GPU, or if the server has GPUs for
    itself. It is also 0 with trainer ranks in the cluster of `cluster.address`: Ray must not know
    this machine's GPUs then (`ray start --num-gpus 0`). Raises `ValueError` if trainer and engine
    do not fit together.
    """
    options, cluster = config.engine, config.cluster
    apart = run_gpus(config).apart or (cluster.trainers and cluster.address)
    elsewhere = options.urls or cluster.engine_hosts or apart
    is_started = options.backend == "vllm" and not elsewhere and torch.cuda.is_available()
    if options.gpu_memory_utilization or not is_started:
        return options.gpu_memory_utilization
    sizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    model = sizes[config.trainer.dtype]
    # 16 bytes: weights, gradient and two moments in float32
    optimizer = 0 if config.trainer.lora_rank else 16
    copies = 1 + config.old_logps.needs.own_process
    return gpu_share(
        num_weights(config.pretrained_folder),
        total=torch.cuda.mem_get_info()[1],
        trainer_bytes=optimizer + copies * model,
        engine_bytes=sizes[options.dtype],
    )
