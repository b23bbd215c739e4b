"""Measure the machine and its kernels for `benchmarks.gpu_check`."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing import spawn  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.routes import settle
from unstale.durability.machine import machine
from unstale.model import fused, head, kernels
from unstale.model.policy import Policy
from unstale.model.tree_attention import WIDEST
from unstale.native import NotCompiled
from unstale.records import Batch, ContextPiece, Sampled, collate
from unstale.testing import tiny_policy

NO_GPU = "not run: no GPU"
SHM = Path("/dev/shm")
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report: a name, its figure, and its number for programs."""

    name: str
    text: str
    value: float | str | None = None


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def software() -> list[Fact]:
    gpus = torch.cuda.device_count()
    names = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "none"
    facts = [
        Fact("GPUs", names, gpus),
        Fact("driver, links", drivers() if gpus else NO_GPU),
        Fact("machine", f"{machine()}, Python {platform.python_version()}"),
    ]
    packages = ("torch", "transformers", "vllm", "triton", "ray")
    return [*facts, *(Fact(name, package(name), package(name)) for name in packages)]


def drivers() -> str:
    """Return the version of the driver, and the number of NVLink connections of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    links = ["nvidia-smi", "nvlink", "--status", "--id=0"]
    try:
        driver, status = (
            subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
            for command in (query, links)
        )
    except OSError as error:
        return f"nvidia-smi cannot be run: {error}"
    return f"{driver.strip()}, {status.count('GB/s')} NVLink connections"


def in_use() -> list[Fact]:
    """Return which kernels a run on this machine uses."""
    on_gpu = torch.cuda.is_available()
    flash = on_gpu and torch.cuda.get_device_capability() >= (8, 0)
    try:
        kernels.Kernels()
        compiled = "yes"
    except NotCompiled as error:
        compiled = f"no: {error}"
    found = {
        "flash attention": _yes(flash) + f", heads up to {WIDEST}" * flash if on_gpu else NO_GPU,
        "Triton": _yes(find_spec("triton") is not None) if on_gpu else NO_GPU,
        "grouped_mm": _yes(hasattr(torch, "_grouped_mm")) if on_gpu else NO_GPU,
        "compiled C": compiled,
    }
    return [Fact(name, text, text) for name, text in found.items()]


def _yes(is_there: bool) -> str:
    return "yes" if is_there else "no"


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call, after one that is not timed."""
    found = []
    for _ in range(repeats + 1):
        settle()
        began = time.perf_counter()
        call()
        settle()
        found.append(time.perf_counter() - began)
    return median(found[1:])


def bandwidths(runs: Path, *, is_tiny: bool) -> list[Fact]:
    """Measure the paths of weights: to a GPU, to shared memory, to disk and between GPUs."""
    size = (4 if is_tiny else 512) * MB
    pageable = torch.ones(size, dtype=torch.uint8)
    facts = []
    for name in ("pinned", "pageable"):
        if not torch.cuda.is_available():
            facts.append(Fact(f"to GPU, {name}", NO_GPU))
            continue
        source = pageable.pin_memory() if name == "pinned" else pageable
        target = torch.empty_like(source, device="cuda")
        facts.append(_rate(f"to GPU, {name}", size, seconds(partial(target.copy_, source))))
    data = pageable.numpy().data
    shared = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
    facts.append(_rate("write to /dev/shm", size, _write_s(shared, data, sync=False)))
    facts.append(_rate("write and fsync, runs", size, _write_s(runs, data, sync=True)))
    few = seconds(lambda: _written(runs, memoryview(b"x" * 4096), sync=True))
    facts.append(Fact("fsync of 4 kB, runs", f"{1e3 * few:.1f} ms", few))
    gpus = torch.cuda.device_count()
    if gpus < 2:
        reason = "not run: one GPU" if gpus else NO_GPU
        return [*facts, Fact("all-gather", reason)]
    return [*facts, _rate("all-gather, each GPU", size, all_gather_s(gpus, size))]


def _rate(name: str, size: int, took_s: float) -> Fact:
    return Fact(name, f"{size / took_s / 1e9:.2f} GB/s", size / took_s)


def _write_s(folder: Path, data: memoryview, *, sync: bool) -> float:
    return seconds(lambda: _written(folder, data, sync=sync), repeats=3)


