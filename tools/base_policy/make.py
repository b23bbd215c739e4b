"""Make a shipped policy: tokenizer, weights, and the recipe with its hash."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.multiprocessing.spawn import spawn
from transformers import AutoTokenizer

from tools.base_policy.model import GAIN, STD, adopt, make_model
from tools.base_policy.practice import Practice, corpus, faults_of
from tools.base_policy.retail import FAULTS, RetailPractice, retail_corpus
from tools.base_policy.tokenizer import make_tokenizer
from tools.base_policy.train import Place, Report, Stage, join, train_stage
from unstale.config import SHIPPED_POLICY
from unstale.envs.desk import shipped_desks
from unstale.envs.desk.domain import Domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that determine the policy, together with the code."""

    seed: int = 0
    vocab_size: int = 1024
    corpus: int = 150
    workers: int = 2
    experts: int = 0
    """Experts in each layer of a Qwen3-MoE; 0 makes the dense model."""
    desks: tuple[str, ...] = ()
    """Desks of `tools.base_policy.practice`; without any, it is the practice of `base`."""
    starts_from_base: bool = False
    """Start from the weights of `base` instead of random ones."""
    stages: tuple[Stage, ...] = (
        Stage(name="look-ups", steps=1000, learning_rate=2e-3, drills=1.0),
        Stage(name="sessions", steps=1700, learning_rate=2e-3, drills=0.4, sessions=0.4),
        Stage(name="demonstrations", steps=900, learning_rate=1e-3, drills=0.3, faulty=True),
    )

    @property
    def hash(self) -> str:
        """The hash of the recipe and of the constants in the code."""
        settings = {"recipe": self.settings, "faults": self.faults, "init": [STD, GAIN]}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def settings(self) -> dict[str, object]:
        """The settings by name. Those that came after `base` are left out if they are off."""
        settings = asdict(self)
        for later in ("experts", "desks", "starts_from_base"):
            if not settings[later]:
                del settings[later]
        return settings

    @property
    def faults(self) -> Mapping[str, object]:
        """The fault rates of the demonstrations: of retail, or by desk."""
        return {domain.name: faults_of(domain) for domain in self.domains} or FAULTS

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The domains of `desks`."""
        shipped = shipped_desks(level="1")
        return tuple(shipped[name].domain for name in self.desks)

    def tokenizer(self) -> Any:
        """Return the tokenizer, trained on conversations of the desks."""
        text = corpus(self.domains, self.corpus) if self.desks else retail_corpus(self.corpus)
        return make_tokenizer(text, self.vocab_size)

    def practices(self, tokenizer: Any) -> list[Practice]:
        """Return the makers of examples, one for each desk."""
        if not self.desks:
            return [RetailPractice(tokenizer)]
        return [Practice(tokenizer, domain, faults_of(domain)) for domain in self.domains]


SHIPPED = Recipe()
"""The recipe of `unstale/recipes/base_policy`."""
DESKS = Recipe(
    vocab_size=1312,
    corpus=240,
    workers=1,
    desks=("airline", "delivery", "instore", "retail", "telecom"),
    starts_from_base=True,
    stages=(
        Stage(name="look-ups", steps=500, learning_rate=2e-3, drills=1.0),
        Stage(name="sessions", steps=1300, learning_rate=2e-3, drills=0.4, sessions=0.3),
        Stage(name="demonstrations", steps=600, learning_rate=1e-3, drills=0.3, faulty=True),
    ),
)
"""The recipe of `unstale/recipes/base_desks`."""
RECIPES = {"base": SHIPPED, "base-desks": DESKS}


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with a few small steps per stage, in one process."""
    stages = tuple(replace(stage, steps=steps, tokens=512) for stage in recipe.stages)
    return replace(recipe, workers=1, stages=stages)


def make(recipe: Recipe, folder: Path) -> dict[str, list[float]]:
    """Write the model folder and return every twentieth loss by stage."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe.tokenizer().save_pretrained(folder)
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
    if recipe.starts_from_base:
        adopt(model, tokenizer, SHIPPED_POLICY)
    practices = recipe.practices(tokenizer)
    losses: dict[str, list[float]] = {}
    with _progress(recipe.stages, quiet=rank > 0) as report:
        for stage in recipe.stages:
            every = train_stage(model, practices, stage, place=place, report=report)
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
        "faults": recipe.faults,
        "losses": thinned,
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")
