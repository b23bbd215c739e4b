"""The registry of engine backends.

Backends are the embedded engine and one file per server in `engines/servers/`. Each of these
modules defines `SPEC`, an `EngineSpec`. The file's name is the value of `engine.backend`.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from pathlib import Path

from unstale.config import Dtype
from unstale.engines import Engine
from unstale.model.lora import Merging


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one engine."""

    model_folder: Path
    _: KW_ONLY
    url: str = ""
    """The server to attach to; empty to start a process."""
    args: tuple[str, ...] = ()
    """More flags for the process. Those that the run sets itself are refused."""
    gpu_memory_utilization: float = 0.0
    """Share of the GPU's memory for the process; 0 leaves the server's default."""
    dtype: Dtype = "bfloat16"
    """Precision of generation. Weights are cast when they are loaded."""
    threads: int = 1
    """CPU threads of the process."""
    max_running: int = 128
    """Replies sampled at once; further requests wait.

    The embedded engine caches as many contexts. With a few more than there are concurrent episodes,
    an episode's context is still cached at its next turn.
    """
    max_context: int = 2048
    """Tokens of a sequence. A reply ends with "length" when its sequence has them."""
    keep_cache: bool = False
    """Keep contexts computed under older weights. Tokens sampled over them are marked unclean."""
    deltas: bool = False
    """Accept deltas. This needs memory for one more copy of the weights."""
    merging: Merging | None = None
    """If given, updates are adapters, which the engine merges into the model's weights."""
    lockstep: bool = False
    """Compute one step every `STEP_S` of the event loop's clock. For the embedded engine only.

    Results then depend on nothing but the order of calls, so a run is deterministic.
    """

    def check_context(self, positions: int | None) -> None:
        """Raise ValueError if `max_context` exceeds the positions of the model."""
        if positions is not None and self.max_context > positions:
            raise ValueError(
                f"max_context={self.max_context} exceeds the model's {positions} positions"
            )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A backend: the function that makes its engines, and what they can do."""

    make: Callable[[EngineOptions], Engine]
    """Returns an engine. Raises `ValueError` for options that the backend cannot work with."""
    needs_urls: bool = False
    """The run cannot start a server of this kind, so `engine.urls` must name a running one."""
    adapter_deltas: bool = False
    """The engine accepts deltas of adapters, because it keeps the adapters that it merged."""


def engine_spec(backend: str) -> EngineSpec:
    """Return the spec of a backend by its name."""
    module = "embedded.engine" if backend == "embedded" else f"servers.{backend}"
    spec: EngineSpec = import_module(f"unstale.engines.{module}").SPEC
    return spec
