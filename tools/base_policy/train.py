"""Supervised training in stages: first clean examples, then partly faulty demonstrations.

Several processes with one thread each draw their own examples and average their gradients: a model
this small is no faster with a second thread.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.base_policy.practice import Example, Practice

Report = Callable[[str, int, float, float], None]
"""Receives stage, step, loss and tokens per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of training. Its learning rate rises for 5% of the steps, then falls to 0."""

    name: str
    steps: int
    learning_rate: float
    drills: float = 0.0
    """Share of examples that are look-ups, alternately plain and in conversations."""
    sessions: float = 0.0
    """Share of examples that are sessions; the rest are demonstrations."""
    faulty: bool = False
    tokens: int = 2048
    """Approximate number of tokens per process and step."""


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of a process and the number of processes."""

    rank: int = 0
    workers: int = 1


def examples(practices: Sequence[Practice], stage: Stage, place: Place) -> Iterator[Example]:
    """Yield examples of all practices without end; each depends on its index alone."""
    for index in count(place.rank, place.workers):
        practice = Random(f"practice/{index}").choice(practices)
        share = (index // place.workers * 0.6180339887) % 1.0
        if share < stage.drills:
            yield practice.drill(index) if index // place.workers % 2 else practice.dictation(index)
        elif share < stage.drills + stage.sessions:
            yield practice.session(index)
        else:
            split = "faulty" if stage.faulty else "clean"
            yield practice.demonstration(split, index, faulty=stage.faulty)


def batches(
    source: Iterator[Example], tokens: int, pool: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and loss weights `[B, T]` of about `tokens` tokens, sorted by length."""
    generator = torch.Generator().manual_seed(0)
    while True:
        drawn: list[Example] = []
        while sum(len(example.tokens) for example in drawn) < tokens * pool:
            drawn.append(next(source))
        drawn.sort(key=lambda example: len(example.tokens))
        groups: list[list[Example]] = [[]]
        for example in drawn:
            if groups[-1] and (len(groups[-1]) + 1) * len(example.tokens) > tokens:
                groups.append([])
            groups[-1].append(example)
        for place in torch.randperm(len(groups), generator=generator).tolist():
            yield pad(groups[place])


def pad(group: list[Example]) -> tuple[Tensor, Tensor]:
    """Return tokens and loss weights `[B, T]` of examples, padded with weight 0."""
    length = max(len(example.tokens) for example in group)
    tokens = torch.zeros(len(group), length, dtype=torch.long)
    weights = torch.zeros(len(group), length)
    for row, example in enumerate(group):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        weights[row, : len(example.tokens)] = torch.tensor(example.weights)
    return tokens, weights


def loss_of(model: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the next-token loss."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    each = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    weight = weights[:, 1:].flatten()
    return (each * weight).sum() / weight.sum()


def optimizer_for(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def train_stage(
    model: nn.Module,
    practices: Sequence[Practice],
    stage: Stage,
    *,
    place: Place = Place(),
    report: Report | None = None,
) -> list[float]:
    """Train for a stage and return this process's loss at every step."""
    return train_on(model, examples(practices, stage, place), stage, place=place, report=report)


def train_on(
    model: nn.Module,
    drawn: Iterator[Example],
    stage: Stage,
    *,
    place: Place = Place(),
    report: Report | None = None,
) -> list[float]:
    """Train for a stage on the examples drawn, and return this process's loss at every step."""
    optimizer = optimizer_for(model, stage.learning_rate)
    source = batches(drawn, stage.tokens)
    losses: list[float] = []
    seen, start = 0, time.perf_counter()
    warm_up = max(1, stage.steps // 20)
    for step in range(stage.steps):
        rate = min((step + 1) / warm_up, (stage.steps - step) / (stage.steps - warm_up + 1))
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * rate
        batch, weights = next(source)
        losses.append(one_step(model, optimizer, (batch, weights), place))
        seen += batch.numel() * place.workers
        if report is not None and place.rank == 0:
            report(stage.name, step, losses[-1], seen / (time.perf_counter() - start))
    return losses


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], place: Place
) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        loss = loss_of(model, *batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if place.workers > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, mean in zip(
            gradients, (flat / place.workers).split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def join(place: Place, meeting: str) -> None:
    """Join a group of processes through the file `meeting`."""
    torch.set_num_threads(1)
    with suppress(RuntimeError):  # it can be set once in a process
        torch.set_num_interop_threads(1)
    if place.workers > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=place.rank, world_size=place.workers
        )