def _written(folder: Path, data: memoryview, *, sync: bool) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def all_gather_s(count: int, size: int) -> float:
    """Return the seconds in which each of `count` GPUs gathers `size` bytes from all."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_gather, (count, size, folder), nprocs=count)
        return float((Path(folder) / "seconds").read_text())


def _gather(rank: int, count: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = FileStore(f"{folder}/store", count)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=count)
    part = torch.ones(size // count, dtype=torch.uint8, device="cuda")
    whole = torch.empty(size // count * count, dtype=torch.uint8, device="cuda")
    took_s = seconds(lambda: dist.all_gather_into_tensor(whole, part))
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(took_s))
    dist.destroy_process_group()


def room(shared_bytes: float, main_bytes: float) -> list[Fact]:
    """Return the free shared and main memory against what a run needs."""
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return [
        _room("/dev/shm", free, shared_bytes),
        _room("main memory", memory, main_bytes),
    ]


def _room(name: str, free: float, needed: float) -> Fact:
    verdict = "enough" if free >= needed else "TOO LITTLE"
    text = f"{free / 1e9:.1f} GB free, {needed / 1e9:.2g} GB needed: {verdict}"
    return Fact(name, text, free)


@dataclass(frozen=True, slots=True)
class Compared:
    """A kernel of this package beside torch: the largest error relative to the largest value."""

    name: str
    error: float
    ms: float
    torch_ms: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit


def compare_kernels(*, is_tiny: bool) -> list[Compared]:
    """Compare each kernel with torch on this device, in the precision of training."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    dtype, limit = (torch.bfloat16, 0.02) if on_gpu else (torch.float32, 1e-4)
    rows, width, inner, vocab = (64, 64, 128, 512) if is_tiny else (8192, 2560, 9728, 151_936)

    def noise(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape))
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, weight, both = noise(rows, width), noise(width), noise(rows, 2 * inner)
    layer = nn.Linear(width, vocab, bias=False).to(device, dtype)
    some, targets = x[: rows // 4], torch.arange(rows // 4, device=device) % vocab

    def norm() -> Tensor:
        root = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return weight * (x.float() * root).to(dtype)

    def gated() -> Tensor:
        return F.silu(both[:, :inner]) * both[:, inner:]

    def logps() -> Tensor:
        return F.log_softmax(layer(some).float(), -1).gather(1, targets[:, None])[:, 0]

    def own_logps() -> Tensor:
        return head.token_logps(layer, some, targets, temperature=1.0, with_entropy=False)[0]

    pairs: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]] = [
        ("norm", lambda: fused.norm_rows(x, weight, 1e-6)[0], norm),
        ("SwiGLU", lambda: fused.swiglu(both), gated),
        ("log-probabilities", own_logps, logps),
        ("whole model, tree attention", *_models(device, dtype, is_tiny=is_tiny)),
    ]
    if not kernels.fits(x, weight):
        raise RuntimeError("the kernels cannot run here: install Triton, or a C compiler on a CPU")
    found = []
    with torch.no_grad():
        for name, own, peer in pairs:
            expected = peer().double()
            error = float((own().double() - expected).abs().max() / expected.abs().max())
            ms, torch_ms = 1e3 * seconds(own), 1e3 * seconds(peer)
            found.append(Compared(name, error, ms, torch_ms, limit))
    return found


def _models(
    device: str, dtype: torch.dtype, *, is_tiny: bool
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return two functions for log-probabilities of sequences that share a prompt.

    The first scores them in one pass of the policy, and the second one by one with transformers.
    """
    layers, hidden, heads = (2, 64, 4) if is_tiny else (4, 1024, 16)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        policy = Policy(
            AutoModelForCausalLM.from_config(config, dtype=dtype), tiny_policy().tokenizer
        )
    plain.load_state_dict(policy.model.state_dict())
    batch = _shared_prompts(8 if is_tiny else 1024)

    def own() -> Tensor:
        scored = policy.score(
            batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=1 << 16
        )
        return scored.logp[batch.sampled]

    def peer() -> Tensor:
        found = []
        for start, end in batch.spans():
            tokens = batch.tokens[start:end].to(device)
            logits = plain(tokens[None]).logits[0, :-1].float()
            logp = F.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
            found.append(logp.cpu()[batch.sampled[start + 1 : end]])
        return torch.cat(found)

    return own, peer


def _shared_prompts(length: int) -> Batch:
    from benchmarks.routes import scored

    prompt = tuple(range(3, 3 + length % 500 + 8))
    replies = [
        Sampled(
            tuple(torch.randint(3, 500, (length,), generator=noise).tolist()), (-6.0,) * length, 0
        )
        for noise in (torch.Generator().manual_seed(seed) for seed in range(4))
    ]
    return collate(
        [scored((ContextPiece(prompt), reply), number) for number, reply in enumerate(replies)]
    )
