"""Test every feature of training with every route, kind of adapters, minibatches and replay.

Each combination either passes the linter, and then a run starts and trains with it, or it is
refused by a message that names the two options. The features are those of the registries, so a new
loss, correction, teacher's divergence or route is tested without a change here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from itertools import combinations, product, starmap
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from rich.console import Console

from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import AuditConfig, ConfigError, CriticConfig, RunConfig
from unstale.config.declared import choices
from unstale.config.objectives import objectives
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.durability.run_folder import RunFolder
from unstale.lint import check
from unstale.techniques.distil import DistilConfig

Options = Mapping[str, Any]

CRITICS = get_args(get_type_hints(CriticConfig)["model"])
DIVERGENCES = get_args(get_type_hints(DistilConfig)["divergence"])
OPSM = {"objective.opsm_threshold": 0.1}
FEATURES: Mapping[str, Options] = {
    "top-p": {"engine.top_p": 0.9},
    "top-k": {"engine.top_k": 8},
    "min-p": {"engine.min_p": 0.02},
    "bias of logits": {"engine.logit_bias": "5=-inf"},
    "critic of turns": {"advantage.estimator": "gae", "advantage.over": "turn"},
    **{f"critic {name}": {"advantage.estimator": "gae", "critic.model": name} for name in CRITICS},
    **{name: {"objective.loss_type": name} for name in objectives()},
    **{f"{name} of D": {"correction.mode": name} for name in choices("corrections", "mode")},
    "geometric mask": {
        "correction.mode": "mask",
        "correction.unit": "sequence",
        "correction.low": 0.98,
        "correction.high": 1.02,
    },
    "k3 mask of sequences": {
        "correction.mode": "k3_mask",
        "correction.unit": "sequence",
        "correction.kl_limit": 0.01,
    },
    "OPSM": OPSM,
    "vespo and OPSM": {"objective.loss_type": "vespo", **OPSM},
    "ESTR": {"techniques": "estr", "estr.tau": 0.04},
    "dynamic sampling": {"schedule.resampled_groups": 1},
    **{
        f"{name} distillation": {
            "techniques": "distil",
            "distil.teacher": "start",
            "distil.divergence": name,
            "distil.advantage_coef": 1.0,
        }
        for name in DIVERGENCES
    },
    "epochs": {"trainer.epochs_per_batch": 2},
}
ROUTES: Mapping[str, Options] = {
    name: {"old_logps.route": name, **route.requires} for name, route in routes().items()
}
UNMERGED = {"trainer.lora_rank": 4, "engine.adapters": "unmerged"}
ADAPTERS: Mapping[str, Options] = {
    "none": {},
    "merged": {"trainer.lora_rank": 4},
    "unmerged": UNMERGED,
    "pinned": {**UNMERGED, "schedule.pin_versions": True},
}
MINIBATCHES: Mapping[str, Options] = {"1": {}, "4": {"trainer.minibatches_per_batch": 4}}
REPLAY: Mapping[str, Options] = {
    "none": {},
    "groups": {"techniques": "replay"},
    "experts": {"trainer.routing_replay": True, "model": "moe"},
}


class Cell(NamedTuple):
    """A combination of a feature with other options: one name of each table above."""

    feature: str
    route: str = "snapshot_old"
    adapters: str = "none"
    minibatches: str = "1"
    replay: str = "none"

    @property
    def parts(self) -> list[Options]:
        """The options of each member. Those of the feature are last, so they replace others."""
        return [
            ROUTES[self.route],
            ADAPTERS[self.adapters],
            MINIBATCHES[self.minibatches],
            REPLAY[self.replay],
            FEATURES[self.feature],
        ]

    def named_in(self, message: str) -> int:
        """Return how many members of the combination a message names by an option or its value."""
        return sum(names(message, part) for part in self.parts)


def names(message: str, part: Options) -> bool:
    """Return True if a message has the name or a value of one of the options `part`."""
    words = {*part, *(value for value in part.values() if isinstance(value, str))}
    if any(word.startswith("critic.") for word in words):
        words.add("critic")
    return any(re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", message) for word in words)


TABLES: Mapping[str, Mapping[str, Options]] = {
    "route": ROUTES,
    "adapters": ADAPTERS,
    "minibatches": MINIBATCHES,
    "replay": REPLAY,
}
"""The options with which each feature is combined, by the field of `Cell`."""


def neighbours(feature: str) -> Iterator[Cell]:
    """Yield the feature with every other option, one at a time."""
    for axis, table in TABLES.items():
        for name in table:
            yield Cell(feature)._replace(**{axis: name})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "dense")
    save_tiny(folder / "moe", experts=4)
    return folder


def configured(models: Path, *parts: Options) -> RunConfig:
    """Return a run of two steps with some options. Raises `ConfigError` if they are refused."""
    options = {name: value for part in parts for name, value in part.items()}
    chosen = [part["techniques"] for part in parts if "techniques" in part]
    options["techniques"] = " ".join(chosen)
    options["model"] = str(models / options.get("model", "dense"))
    run = tiny_run(models, models, max_steps=2, audit=AuditConfig(share=0.0))
    return override(run, options)


def refusals(models: Path, *parts: Options) -> list[str]:
    """Return the messages with which options are refused. Empty if the linter passes them."""
    try:
        return [str(each) for each in check(configured(models, *parts)).refusals]
    except ConfigError as error:
        return [str(error)]


def is_explained(message: str) -> bool:
    """Return True if a message gives a reason of some words after what is wrong."""
    return any(len(each.split()) > 4 for each in message.partition("Fix:")[0].split(": ")[1:])


@pytest.mark.costly(cases=10)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_passes_with_each_other_option_or_both_are_named(
    feature: str, models: Path
) -> None:
    assert refusals(models, FEATURES[feature]) == []
    for cell in neighbours(feature):
        if found := refusals(models, *cell.parts):
            (message,) = found
            assert cell.named_in(message) >= 2 and is_explained(message), (cell, message)


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_combination_passes_or_is_refused_with_two_options(
    feature: str, models: Path
) -> None:
    for cell in starmap(Cell, product([feature], *TABLES.values())):
        for message in refusals(models, *cell.parts):
            assert cell.named_in(message) >= 2 and is_explained(message), (cell, message)


def is_chosen_twice(one: Options, other: Options) -> bool:
    return "techniques" in one and one["techniques"] == other.get("techniques")


@pytest.mark.costly
def test_every_pair_of_features_passes_or_is_refused_with_both(models: Path) -> None:
    accepted = 0
    for pair in combinations(FEATURES.values(), 2):
        one, other = pair
        both = {*one} & {*other} - {"techniques"}
        if any(one[name] != other[name] for name in both) or is_chosen_twice(one, other):
            continue  # two values of one option
        found = refusals(models, *pair)
        accepted += not found
        for message in found:
            assert all(names(message, part) for part in pair), (pair, message)
            assert is_explained(message), message
    assert accepted


def accepted_cell(feature: str, models: Path) -> Cell:
    """Return a combination with a feature that the linter passes, drawn by the feature's name."""
    draw = Random(feature)
    while True:
        cell = Cell(feature, *(draw.choice([*table]) for table in TABLES.values()))
        if not refusals(models, *cell.parts):
            return cell


@pytest.mark.costly(cases=1)
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("feature", Random(7).sample([*FEATURES], 12))
def test_a_drawn_combination_that_passes_starts_and_trains(
    feature: str, models: Path, tmp_path: Path
) -> None:
    cell = accepted_cell(feature, models)
    config = replace(configured(models, *cell.parts), runs=tmp_path)
    session.train(config, console=Console(file=StringIO()))
    rows = RunFolder(tmp_path / config.name).metrics()
    assert len(rows) == config.max_steps
    for row in rows:
        assert math.isfinite(row["objective/loss"]), cell
        assert math.isfinite(row["trainer/grad_norm"]), cell
