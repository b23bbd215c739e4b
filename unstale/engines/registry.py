"""The list of engine backends, which are the values of `engine.backend`.

Each file of `engines/servers/` is the backend for one kind of server, with the file's name.
`embedded/engine.py` is the backend `embedded`. Each of these modules defines `SPEC`, an
`EngineSpec`. Other packages add backends by entry points of the group `unstale.engines`.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from pathlib import Path

from unstale.config import Adapters, Dtype, RunConfig, Transfer
from unstale.config.plugins import Plugins, modules
from unstale.engines import Engine
from unstale.kept_sets import WHOLE, Truncation
from unstale.model.lora import Merging
from unstale.pictures import PictureStore


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The facts that an engine must know about a model that it does not load itself."""

    vocab_size: int
    routed: tuple[bool, ...] = ()
    """For each layer, True if it has a router that chooses experts. Empty without recorded
    experts.
    """


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one engine, the same for all backends."""

    model_folder: Path
    _: KW_ONLY
    url: str = ""
    """The URL of a running server. If it is empty, the engine starts a process."""
    args: tuple[str, ...] = ()
    """Further command-line flags for the server's process. Flags that the run sets are refused."""
    python: str = ""
    """Path of the Python interpreter for a vLLM server. Empty means that of this process."""
    gpu_memory_utilization: float = 0.0
    """Share of GPU memory for the server's process, 0 to 1. 0 leaves the default of the server."""
    dtype: Dtype = "bfloat16"
    """Precision of sampling. Weights are converted to it when they are loaded."""
    quantise: str = "none"
    """Number format of the layers, a key of `unstale.model.quantisation.FORMATS`. Weights are
    rounded to it when they are loaded, and activations in each layer. `none` rounds nothing.
    """
    bitwise: bool = False
    """Compute log-probabilities that equal the trainer's bit for bit (embedded engine only)."""
    threads: int = 1
    """Number of CPU threads of the engine."""
    gpus: tuple[str, ...] = ()
    """The GPUs that the process may use, as in `CUDA_VISIBLE_DEVICES`. Empty means all GPUs."""
    number: int = 0
    """Number of the engine on its host, from 0. An embedded engine uses the GPU with this index,
    among those that it may use, modulo their number.
    """
    gpus_each: int = 0
    """Number of GPUs for each server of a host. The server with `number` 0 takes the first ones of
    `gpus`, the next server the following ones. With 0, each server may use all of `gpus`.
    """
    max_running: int = 128
    """Number of replies sampled at once. Further requests wait. The embedded engine caches as many
    contexts. If the number is a little above that of concurrent episodes, the context of an episode
    is still cached at its next turn.
    """
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and a number that is added to the token's logit, before the temperature is
    applied (embedded engine only).
    """
    truncation: Truncation = WHOLE
    """The truncation (`top_p`, `top_k`, `min_p`) of all requests that are not greedy. An embedded
    engine reads it from each request instead.
    """
    max_context: int = 2048
    """Largest number of tokens in a sequence. A reply that reaches it ends with "length"."""
    keep_cache: bool = False
    """Keep cached keys and values when weights change. Tokens that are sampled after a context that
    older weights computed are then marked as not clean.
    """
    load_tokens: int = 0
    """Number of context tokens that add 1 to the load of a request. A pool chooses engines by their
    load. With 0, each request has load 1.
    """
    deltas: bool = False
    """Let the engine load a version as the difference (delta) from the previous version. The engine
    then keeps one more copy of the weights.
    """
    packed: bool = False
    """Only with `deltas`: send the differences of quantised weights, which are values and scales of
    the format `quantise`. Full weights are sent unquantised, and the engine quantises them.
    """
    transfer: Transfer = "auto"
    """The way of weights to a vLLM server: by NCCL from the trainer's GPU, or as a file in memory.
    """
    probe_tolerance: float = 0.0
    """Largest allowed mean absolute error in nats of the probe, which tests a server's
    log-probabilities after each load. With 0, the limit depends on the number format.
    """
    merging: Merging | None = None
    """If given, weight updates are LoRA adapters for the model in `model_folder`."""
    adapters: Adapters = "merged"
    """How the LoRA adapters are applied, if `merging` is given. `merged` adds them to the weights
    when they are loaded. `unmerged` adds them to the outputs of layers, in a `VersionedEngine`.
    """
    max_versions: int = 1
    """Largest number of versions for which a `VersionedEngine` samples at once."""
    record_experts: bool = False
    """Return, with every reply, the experts that an MoE model chose for each token."""
    sizes: ModelSizes | None = None
    """If given, another process loads the weights into the server at `url`. This engine only sends
    requests (`RemoteEngine.follow`).
    """
    pictures: PictureStore | None = None
    """The store with the pixels of pictures in requests (embedded engine only). None for a model
    that reads only text.
    """
    cache_key: str = field(default="", repr=False)
    """The secret of the run by which engines accept caches from each other (`CacheEngine`). Empty
    if they send none.
    """
    cache_host: str = "127.0.0.1"
    """The address of this machine at which the engine receives caches, with `cache_key`."""
    lockstep: bool = False
    """Compute one step every `STEP_S` seconds of the event loop's clock (embedded engine only).
    Results then depend only on the order of calls, as a deterministic run requires.
    """

    def check_context(self, positions: int | None) -> None:
        """Raise ValueError if `max_context` exceeds `positions`, the model's number of positions.

        None means that the model has no limit.
        """
        if positions is not None and self.max_context > positions:
            raise ValueError(
                f"engine.max_context is {self.max_context}, but the policy has {positions} "
                f"positions: set it to {positions} or less"
            )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine backend: the function that makes its engines, and the features of these engines."""

    make: Callable[[EngineOptions], Engine]
    """A function that makes an engine. It raises ValueError for options that it cannot use."""
    needs_urls: bool = False
    """True if a run cannot start servers of this backend, so that `engine.urls` must name some."""
    takes_packed: bool = False
    """True if the engine accepts packed weights: quantised weights in the format
    `EngineOptions.quantise`, with their scales.
    """
    adapter_deltas: bool = False
    """True if the engine accepts deltas of LoRA adapters. To apply them, it keeps the adapters that
    it loaded last.
    """
    deltas_in_parts: bool = False
    """True if the engine accepts a `DeltaInParts`, such as one part from each trainer rank."""
    keeps_sets: bool = False
    """True if the engine's replies have, with truncated sampling (`top_p`, `top_k`, `min_p`), the
    set of kept tokens for each token. Other engines refuse truncation in training.
    """
    truncates: bool = False
    """True if the engine can truncate a reply of an evaluation, which needs no sets. Not read with
    `keeps_sets`, which includes it.
    """
    unmerged: bool = False
    """True if the backend can make a `VersionedEngine`, with adapters of several versions."""
    reads_gpu: bool = False
    """True if an engine on the trainer's machine can read weights from the trainer's GPU
    directly.
    """


def engine_spec(backend: str) -> EngineSpec:
    """Return the `EngineSpec` of `backend`, a value of `engine.backend`.

    Raises `ConfigError` if a backend of another package cannot be used.
    """
    if backend not in ("embedded", *modules("unstale.engines.servers")):
        return Plugins("unstale.engines", EngineSpec).load(backend)
    module = "embedded.engine" if backend == "embedded" else f"servers.{backend}"
    return import_module(f"unstale.engines.{module}").SPEC


def packs_weights(config: RunConfig) -> bool:
    """Return True if the engine receives weights as quantised values and scales.

    Later versions are then sent as differences. For this, the run must have a single engine, which
    loads every version. LoRA runs and clusters send whole weights.
    """
    engine, cluster = config.engine, config.cluster
    is_single = engine.processes == 1 and not cluster.trainers and not cluster.engine_hosts
    rounds = engine.quantise != "none" and not config.trainer.lora_rank
    return rounds and is_single and engine_spec(engine.backend).takes_packed
