"""A vLLM server as a child process, on a Unix socket in a folder that only this user can open."""

import contextlib
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from unstale.engines import NOT_STARTED
from unstale.engines.registry import EngineOptions
from unstale.weights.child_process import visible_gpus
from unstale.weights.leftovers import hold_lock, remove_leftovers

_WORKER = "unstale_vllm_worker"
"""The name under which the server's process imports `vllm_worker.py`. It cannot import other
modules of this package, so its interpreter needs only the packages of vLLM.
"""
EXTENSION = f"{_WORKER}.Extension"
_CHECK_S = 60.0
_PREFIX = "unstale-vllm-"
_LOG_TAIL_BYTES = 4000
_TERMINATE_S = 10.0
_MAX_SOCKET_BYTES = 107
"""Largest length in bytes of the path of a Unix socket on Linux, without the final zero."""
_SOCKET_NAME_BYTES = 36
"""Length in bytes of the names that vLLM gives its sockets, which are random UUIDs."""
ACTIVATIONS_SHARE = 0.15
"""Share of GPU memory that a server leaves free for the trainer's activations and caches."""
QUANTIZATION = {"none": None, "fp8": "fp8_per_block"}
"""The value of vLLM's flag `--quantization` for each value of `EngineOptions.quantise`. None means
that the flag is not set. `fp8_per_block` uses the blocks of `model.quantisation.FORMATS`, and
quantises bfloat16 weights at each load.
"""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `--max-lora-rank`."""
_MEMORY_FLAG = "--gpu-memory-utilization"
_OPTIONS = {
    "--model": "policy",
    "--dtype": "engine.dtype",
    "--max-num-seqs": "engine.max_running",
    "--max-model-len": "engine.max_context",
    "--enable-return-routed-experts": "trainer.routing_replay",
    "--return-sampling-mask": "engine.top_k",
    "--weight-transfer-config": "engine.transfer",
    "--enable-lora": "engine.adapters",
    "--max-loras": "schedule.max_staleness",
    "--max-lora-rank": "trainer.lora_rank",
    _MEMORY_FLAG: "engine.gpu_memory_utilization",
}
"""Flags of vLLM that are set by an option of the run, each with the option's name."""


