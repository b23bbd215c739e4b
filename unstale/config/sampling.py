"""Options of sampling: engines, episodes, the choice of tasks and the schedule."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    Count,
    NonNegative,
    OneOf,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
)
from unstale.config.plugins import added_names, modules

Dtype = Literal["float32", "bfloat16", "float16"]
Transfer = Literal["auto", "file", "nccl"]
Adapters = Literal["merged", "unmerged"]
Scenarios = Literal["auto", "none", "task_set", "prefix"]
Quantise = Literal["none", "fp8", "int8", "int4", "nvfp4", "mxfp4"]
LIMITS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Options that cut off a part of the sampling distribution, each with the value that does not."""
LARGEST_BIAS = 100.0
"""Largest number that `engine.logit_bias` may add to a logit, as in OpenAI's API."""
BANNED = -10_000.0
"""The number that is added to the logit of a banned token. exp of it is 0 in every precision. It is
not -infinity, because 0 times that is NaN.
"""
ROUNDED_BY: dict[str, tuple[Quantise, ...]] = {
    "embedded": ("fp8", "int8", "int4", "nvfp4", "mxfp4"),
    "vllm": ("fp8",),
}
"""The values of `engine.quantise`, besides `none`, that an engine backend supports. Other backends
support only `none`.
"""


def staleness_bound(max_staleness: int, groups_per_step: int, lookahead_window: int) -> int:
    """Return the largest staleness, in versions, that a token can have when its batch is formed.

    The staleness of a token is the number of versions that were published after it was sampled.
    There is one for each batch. docs/staleness.md has the derivation.

    >>> staleness_bound(2, 16, lookahead_window=1)
    2
    >>> staleness_bound(2, 16, lookahead_window=4)
    3
    """
    if max_staleness == 0:
        return 0  # at most one batch is in flight, so no group is left behind by later ones
    return max_staleness + math.ceil((lookahead_window - 1) / groups_per_step)


def fast_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Dtype:
    """Return the faster dtype on this machine: bfloat16 on a GPU or a CPU with bfloat16 units, else
    float32.
    """
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    has_products = "avx512_bf16" in flags or "amx_bf16" in flags
    return "bfloat16" if has_gpu() or has_products else "float32"


def has_gpu() -> bool:
    """Return True if there is an NVIDIA GPU and the installed torch can use it. Imports nothing."""
    has_driver = Path("/proc/driver/nvidia").exists() or Path("/dev/dxg").exists()  # Linux or WSL
    if not has_driver or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    spec = find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(Path(folder, "lib/libtorch_cuda.so").exists() for folder in folders)


@cache
def backends() -> dict[str, Sequence[str]]:
    """Return the engine backends by name, each with the options of `engine` that no other backend
    uses.

    A backend is a file in `engines/servers/`, or an entry point of another distribution. The files
    are not imported, because that would import torch.
    """
    servers = dict.fromkeys(modules("unstale.engines.servers"), ("urls", "probe_tolerance"))
    vllm = (*servers["vllm"], "python", "servers", "args", "gpu_memory_utilization")
    own = {"embedded": ("processes",), **servers, "vllm": vllm}
    return {**own, **dict.fromkeys(added_names("unstale.engines", own), ("urls", "args"))}


