"""Make the shipped base policy: tokenizer, weights, and the recipe with its hash."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.multiprocessing.spawn import spawn
from transformers import AutoTokenizer

from tools.base_policy.model import GAIN, STD, make_model
from tools.base_policy.practice import Practice, corpus
from tools.base_policy.tokenizer import make_tokenizer
from tools.base_policy.train import FAULTS, Place, Report, Stage, join, train_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that determine the policy, together with the code."""

    seed: int = 0
    vocab_size: int = 1024
    corpus: int = 150
    workers: int = 2
    experts: int = 0
    """Experts in each layer of a Qwen3-MoE; 0 makes the dense model."""
    stages: tuple[Stage, ...] = (
        Stage(name="look-ups", steps=1000, learning_rate=2e-3, drills=1.0),
        Stage(name="sessions", steps=1700, learning_rate=2e-3, drills=0.4, sessions=0.4),
        Stage(name="demonstrations", steps=900, learning_rate=1e-3, drills=0.3, faulty=True),
    )

    @property
    def hash(self) -> str:
        """The hash of the recipe and of the constants in the code."""
        settings = {"recipe": self.settings, "faults": FAULTS, "init": [STD, GAIN]}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def settings(self) -> dict[str, object]:
        """The settings by name. A dense model has no `experts`."""
        settings = asdict(self)
        if not self.experts:
            del settings["experts"]
        return settings


SHIPPED = Recipe()
"""The recipe of `unstale/recipes/base_policy`."""


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with a few small steps per stage, in one process."""
    stages = tuple(replace(stage, steps=steps, tokens=512) for stage in recipe.stages)
    return replace(recipe, workers=1, stages=stages)


def make(recipe: Recipe, folder: Path) -> dict[str, list[float]]:
    """Write the model folder and return every twentieth loss by stage."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(corpus(recipe.corpus), recipe.vocab_size).save_pretrained(folder)
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (recipe, str(folder), str(Path(meeting) / "rank"))
        if recipe.workers == 1:
            _work(0, *arguments)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch loads in the children
            spawn(_work, arguments, nprocs=recipe.workers)
    losses: dict[str, list[float]] = json.loads((folder / "recipe.json").read_text())["losses"]
    return losses


def _work(rank: int, recipe: Recipe, folder: str, meeting: str) -> None:
    """Train in one of the processes; rank 0 saves the model."""
    place = Place(rank, recipe.workers)
    threads = torch.get_num_threads()
    join(place, meeting)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = make_model(tokenizer, recipe.seed, experts=recipe.experts)
    practice = Practice(tokenizer)
    losses: dict[str, list[float]] = {}
    with _progress(recipe.stages, quiet=rank > 0) as report:
        for stage in recipe.stages:
            every = train_stage(model, practice, stage, place=place, report=report)
            losses[stage.name] = every[::20]
    if rank == 0:
        save(model, recipe, losses, Path(folder))
    torch.set_num_threads(threads)
    if recipe.workers > 1:
        dist.destroy_process_group()


@contextmanager
def _progress(stages: Sequence[Stage], *, quiet: bool) -> Iterator[Report]:
    """Show one progress bar for all stages."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=quiet) as bar:
        task = bar.add_task("base policy", total=sum(stage.steps for stage in stages), facts="")

        def report(stage: str, step: int, loss: float, tokens_per_s: float) -> None:
            bar.update(
                task,
                advance=1,
                description=stage,
                facts=f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s",
            )

        yield report


def save(model: nn.Module, recipe: Recipe, losses: dict[str, list[float]], folder: Path) -> None:
    """Save the weights in bfloat16, and the recipe with its losses."""
    deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    thinned = {name: [round(loss, 4) for loss in values] for name, values in losses.items()}
    record = {
        "hash": recipe.hash,
        "recipe": recipe.settings,
        "faults": FAULTS,
        "losses": thinned,
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")
