"""A core of this machine as a device, from what a run's trainer and engine took on it."""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from afterimage.config import ConfigError
from afterimage.plan.hardware import Device, Shares
from afterimage.plan.measured import like
from afterimage.plan.models import Model
from afterimage.plan.workload import seen_in


def read(run: Path, model: Model) -> tuple[Device, Shares]:
    """What passes between processes passes through the main memory, whose rate is timed here. Raises `ConfigError`."""
    setting = like(run)
    costs, tokens = setting.costs, [shape.tokens for group in setting.workload.recorded for shape in group]
    seen = seen_in(tokens)
    if not costs.train_token:
        raise ConfigError(f"{run}: the batches of the run are too much alike to tell what a token costs")
    train = 3 * model.forward_flops(seen) / costs.train_token
    decode = model.forward_flops(seen) / costs.decode_reply if costs.decode_reply else train
    most, copied = max(train, decode), _copy_rate()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(os.sched_getaffinity(0))
    links = dict.fromkeys(("bandwidth", "link", "host_link", "network"), copied)
    device = Device(name="core of this machine", flops=most, memory=memory, node=1 << 30, **links)
    reached = {"matmul": train / most, "decode": decode / most}
    return device, replace(Shares(), **reached, bandwidth=1.0, link=1.0, step_s=costs.decode)


def _copy_rate() -> float:
    """Bytes a second, read and written: the quickest of three, after one that brings the pages in."""
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    target, found = torch.empty_like(source), []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(found[1:])