def limits_text(section: str, limits: Mapping[str, float]) -> str:
    """Return those of `limits` that cut off tokens as text, with their section. Empty if none does.

    >>> limits_text("eval", {"top_p": 0.95, "top_k": 0})
    'eval.top_p = 0.95'
    """
    return ", ".join(
        f"{section}.{name} = {value:g}" for name, value in limits.items() if value != LIMITS[name]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """The engine that samples the replies of the policy."""

    selector: ClassVar[str] = "backend"

    backend: Annotated[str, OneOf(backends)] = "embedded"
    """`embedded` is the engine of this package; the others are servers reached over HTTP. See
    docs/engines.md.
    """
    urls: str = ""
    """URLs of running servers on this host, separated by spaces. Empty lets `vllm` start a server.
    """
    python: str = ""
    """Python interpreter of the vLLM servers that the run starts, such as
    `.venv-vllm/bin/python`. Empty uses the interpreter of the run. Only vLLM must be installed
    there.
    """
    servers: PositiveInt = 1
    """Number of vLLM servers that the run starts on each host. Each of several servers has its own
    GPUs, and an episode stays on one server.
    """
    args: str = ""
    """More command-line flags for each vLLM server that the run starts, or for an engine of another
    package.
    """
    gpu_memory_utilization: Share = 0.0
    """Share of GPU memory for each vLLM server that the run starts; 0 computes it from the model
    sizes.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of generation. `auto` picks bfloat16 or float32: the faster one on this machine."""
    transfer: Transfer = "auto"
    """How new weights get to the engines. `file`: through main memory; vLLM servers load a file
    there. `nccl`: from the trainer's GPU to vLLM servers on other GPUs of this machine. `auto`: the
    embedded engine reads the weights on the trainer's GPU, if there is one; otherwise like `file`.
    """
    quantise: Quantise = "none"
    """Number format to which the engine rounds weights and activations. `embedded` has all formats,
    `vllm` only `fp8`. See docs/quantisation.md.
    """
    adapters: Adapters = "merged"
    """How the engine adds LoRA adapters: to its weights, or (`unmerged`) to the outputs of layers,
    as the trainer does. Then it samples several versions at once. See docs/lora.md.
    """
    bitwise: bool = False
    """Compute the same log-probabilities as the trainer, bit for bit, so that D is exactly 1. The
    run stops if one differs. For dense models on CPUs (docs/engines.md).
    """
    threads: PositiveInt = 1
    """CPU threads of each engine process."""
    processes: PositiveInt = 1
    """Number of embedded engine processes. For a small model, more processes are faster than more
    threads. Each process has a GPU of its own if there are enough GPUs.
    """
    max_running: PositiveInt = 128
    """Largest number of replies generated at the same time, by all embedded processes or all
    servers that the run starts together (rounded up to a multiple of their number). A server of
    `urls` has its own limit.
    """
    max_context: Annotated[int, Range(16)] = 1024
    """Largest number of tokens in an episode, with prompts and replies."""
    temperature: NonNegative = 1.0
    """Sampling temperature, above 0. The trainer divides its logits by the same temperature."""
    top_p: Share = 1.0
    """Sample from the smallest set of most probable tokens whose probabilities have at least this
    sum. If below 1, each token's set is recorded, and the trainer uses it (docs/kept-sets.md).
    """
    top_k: Count = 0
    """Sample from this number of most probable tokens; 0 sets no limit. Applied before `top_p`.
    The set of tokens that could be sampled is recorded, as with `top_p`.
    """
    min_p: Share = 0.0
    """Sample from tokens whose probability is at least this share of the highest one. Applied
    before `top_k` and `top_p`. The set of tokens that could be sampled is recorded, as with
    `top_p`.
    """
    logit_bias: str = ""
    """Numbers to add to the logits of tokens, as ID=NUMBER, separated by spaces. `-inf` bans a
    token. See docs/kept-sets.md.
    """
    max_completion_tokens: PositiveInt = 96
    """Largest number of tokens in one reply."""
    keep_cache: bool = False
    """Keep the KV cache when weights change. This is faster, but tokens are then not sampled by a
    single version of the weights.
    """
    load_tokens: Count = 0
    """With several engines, a request goes to the one with the least load: its running replies,
    plus 1 for this many context tokens. 0 counts only replies.
    """
    scenarios: Scenarios = "auto"
    """With several engines, by what they are divided into groups, each with its own prompts in its
    caches: `task_set` (of a mixed task set), `prefix` (the first 64 tokens of a prompt), or `none`.
    `auto` is `task_set` with `prefill_engines`, otherwise `none`.
    """
    prefill_engines: Count = 0
    """Number of engines (processes, servers or engine hosts) that get only requests with much new
    context and a short reply. These are the first engines; the others decode. 0 sends all requests
    to all.
    """
    prefill_ratio: Positive = 8.0
    """With `prefill_engines`: a request goes to a prefill engine if its context tokens that no
    decode engine has cached, divided by the expected reply tokens, are above this ratio.
    """
    send_cache: bool = False
    """With `prefill_engines` of the embedded backend: a prefill engine only computes the context of
    a request and the first token. It sends the KV cache to a decode engine, which samples the rest.
    """
    move_engines: bool = False
    """With `prefill_engines` or `scenarios`: engines change between prefill and decode, and between
    groups, as the measured times require, with each version and while they serve.
    `prefill_engines` is then the number at the start.
    """
    precise_engines: Count = 0
    """With `quantise`: number of engines (processes or servers) that do not round weights and
    activations. These are the last engines. They sample what the technique `regenerate` samples
    again, and evaluations.
    """
    probe_tolerance: NonNegative = 0.0
    """Largest mean difference, in nats, between the log-probabilities of a server and of the
    trainer on the 32 tokens that test each new version; 0 allows 0.001 for float32, 0.05 for
    float16, and 0.2 for bfloat16 and FP8.
    """
    restarts: Count = 2
    """Number of times that a crashed engine is restarted before the run stops. Interrupted replies
    continue.
    """

    @property
    def num_engines(self) -> int:
        """Number of engines on one host."""
        return len(self.urls.split()) or self.num_started

    @property
    def num_started(self) -> int:
        """Number of engines that the run starts on one host. Servers in `urls` do not count."""
        return self.processes * self.servers  # one of both is 1

    @property
    def divides(self) -> bool:
        """True if requests of different scenarios may have different groups of engines."""
        by_default = self.scenarios == "auto" and self.prefill_engines > 0
        return by_default or self.scenarios in ("task_set", "prefix")

    def applies(self, option: str) -> bool:
        if option in ("prefill_ratio", "send_cache"):
            return self.prefill_engines > 0
        if option == "move_engines":
            return self.prefill_engines > 0 or self.divides
        if option == "precise_engines":
            return self.quantise != "none"
        return Section.applies(self, option)  # super() fails in a class with slots

    def check_combination(self) -> None:
        if self.dtype == "auto":
            # The chosen precision replaces `auto`, so that the run folder records it.
            object.__setattr__(self, "dtype", fast_dtype())
        self._check_quantise()
        self._check_precise()
        self._check_phases()
        if self.max_running < self.num_started:
            option = "engine.processes" if self.processes > 1 else "engine.servers"
            raise ConfigError(
                f"engine.max_running must be >= {self.num_started} ({option}), "
                f"got {self.max_running}"
            )
        if self.backend == "embedded" and self.urls:
            raise ConfigError("engine.urls needs a server backend: set engine.backend too")
        args = self.args and self.backend not in added_names("unstale.engines")
        of_servers = args or self.gpu_memory_utilization or self.python or self.servers > 1
        if of_servers and (self.backend != "vllm" or self.urls):
            raise ConfigError(
                "engine.args, engine.gpu_memory_utilization, engine.python and engine.servers are "
                "for a vLLM server that the run starts: set engine.backend = vllm and no "
                "engine.urls"
            )
        if self.transfer == "nccl" and self.backend != "vllm":
            raise ConfigError(
                f"engine.transfer = nccl needs engine.backend = vllm, got {self.backend}"
            )
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise ConfigError(f"engine.args cannot be {self.args!r}: {error}") from None
        if self.backend != "embedded" and self.processes > 1:
            raise ConfigError(
                "engine.processes is an option of engine.backend = embedded; "
                "for more vLLM servers set engine.servers, for other servers give engine.urls"
            )
        if not self.temperature:
            raise ConfigError(
                "engine.temperature must be > 0, got 0: learning is impossible, because greedy "
                "sampling has log-probability 0 for every token. For greedy evaluation set "
                "eval.temperature = 0"
            )
        self._check_truncation()
        if self.biases and (self.backend != "embedded" or self.bitwise):
            other = "engine.bitwise" if self.bitwise else f"engine.backend = {self.backend}"
            raise ConfigError(
                f"engine.logit_bias is not built with {other}: only the embedded engine's own "
                "sampling adds it to the logits as the trainer does. Remove one of both"
            )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The tokens of `logit_bias`, each with the number that is added to its logit.

        >>> EngineConfig(logit_bias="5=-inf 7=1.5").biases
        ((5, -10000.0), (7, 1.5))
        """
        found: dict[int, float] = {}
        for entry in self.logit_bias.split():
            token, _, text = entry.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not token.isdecimal() or not (abs(value) <= LARGEST_BIAS or value == -math.inf):
                raise ConfigError(
                    f"engine.logit_bias has {entry!r}: write the id of a token, = and a number "
                    f"from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf for a banned token"
                )
            if int(token) in found:
                raise ConfigError(f"engine.logit_bias names token {token} twice")
            found[int(token)] = max(value, BANNED)
        return tuple(sorted(found.items()))

    @property
    def truncated_by(self) -> str:
        """The options that cut off a part of the sampling distribution, with their values, as text.

        Empty if there are none.
        """
        return limits_text("engine", {name: getattr(self, name) for name in LIMITS})

    def _check_truncation(self) -> None:
        if not self.top_p or self.top_k == 1 or self.min_p == 1:
            raise ConfigError(
                f"{self.truncated_by} keeps only the most probable token: learning is impossible, "
                "because its log-probability is always 0. Keep more tokens. For greedy evaluation "
                "set eval.temperature = 0"
            )
        if self.truncated_by and self.backend == "vllm" and not self.top_k:
            raise ConfigError(
                f"engine.top_k must be above 0 with {self.truncated_by} and engine.backend = vllm, "
                "got 0: vLLM returns the kept sets only of requests with a top-k. Set "
                "--engine.top_k 512"
            )
        if self.truncated_by and self.bitwise:
            raise ConfigError(
                f"engine.bitwise must be false with {self.truncated_by}: not built, because engine "
                "and trainer do not sum over a kept set in the same order"
            )

    def _check_quantise(self) -> None:
        if self.quantise == "none":
            return
        formats = ROUNDED_BY.get(self.backend, ())
        if self.quantise not in formats:
            work = [f"{', '.join(each)} with {backend}" for backend, each in ROUNDED_BY.items()]
            raise ConfigError(
                f"engine.quantise must be {' or '.join(['none', *formats])} with engine.backend = "
                f"{self.backend}, got {self.quantise}. These formats work: {'; '.join(work)}"
            )
        if self.backend == "vllm" and self.dtype != "bfloat16":
            raise ConfigError(
                f"engine.dtype must be bfloat16 with engine.quantise = {self.quantise} and "
                f"engine.backend = vllm, got {self.dtype}: vLLM quantises only bfloat16 weights"
            )

    def _check_phases(self) -> None:
        """Raise `ConfigError` for options of groups of engines that cannot be used."""
        given = {
            f"prefill_ratio = {self.prefill_ratio:g}": self.prefill_ratio != 8.0,
            "send_cache = true": self.send_cache,
        }
        for option, is_set in given.items():
            if is_set and not self.prefill_engines:
                raise ConfigError(f"engine.{option} is used only with engine.prefill_engines > 0")
        if self.move_engines and not self.applies("move_engines"):
            raise ConfigError(
                "engine.move_engines = true is used only with engine.prefill_engines > 0, or with "
                "engine.scenarios = task_set or prefix"
            )
        if self.send_cache and self.backend != "embedded":
            raise ConfigError(
                "engine.send_cache needs engine.backend = embedded, got "
                f"{self.backend}: a server sends its cache only by its own connector"
            )

    def _check_precise(self) -> None:
        """Raise `ConfigError` if a part of the engines cannot be without rounding."""
        if not self.precise_engines:
            return
        needed = {
            "engine.quantise other than none": self.quantise != "none",
            "engine.prefill_engines = 0": not self.prefill_engines,
            "engine.scenarios = auto or none": self.scenarios in ("auto", "none"),
            "engines that the run starts, and no engine.urls": not self.urls,
            f"more engines (engine.processes or engine.servers), got {self.num_started}": (
                self.precise_engines < self.num_started
            ),
        }
        for option, is_set in needed.items():
            if not is_set:
                raise ConfigError(
                    f"engine.precise_engines = {self.precise_engines} needs {option}: the last "
                    "engines do not round, and at least one other does"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """The limits of an episode, and the processes that run episodes."""

    max_turns: PositiveInt = 10
    """Largest number of replies in an episode."""
    timeout_s: Positive = 60.0
    """Seconds within which an environment must answer a call. Terminal tasks may take longer: their
    sandboxes have limits of their own.
    """
    retries: Count = 1
    """Number of times that an episode is started again after an error of its environment, with the
    same seed.
    """
    max_failed_share: Share = 0.2
    """Stop the run if a larger share of episodes failed in the last 100 groups, or in as many
    groups as run concurrently if that is more. Checked once 20 groups have ended. When n groups
    have ended, the share is over the first n that were started. Groups among these that still run
    count as without failures.
    """
    processes: PositiveInt = 1
    """Number of processes that run episodes, for environments that need more than one core. The
    groups are divided between them. With 1, the run's own process runs all episodes. More than 1
    needs engines on HTTP servers or engine hosts (docs/scale-out.md).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig(Section):
    """The HTTP endpoint that external agents call. It is not used for agents inside the run."""

    refused_unread: ClassVar = ("format_retries", "certificate_key")
    read_with: ClassVar = {
        "format_retries": ("lenient", "= true"),
        "certificate_key": ("certificate", "set"),
    }

    host: str = "127.0.0.1"
    """IP address on which the endpoint listens. If it is not a loopback address, agents in
    containers and on other machines can call it.
    """
    public_host: str = ""
    """Name or address under which agents reach `host`. Empty means `host` itself.
    """
    certificate: str = ""
    """PEM file with a certificate (and its chain) for TLS. Empty means no TLS.
    """
    certificate_key: str = ""
    """PEM file with the private key of `certificate`. Empty means that it is in the same file."""
    allow_plaintext: bool = False
    """Allow a `host` that is not a loopback address without TLS. Everybody on the network between
    can then read the token and the calls.
    """
    lenient: bool = False
    """Ignore sampling parameters that the endpoint does not support, instead of refusing the call.
    Such calls are counted.
    """
    format_retries: Count = 2
    """With `lenient`: number of times that a reply without the requested `response_format` is
    sampled again.
    """

    @property
    def is_local(self) -> bool:
        """True if only programs of this machine can reach the endpoint."""
        return ip_address(self.host).is_loopback

    def applies(self, option: str) -> bool:
        needed = {"format_retries": self.lenient, "certificate_key": bool(self.certificate)}
        return needed.get(option, True)

    def check_combination(self) -> None:
        try:
            address = ip_address(self.host)
        except ValueError:
            raise ConfigError(
                "endpoint.host must be an IP address of this machine, such as 127.0.0.1 or "
                f"0.0.0.0, got {self.host!r}"
            ) from None
        if address.is_unspecified and not self.public_host:
            raise ConfigError(
                f"endpoint.host = {self.host} is every address of this machine: set "
                "endpoint.public_host to the one under which agents reach it"
            )
        if not self.is_local and not self.certificate and not self.allow_plaintext:
            raise ConfigError(
                f"endpoint.host = {self.host} can be reached from outside: set "
                "endpoint.certificate for TLS, or endpoint.allow_plaintext = true if everybody on "
                "the network between may read the token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig(Section):
    """A pool of training tasks that are used again and again. A technique may choose among them."""

    refused_unread: ClassVar = ("candidates", "test_time")
    read_with: ClassVar = {"candidates": ("pool", "> 0"), "test_time": ("pool", "> 0")}

    pool: Count = 0
    """Number of training tasks that are used again and again, with different random numbers; 0 uses
    all tasks in the order of the task set.
    """
    candidates: PositiveInt = 256
    """Only with `pool` above 0: number of tasks of the pool, drawn at random, from which a
    technique chooses the next one.
    """

    test_time: bool = False
    """Only with `pool` above 0: take the pool from the held-out tasks, to train on them without
    their labels (the technique `majority`).
    """

    def applies(self, option: str) -> bool:
        return option == "pool" or self.pool > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig(Section):
    """The size of a batch, and how stale its tokens may be. See docs/staleness.md."""

    max_staleness: Count = 2
    """Largest number of versions between the weights that sampled a token and the weights that
    train on it. 0 trains synchronously. A `lookahead_window` above 1 increases this limit
    (docs/staleness.md).
    """
    groups_per_step: PositiveInt = 16
    """Number of tasks in a batch."""
    group_size: PositiveInt = 8
    """Number of episodes of each task."""
    pin_versions: bool = False
    """Sample each episode to its end with the version of the weights that began it. Needs
    `engine.adapters` = unmerged. See docs/lora.md.
    """
    lookahead_window: PositiveInt = 1
    """A batch may take a finished group before older ones only among this number of oldest groups.
    1 takes groups strictly in order.
    """
    resampled_groups: Count = 0
    """Largest number of groups of a batch that are replaced because all their rewards are equal, so
    that they teach nothing; 0 replaces none. See docs/batches.md.
    """
    adaptive_window: bool = False
    """Take a finished group before older ones whenever all older groups can still be trained on
    within `max_staleness`. Replaces `lookahead_window`, which must then be 1.
    """

    def check_combination(self) -> None:
        if self.resampled_groups and (self.adaptive_window or self.lookahead_window > 1):
            raise ConfigError(
                f"schedule.resampled_groups must be 0 without strict order, got "
                f"{self.resampled_groups}, because more is not built with a window: set "
                "schedule.adaptive_window = false and schedule.lookahead_window = 1"
            )
        if self.resampled_groups and self.group_size == 1:
            raise ConfigError(
                f"schedule.resampled_groups = {self.resampled_groups} needs schedule.group_size > "
                "1: the rewards of a single episode are always equal"
            )
        if self.adaptive_window and self.lookahead_window > 1:
            raise ConfigError(
                "schedule.lookahead_window must be 1 with schedule.adaptive_window, got "
                f"{self.lookahead_window}: the queue chooses the window, and max_staleness is the "
                "whole bound"
            )

    @property
    def staleness_bound(self) -> int:
        """The largest staleness, in versions, that a token can have when its batch is formed."""
        return staleness_bound(self.max_staleness, self.groups_per_step, self.lookahead_window)
