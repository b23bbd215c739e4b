"""The list of engine backends, which are the values of `engine.backend`.

Each file of `engines/servers/` is a backend for one kind of server, and the embedded engine is
another. Each of these modules defines `SPEC`, an `EngineSpec`. The name of the file is the name of
the backend. Entry points of other distributions name further ones.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from pathlib import Path

from unstale.config import Dtype, RunConfig, Transfer
from unstale.config.plugins import Plugins, modules
from unstale.engines import Engine
from unstale.model.lora import Merging


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one engine, the same for all backends."""

    model_folder: Path
    _: KW_ONLY
    url: str = ""
    """The URL of a running server. If it is empty, the engine starts a process."""
    args: tuple[str, ...] = ()
    """More command-line flags for the process. Flags that the run sets itself are refused."""
    python: str = ""
    """The Python interpreter of a vLLM server. Empty uses that of this process."""
    gpu_memory_utilization: float = 0.0
    """Share of GPU memory for the process. 0 leaves the default of the server."""
    dtype: Dtype = "bfloat16"
    """Precision of generation. Weights are converted when they are loaded."""
    quantise: str = "none"
    """The format of `unstale.model.quantisation.FORMATS` to which weights are rounded when they are
    loaded, and activations in each layer. `none` rounds nothing.
    """
    bitwise: bool = False
    """Compute the log-probabilities of the trainer's bitwise passes (embedded engine only)."""
    threads: int = 1
    """Number of CPU threads of the process."""
    gpus: tuple[str, ...] = ()
    """The GPUs that the process may use, as in `CUDA_VISIBLE_DEVICES`. Empty leaves all of them."""
    number: int = 0
    """Number of the engine among those of its host. The process of an embedded engine computes on
    the GPU with this number, of those that it may use.
    """
    gpus_each: int = 0
    """The number of GPUs that each of several servers of a host takes, in the order of their
    numbers, of those that they may use. 0 lets a server use all.
    """
    max_running: int = 128
    """Number of replies sampled at once. Further requests wait. The embedded engine keeps as many
    contexts in its cache. If it is slightly larger than the number of concurrent episodes, the
    context of an episode is still cached at its next turn.
    """
    max_context: int = 2048
    """Largest number of tokens in a sequence. A reply that reaches it ends with the reason
    "length".
    """
    keep_cache: bool = False
    """Keep cached contexts of older weights when weights change. Tokens sampled after them are
    marked as not clean.
    """
    load_tokens: int = 0
    """Context tokens that add one to a request's load in a pool of engines. 0 counts every request
    as 1.
    """
    deltas: bool = False
    """Let the engine load a version as its difference (delta) from the one before. The engine then
    keeps one more copy of the weights.
    """
    packed: bool = False
    """Let the deltas be those of packed weights: values and scales of the format `quantise`. The
    engine packs full weights itself.
    """
    transfer: Transfer = "auto"
    """The way of weights to a vLLM server: by NCCL from the trainer's GPU, or as a file in memory.
    """
    probe_tolerance: float = 0.0
    """Largest mean absolute error, in nats, of the log-probabilities of a server's probe. 0 chooses
    by the number format.
    """
    merging: Merging | None = None
    """If given, updates are LoRA adapters, which the engine adds to the model's weights."""
    record_experts: bool = False
    """Return the experts that an MoE model chose, with every reply."""
    lockstep: bool = False
    """Compute one step every `STEP_S` seconds on the event loop's clock (embedded engine only).
    Results then depend only on the order of calls, so that a run is deterministic.
    """

    def check_context(self, positions: int | None) -> None:
        """Raise ValueError if `max_context` is larger than the number of positions of the model."""
        if positions is not None and self.max_context > positions:
            raise ValueError(
                f"engine.max_context is {self.max_context}, but the policy has {positions} "
                f"positions: set it to {positions} or less"
            )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A backend: the function that makes its engines, and facts about them."""

    make: Callable[[EngineOptions], Engine]
    """A function that makes an engine. It raises `ValueError` for options that the backend cannot
    use.
    """
    needs_urls: bool = False
    """True if a run cannot start a server of this kind. Then `engine.urls` must name running
    ones.
    """
    takes_packed: bool = False
    """True if the engine accepts weights in values and scales of `EngineOptions.quantise`."""
    adapter_deltas: bool = False
    """True if the engine accepts deltas of LoRA adapters, because it keeps the adapters that it
    loaded.
    """
    deltas_in_parts: bool = False
    """True if the engine accepts the deltas of trainer ranks, each of which has a part."""
    reads_gpu: bool = False
    """True if an engine on this machine reads weights from the memory of the trainer's GPU."""


def engine_spec(backend: str) -> EngineSpec:
    """Return the declaration of an engine backend by its name, the value of `engine.backend`.

    Raises `ConfigError` if a broken package adds it.
    """
    if backend not in ("embedded", *modules("unstale.engines.servers")):
        return Plugins("unstale.engines", EngineSpec).load(backend)
    module = "embedded.engine" if backend == "embedded" else f"servers.{backend}"
    return import_module(f"unstale.engines.{module}").SPEC


def packs_weights(config: RunConfig) -> bool:
    """Return True if the engine gets values and scales of `engine.quantise`, not whole weights.

    The differences between versions need an engine alone, which has each version in turn.
    """
    engine, cluster = config.engine, config.cluster
    is_single = engine.processes == 1 and not cluster.trainers and not cluster.engine_hosts
    rounds = engine.quantise != "none" and not config.trainer.lora_rank
    return rounds and is_single and engine_spec(engine.backend).takes_packed
