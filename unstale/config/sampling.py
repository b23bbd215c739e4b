"""Options of tasks, engines, episodes and their schedule."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    Count,
    OneOf,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
)

Dtype = Literal["float32", "bfloat16"]


def staleness_bound(max_staleness: int, groups_per_step: int, lookahead_window: int) -> int:
    """Return the largest staleness, in versions, that a token can have when its batch is taken.

    One version is published per batch. docs/staleness.md has the derivation.

    >>> staleness_bound(2, 16, lookahead_window=1)
    2
    >>> staleness_bound(2, 16, lookahead_window=4)
    3
    """
    if max_staleness == 0:
        return 0  # at most one batch is in flight, so no group can be left behind
    return max_staleness + math.ceil((lookahead_window - 1) / groups_per_step)


def fast_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Dtype:
    """Return bfloat16 if there is a GPU, or a CPU with bfloat16 products; otherwise float32."""
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    has_driver = Path("/proc/driver/nvidia").exists()
    has_gpu = has_driver and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    has_products = "avx512_bf16" in flags or "amx_bf16" in flags
    return "bfloat16" if has_gpu or has_products else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(Section):
    """The tasks that the agent trains on.

    An environment with additional options has a subclass (`envs.registry.EnvSpec.options`).
    """

    env: str
    """A shipped environment, `library:name` (docs/libraries.md) or `module:factory`."""

    def check_combination(self) -> None:
        expected = task_class(self.env)
        if type(self) is not expected:
            raise ConfigError(f"the options of task.env {self.env!r} are a {expected.__name__}")

    @classmethod
    def classes(cls) -> "Sequence[type[TaskConfig]]":
        """Return `TaskConfig` and the classes with options of shipped environments."""
        registry = import_module("unstale.envs.registry")
        specs = registry.shipped_envs().values()
        return list(dict.fromkeys([TaskConfig, *(spec.options for spec in specs)]))


def task_class(env: str) -> type[TaskConfig]:
    """Return the options class of an environment. Raises `ConfigError` for an unknown one."""
    registry = import_module("unstale.envs.registry")  # a plain import would be circular
    options: type[TaskConfig] = registry.task_options(env)
    return options


def make_task(env: str = "retail", **values: Any) -> TaskConfig:
    """Return the options of an environment.

    Raises `ConfigError` for a changed option that only another environment has.
    """
    cls = task_class(env)
    known = {field.name for field in fields(cls)}
    for other in TaskConfig.classes():
        for field in fields(other):
            if field.name in known or field.name not in values:
                continue
            if values.pop(field.name) != field.default:
                owner = {option.name: option.default for option in fields(other)}["env"]
                raise ConfigError(f"task.{field.name} is an option of {owner}; task.env is {env}")
    return cls(env=env, **values)


@cache
def backends() -> dict[str, Sequence[str]]:
    """Return the backends and the options that only they read.

    There is one for each file in `engines/servers/`, which is not imported: it needs torch.
    """
    folder = Path(__file__).parents[1] / "engines" / "servers"
    servers = sorted(module.name for module in iter_modules([str(folder)]))
    options = {"embedded": ("processes",), **dict.fromkeys(servers, ("urls",))}
    return options | {"vllm": ("urls", "args", "gpu_memory_utilization")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """The engine that samples tokens."""

    selector: ClassVar[str] = "backend"

    backend: Annotated[str, OneOf(backends)] = "embedded"
    """The embedded engine, or a server behind HTTP. See docs/engines.md."""
    urls: str = ""
    """Servers on this host to attach to, separated by spaces; without any, `vllm` starts one."""
    args: str = ""
    """More flags for the vLLM server that the run starts, as on a command line."""
    gpu_memory_utilization: Share = 0.0
    """Share of the GPU's memory for the vLLM server that the run starts; 0 computes it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Precision of generation; `auto` picks the faster one on this machine."""
    threads: PositiveInt = 1
    """CPU threads of an engine process; the trainer takes the others."""
    processes: PositiveInt = 1
    """Embedded engine processes. For a small model, more processes beat more threads."""
    max_running: PositiveInt = 128
    """Replies generated at the same time, by all embedded processes together or by each server."""
    max_context: Annotated[int, Range(16)] = 1024
    """Tokens of an episode, prompt and replies together."""
    temperature: Positive = 1.0
    """Sampling temperature. The trainer applies it too."""
    top_p: float = 1.0
    """Must be 1: the truncated support would be needed for exact log-probabilities."""
    max_completion_tokens: PositiveInt = 96
    """Tokens of one reply."""
    keep_cache: bool = False
    """Keep the KV cache when weights change. Faster, but such tokens have no version's policy."""
    restarts: Count = 2
    """Restarts of a crashed engine before the run stops; replies continue from their tokens."""

    def check_combination(self) -> None:
        if self.dtype == "auto":
            # The run folder records the precision that was used.
            object.__setattr__(self, "dtype", fast_dtype())
        if self.max_running < self.processes:
            raise ConfigError(
                f"engine.max_running must be >= {self.processes} (engine.processes), "
                f"got {self.max_running}"
            )
        if self.backend == "embedded" and self.urls:
            raise ConfigError("engine.urls needs a server backend: set engine.backend too")
        if (self.args or self.gpu_memory_utilization) and (self.backend != "vllm" or self.urls):
            raise ConfigError(
                "engine.args and engine.gpu_memory_utilization are for a vLLM server that the run "
                "starts: set engine.backend = vllm and no engine.urls"
            )
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise ConfigError(f"engine.args cannot be {self.args!r}: {error}") from None
        if self.backend != "embedded" and self.processes > 1:
            raise ConfigError(
                "engine.processes is an option of engine.backend = embedded; "
                "for more servers give engine.urls"
            )
        if self.top_p != 1.0:
            raise ConfigError(
                f"engine.top_p must be 1.0, got {self.top_p}: "
                "a truncated support could not be replayed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """The limits of an episode."""

    max_turns: PositiveInt = 10
    """Replies per episode; after that many the episode ends."""
    timeout_s: Positive = 60.0
    """Time limit for one answer of an environment."""
    retries: Count = 1
    """Times a failed episode is restarted with the same seed."""
    max_failed_share: Share = 0.2
    """Stop the run above this share of failed episodes among the last 100 (from the 20th on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig(Section):
    """The endpoint that external agents call. Other episodes do not read these options."""

    lenient: bool = False
    """Answer calls that ask for another sampling as if they did not, and count them."""
    format_retries: Count = 2
    """Further replies, with `lenient`, if one does not have the requested `response_format`."""

    def applies(self, option: str) -> bool:
        return option == "lenient" or self.lenient


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig(Section):
    """The batch size and how stale its tokens may be. See docs/staleness.md."""

    max_staleness: Count = 2
    """Versions a token may lag behind the policy that trains on it. 0 trains synchronously."""
    groups_per_step: PositiveInt = 16
    """Tasks per batch."""
    group_size: PositiveInt = 8
    """Episodes per task."""
    lookahead_window: PositiveInt = 1
    """Take each group of a batch from this many of the oldest groups. 1 is strict order."""

    @property
    def staleness_bound(self) -> int:
        """The largest staleness, in versions, of a token when its batch is taken."""
        return staleness_bound(self.max_staleness, self.groups_per_step, self.lookahead_window)
