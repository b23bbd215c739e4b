"""This machine as a device: its matrix products and memory, and the shares that trainer and embedded engine reach."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from afterimage.build import build_correction, build_objective
from afterimage.config import ConfigError, CorrectionConfig, ObjectiveConfig, TrainerConfig
from afterimage.engines import SamplingParams
from afterimage.engines.embedded import EmbeddedEngine
from afterimage.old_logps.rollout import Rollout
from afterimage.plan.hardware import Device, Shares
from afterimage.plan.measured import like
from afterimage.plan.models import Model
from afterimage.policy import Policy
from afterimage.trainer import Rules, Trainer
from afterimage.trajectory import Credited, Given, Sampled, Task, Trajectory, collate

REPEATS = 3
"""Of which the quickest counts."""
_SEQUENCES, _LENGTH, _REPLIES, _SAID = 8, 512, 32, 64


def measure(folder: Path, model: Model) -> tuple[Device, Shares]:
    """On one thread of the processor, in bfloat16: half a minute for a model of some million parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = Policy.load(folder, dtype="bfloat16", device="cpu")
        one, many = asyncio.run(_decode_s(folder, policy))
        peak = _matmul_rate()
        least = model.forward_flops(_SAID / 2) / peak  # no reply takes less, whatever the two measurements say
        each = max(least, (many - one) / (_REPLIES - 1))
        trained = 3 * _SEQUENCES * _LENGTH * model.forward_flops(_LENGTH / 2) / _train_s(policy)
        rates = {"train": trained, "decode": peak * least / each}
        return _device(rates, step_s=max(0.0, one - each), peak=peak)
    finally:
        torch.set_num_threads(threads)


def read(path: Path, model: Model) -> tuple[Device, Shares]:
    """What `write` wrote, or what a run's trainer and engine took. Raises `ConfigError`."""
    if path.is_dir():
        setting = like(path)
        costs, shapes = setting.costs, [shape for group in setting.workload.recorded for shape in group]
        token = model.forward_flops(sum(shape.tokens for shape in shapes) / len(shapes) / 2)
        if not costs.train_token:
            raise ConfigError(f"{path}: the batches of the run are too much alike to tell what a token costs")
        rates = {"train": 3 * token / costs.train_token}
        rates["decode"] = token / costs.decode_reply if costs.decode_reply else rates["train"]
        return _device(rates, step_s=costs.decode, peak=max(rates.values()))
    try:
        told = json.loads(path.read_text())
        return Device(**told["device"]), Shares(**told["shares"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--measured {path} is neither a run folder nor what --measure writes: {error}") from error


def write(path: Path, device: Device, shares: Shares) -> None:
    path.write_text(json.dumps({"device": asdict(device), "shares": asdict(shares)}, indent=1) + "\n")


def _device(rates: dict[str, float], *, step_s: float, peak: float) -> tuple[Device, Shares]:
    """One core. What passes between processes passes through the main memory."""
    copied, most = _copy_rate(), max(peak, *rates.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(os.sched_getaffinity(0))
    links = dict.fromkeys(("bandwidth", "link", "host_link", "network"), copied)
    device = Device(name="core of this machine", flops=most, memory=memory, node=1 << 30, **links)
    reached = {"matmul": rates["train"] / most, "decode": rates["decode"] / most}
    return device, replace(Shares(), **reached, bandwidth=1.0, link=1.0, step_s=step_s)


def _quickest(work: Callable[[], object]) -> float:
    """Seconds, after one time for warming up."""
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _matmul_rate() -> float:
    one = torch.randn(1024, 1024).bfloat16()
    return 2 * 1024**3 / _quickest(lambda: one @ one)


def _copy_rate() -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _quickest(lambda: target.copy_(source))


def _train_s(policy: Policy) -> float:
    """A step of the project's trainer on random tokens."""
    rules = Rules(
        correction=build_correction(CorrectionConfig(control="none")),
        objective=build_objective(ObjectiveConfig(kind="none")),
        temperature=1.0,
    )
    config = TrainerConfig(dtype="bfloat16", lr=1e-6)
    trainer = Trainer(policy, config, rules, Rollout(), num_steps=REPEATS + 1)
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    items = []
    for number in range(_SEQUENCES):
        tokens = tuple(torch.randint(vocabulary, (_LENGTH - 1,)).tolist())
        pieces = (Given(tokens[:1]), Sampled(tokens, (-1.0,) * len(tokens), 0))
        task = Task("random", "train", number)
        items.append(Credited(Trajectory(pieces, {"reward": 1.0}, "done", task, seed=0, episode=number), (1.0,)))
    batch = collate(items)

    def step() -> None:
        trainer.backward(trainer.prepare(batch).parts[0])
        trainer.step()

    return _quickest(step)


async def _decode_s(folder: Path, policy: Policy) -> tuple[float, float]:
    """A decoding step of the embedded engine: of one reply, and of many."""
    engine = EmbeddedEngine(folder, dtype="bfloat16", threads=1, max_slots=_REPLIES, max_context=4 * _SAID)
    found = []
    try:
        await engine.start()
        await engine.load(policy.weights(), 0)
        await engine.resume()
        for replies in (1, _REPLIES) * (REPEATS + 1):
            asked = (engine.sample([number % 2], SamplingParams(_SAID, (), seed=number)) for number in range(replies))
            engine.metrics()
            await asyncio.gather(*asked)
            counters = engine.metrics()
            found.append(counters["busy_s"] / counters["steps"])
    finally:
        await engine.close()
    return min(found[2::2]), min(found[3::2])  # the first are for warming up