class VllmServer:
    """A vLLM server and its child processes. They end with `close`, or when this process ends.

    The server starts with random weights. So the probe, the test after a load, fails if the first
    load left a parameter unchanged. If adapters are not merged, the server starts with the base
    weights.
    """

    def __init__(self, options: EngineOptions, extension: str = EXTENSION) -> None:
        """Prepare the command by which `start` starts the server.

        vLLM adds the class `extension` to its workers. Raises ValueError if `options.args` has a
        flag that the run sets, the path of `TMPDIR` is too long, the Python interpreter is missing,
        or the host has too few GPUs.
        """
        self._folder = _socket_folder()
        self._resources = contextlib.ExitStack()
        self.url = f"unix:{self._folder}/http"
        self._python = find_python(options.python)
        self._threads = options.threads
        self._gpus = _own_gpus(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()
        """A lock that `start` and `close` hold, because they run in different threads."""
        self._arguments = [
            f"--model={options.model_folder.resolve()}",
            f"--uds={self._folder}/http",
            "--skip-tokenizer-init",
            "--generation-config=vllm",
            "--logprobs-mode=processed_logprobs",
            "--enable-scale-out",
            "--enable-prompt-tokens-details",
            "--uvicorn-log-level=warning",
            f"--dtype={options.dtype}",
            f"--max-num-seqs={options.max_running}",
            f"--max-model-len={options.max_context}",
            f"--worker-extension-cls={extension}",
        ]
        self._arguments += _weight_flags(options)
        if quantization := QUANTIZATION[options.quantise]:
            self._arguments.append(f"--quantization={quantization}")
        if options.record_experts:
            self._arguments.append("--enable-return-routed-experts")
        if options.truncation:
            self._arguments.append("--return-sampling-mask")
        if options.transfer == "nccl":
            self._arguments.append('--weight-transfer-config={"backend": "nccl"}')
        if not torch.cuda.is_available():
            self._arguments.append("--enforce-eager")
            # vLLM 0.32 on CPUs ends at a prompt in parts: it sets the offset of a random generator,
            # which CPU generators do not have.
            self._arguments.append("--no-enable-chunked-prefill")
        elif options.gpu_memory_utilization:
            self._arguments.append(f"{_MEMORY_FLAG}={options.gpu_memory_utilization}")
        self._arguments += _checked_flags(options.args, self._arguments)

    @property
    def alive(self) -> bool:
        process = self._process
        return process is not None and not self._killed and process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(NOT_STARTED)
        return self._process.pid

    def start(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """End the present server process, if there is one, and start a new one.

        The call does not wait until the server answers requests. No process is started if
        `is_wanted` returns False. `close` may run in another thread before this call. So a caller
        of `close` must first make `is_wanted` return False.
        """
        with self._lock:
            self._end()
            self._killed = False
            self._resources.close()
            if is_wanted():
                self._start_process()

    def _start_process(self) -> None:
        remove_leftovers(self._folder.parent, _PREFIX)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._resources.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._resources.enter_context(hold_lock(self._folder))
        modules = self._folder / "modules"
        modules.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (modules / f"{_WORKER}.py").symlink_to(Path(__file__).with_name("vllm_worker.py"))
        command = [self._python, "-P", "-m", _WORKER, *self._arguments]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                # the pipe closes when this process ends, which ends the server
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=server_environment(modules, python=self._python, threads=self._threads)
                | visible_gpus(self._gpus),
            )

    def describe_exit(self) -> str:
        """Return the exit code of the server and the end of its log, for an error message."""
        code = self._process.poll() if self._process is not None else None
        message = f"the server ended with exit code {code}"
        log = self._folder / "log"
        if log.exists():
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            if tail:
                message += f":\n{tail}"
        return message

    def kill(self) -> None:
        """Kill the server and its child processes, without waiting for their end."""
        self._killed = True
        process = self._process  # another thread may end it meanwhile
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server and wait for its end.

        SIGTERM is sent first, because a killed server leaves shared memory behind. After
        `_TERMINATE_S` seconds the server is killed.
        """
        with self._lock:
            if self._process is not None and self.alive:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERMINATE_S)
            self._end()
            self._resources.close()

    def _end(self) -> None:
        self.kill()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            self._process = None


def _weight_flags(options: EngineOptions) -> list[str]:
    """Return the vLLM flags that choose the initial weights and allow LoRA adapters.

    Raises ValueError for a LoRA rank that vLLM does not support.
    """
    if options.adapters == "merged" or options.merging is None:
        return ["--load-format=dummy"]
    rank = next((each for each in _LORA_RANKS if each >= options.merging.rank), 0)
    if not rank:
        raise ValueError(
            f"trainer.lora_rank must be at most {_LORA_RANKS[-1]} with engine.adapters = unmerged "
            f"and vLLM, got {options.merging.rank}"
        )
    return ["--enable-lora", f"--max-loras={options.max_versions}", f"--max-lora-rank={rank}"]


def require_vllm(python: str) -> None:
    """Raise ValueError if the interpreter `python` ("": that of this process) has no vLLM."""
    if python:
        _require_vllm_of(python, find_python(python))
    elif find_spec("vllm") is None:
        raise ValueError(
            "engine.backend = vllm needs vLLM, which this Python does not have: set engine.python "
            "to an interpreter that has it, install it here, or give the engine.urls of servers "
            "that already run"
        )


def find_python(python: str) -> str:
    """Return the path of the interpreter `python`, or of this process's interpreter if it is "".

    Raises ValueError if `python` is not an executable program.
    """
    if not python:
        return sys.executable
    path = shutil.which(Path(python).expanduser())
    if path is None:
        raise ValueError(
            f"engine.python = {python} is not a program that can be run: give the path of a Python "
            "interpreter, such as .venv-vllm/bin/python"
        )
    return os.path.abspath(path)


def _require_vllm_of(python: str, path: str) -> None:
    code = "import sys, importlib.util as u; sys.exit(10 * (u.find_spec('vllm') is None))"
    try:
        found = subprocess.run([path, "-P", "-c", code], capture_output=True, timeout=_CHECK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"engine.python = {python} cannot be run: {error}") from error
    if found.returncode == 10:
        raise ValueError(
            f"engine.python = {python} has no vLLM: install it there "
            f"({path} -m pip install vllm), or give the path of another Python interpreter"
        )
    if found.returncode:
        text = found.stderr.decode(errors="replace").strip()[-_LOG_TAIL_BYTES:]
        raise ValueError(
            f"engine.python = {python} is no Python of version 3.11 or later: it ended with exit "
            f"code {found.returncode}: {text}"
        )


def _socket_folder() -> Path:
    """Return a free path for a folder of sockets. The folder is not created.

    Raises ValueError if the paths of the sockets would be too long.
    """
    parent = tempfile.gettempdir()
    folder = Path(parent, f"{_PREFIX}{secrets.token_hex(6)}")
    over = len(os.fsencode(folder)) + 1 + _SOCKET_NAME_BYTES - _MAX_SOCKET_BYTES
    if over > 0:
        length = len(os.fsencode(parent))
        raise ValueError(
            f"the folder for temporary files, {parent}, has a path of {length} bytes, but a vLLM "
            f"server needs one of at most {length - over} for its sockets: set TMPDIR to a "
            "shorter one"
        )
    return folder


def _checked_flags(flags: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """Return `flags`, the user's flags for the server, after checking them.

    `own` are the flags that the run sets. Raises ValueError if the user sets one of these, or an
    abbreviation, which vLLM would accept.
    """
    taken = [*(each.partition("=")[0] for each in own), _MEMORY_FLAG]
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name.startswith(("--quant", "-q")):
            raise ValueError(f"engine.args cannot set {flag}: set engine.quantise = fp8")
        matches = [each for each in taken if each.startswith(name)]
        if name.startswith("--") and matches:
            options = dict.fromkeys(_OPTIONS[each] for each in matches if each in _OPTIONS)
            remedy = f"set {' or '.join(options)} instead" if options else "the run sets it itself"
            raise ValueError(f"engine.args cannot set {flag}: {remedy}")
    return flags


def gpus_here() -> list[str]:
    """Return the names of the GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`.

    No GPU is initialised.
    """
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(count)]
    return [each.strip() for each in named.split(",")][:count]


def _own_gpus(options: EngineOptions) -> Sequence[str]:
    """Return the GPUs for the server with the number `options.number` on its host.

    Empty if the server may use all GPUs. Raises ValueError if the host has too few.
    """
    gpus = options.gpus or gpus_here()
    if not options.gpus_each or not gpus:
        return options.gpus
    end = (options.number + 1) * options.gpus_each
    if end > len(gpus):
        raise ValueError(
            f"server {options.number + 1} of engine.servers needs GPUs {end - options.gpus_each} "
            f"to {end - 1}, but its host has {len(gpus)} for servers: lower engine.servers"
        )
    return gpus[end - options.gpus_each : end]


def can_quantise(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if vLLM can compute in FP8 here: on a GPU, or on a CPU with AMX."""
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return torch.cuda.is_available() or "amx_tile" in flags


def gpu_share(weights: int, *, total: int, trainer_bytes: int, engine_bytes: int) -> float:
    """Return the share of a GPU's memory (0 to 1) that a server may use next to the trainer.

    `weights` is the number of parameters of the model, and `total` the GPU's memory in bytes.
    `trainer_bytes` and `engine_bytes` are the bytes that trainer and server need for each
    parameter. A further 15% of the memory is left for the trainer's activations. Raises ValueError
    if both do not fit together.

    >>> gpu_share(4_000_000_000, total=140_000_000_000, trainer_bytes=18, engine_bytes=2)
    0.33
    """
    trainer, engine = weights * trainer_bytes, weights * engine_bytes
    share = min(0.9, math.floor(100 * (1 - ACTIVATIONS_SHARE - trainer / total)) / 100)
    if share * total < engine * 1.1:
        raise ValueError(
            f"the GPU's {total / 1e9:.0f} GB hold no engine ({engine / 1e9:.0f} GB and its cache) "
            f"beside the trainer ({trainer / 1e9:.0f} GB and activations): use adapters "
            "(trainer.lora_rank), a smaller model or engine.urls of servers on other GPUs, or set "
            "engine.gpu_memory_utilization"
        )
    return share


def server_environment(modules: Path, *, python: str, threads: int) -> dict[str, str]:
    """Return the environment variables for a server's process.

    `modules` is the folder from which the server imports `vllm_worker.py`. Its parent folder has
    the server's sockets. `threads` is the number of CPU threads. Variables of this process are
    passed on, except those that a run must set itself. The folder of `python` comes first in
    `PATH`, because vLLM starts tools that are installed there.
    """
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    python_path = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = [os.path.dirname(python), *filter(None, [os.environ.get("PATH")])]
    required = {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(python_path),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": str(modules.parent),
    }
    return defaults | dict(os.environ) | required
