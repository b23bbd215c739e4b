"""The registry of engine backends.

Backends are the embedded engine and one file per server in `engines/servers/`. Each of these
modules defines `SPEC`, an `EngineSpec`. The file's name is the value of `engine.backend`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from unstale.config import Dtype, EngineConfig
from unstale.engines import Engine
from unstale.model.lora import Merging


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of one engine."""

    model_folder: Path
    config: EngineConfig
    url: str = ""
    """The server to attach to; empty to start a process."""
    max_running: int
    """Replies sampled at once."""
    deltas: bool = False
    """Load weights as deltas."""
    merging: Merging | None = None
    """The merging of adapters, if updates are adapters."""
    lockstep: bool = False
    """Run step by step with the event loop, for deterministic runs. Embedded engine only."""

    @property
    def dtype(self) -> Dtype:
        if self.config.dtype == "auto":
            raise ValueError("engine.dtype is resolved when the configuration is made, got auto")
        return self.config.dtype

    def for_server(self) -> dict[str, Any]:
        """Return the keyword arguments of a `RemoteEngine`. Servers take no deltas of adapters."""
        return {
            "url": self.url,
            "dtype": self.dtype,
            "max_context": self.config.max_context,
            "keep_cache": self.config.keep_cache,
            "deltas": self.deltas,
            "merging": self.merging,
        }


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A backend: how to make its engines, and the options it requires."""

    make: Callable[[EngineOptions], Engine]
    """Raises `ValueError` for options that the backend cannot work with."""
    needs_urls: bool = False
    """The run cannot start the server, so `engine.urls` must name one."""
    adapter_deltas: bool = False
    """The engine merges adapters itself, so their deltas can be sent too."""


def engine_spec(backend: str) -> EngineSpec:
    """Return the spec of a backend by its name."""
    module = "embedded.engine" if backend == "embedded" else f"servers.{backend}"
    spec: EngineSpec = import_module(f"unstale.engines.{module}").SPEC
    return spec
