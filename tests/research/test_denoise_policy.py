"""Policies of a user for `unstale denoise`: how they are checked, trained, saved and loaded."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.points import Points
from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.research.denoise.policies import make_policy
from unstale.research.denoise.steps import Denoiser, Steps
from unstale.research.denoise.train import DenoiseOptions, copied, train

SHORT: dict[str, Any] = {"steps": 2, "groups": 2, "group_size": 4}


class Short(Points):
    """The example's policy after a short supervised start."""

    def __init__(self) -> None:
        super().__init__(start=5)


class Unfinished:
    places = 3
    lr = 1e-3

    def network(self, seed: int) -> nn.Module:
        raise NotImplementedError

    contexts = begin = draw = rewards = network


class NoPlaces(Short):
    places = 0


class NanRate(Short):
    lr = math.nan


class FewTasks(Short):
    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        return torch.tensor([[0, 1, 2, 3, 4][task] for task in tasks])


class OnlyNoise(Short):
    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        assert noise is not None, "it needs noise"
        return super().draw(network, steps, noise)


class NoModule(Short):
    def network(self, seed: int) -> Any:
        return seed


class Frozen(Short):
    def network(self, seed: int) -> nn.Module:
        return super().network(seed).requires_grad_(False)


class Fails(Short):
    def network(self, seed: int) -> nn.Module:
        raise ValueError("no data")


class WrongBegin(Short):
    def begin(self, random: torch.Generator) -> Tensor:
        return torch.randn(2)


class WrongDensity(Short):
    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return super().logp(network, steps)[:, None]


class OtherDensity(Short):
    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return 2 * super().logp(network, steps)


class NoGradient(Short):
    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return super().logp(network, steps).detach()


class WrongAfter(Short):
    def after(self, action: Tensor) -> Tensor:
        return action[:, :1]


class NotFinite(Short):
    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action, logp = super().draw(network, steps, noise)
        return action / 0, logp


class NoReward(Short):
    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        return {"nearness": path[-1, :, 0]}


class OneReward(Short):
    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        return {"reward": path[-1].mean()}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["denoise", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Unfinished", "has no noise, logp, after. It needs all that unstale"),
        ("NoPlaces", "places must be above 0 and int, got 0"),
        ("NanRate", "lr must be above 0 and float, got nan"),
        ("Missing", "has no attribute 'Missing'"),
    ],
)
def test_a_policy_that_lacks_something_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match="the policy .*" + message):
        make_policy(f"{__name__}:{kind}")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (NoModule(), "network must return a torch module, got a int"),
        (Frozen(), "no parameters with a gradient"),
        (Fails(), "no data"),
        (WrongBegin(), "begin must draw from its generator"),
        (WrongDensity(), r"logp must return \[3\], got \[3, 1\]"),
        (OtherDensity(), "in step 0, logp of an action is .* and draw said"),
        (NoGradient(), "logp has no gradient"),
        (WrongAfter(), r"after must return \[3, 2\], got \[3, 1\]"),
        (FewTasks(), "list index out of range"),
        (NotFinite(), "draw returns values that are not finite"),
        (NoReward(), "rewards returns nearness, and no reward"),
        (OneReward(), r"rewards, for reward, must return 3 rows for 3, got \[\]"),
    ],
)
def test_a_policy_with_wrong_methods_is_refused(policy: Denoiser, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the policy {type(policy).__name__} .*{message}"):
        train(policy, DenoiseOptions(**SHORT), 0)


class FewHeldOut(Short):
    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        if held_out and max(tasks) >= 64:
            raise IndexError("only 64 are held out")
        return super().contexts(tasks, held_out=held_out)


def test_a_policy_needs_as_many_held_out_tasks_as_are_evaluated() -> None:
    assert train(FewHeldOut(), DenoiseOptions(**SHORT, held_out=64), 0).after
    with pytest.raises(ConfigError, match=r"FewHeldOut cannot be used: .*only 64 are held out"):
        train(FewHeldOut(), DenoiseOptions(**SHORT, held_out=65), 0)


def test_a_policy_that_needs_noise_cannot_be_judged_without() -> None:
    with pytest.raises(ConfigError, match=r"OnlyNoise cannot be used.*it needs noise"):
        train(OnlyNoise(), DenoiseOptions(**SHORT, likeliest=True), 0)


def test_all_linear_layers_are_rounded_whatever_their_names() -> None:
    network = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
    named = nn.ModuleDict({"enter": deepcopy(network[0]), "head": deepcopy(network[2])})
    for plain, rounded in (
        (network[0], copied(named, "nvfp4")["enter"]),
        (network[2], copied(named, "nvfp4")["head"]),
    ):
        values = (rounded.weight / rounded.weight.abs().max()).unique()
        assert len(values) < 64 < len(plain.weight.unique())


def test_files_that_cannot_be_used_are_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "afile").touch()
    assert run("images", "--steps", "1", "--save", str(tmp_path / "afile")) != 0
    assert "--save" in capsys.readouterr().err
    save_file({"w": torch.tensor([math.nan])}, tmp_path / "seed-0.safetensors")
    assert run("images", "--steps", "1", "--load", str(tmp_path)) != 0
    assert "weights that are not finite numbers: w" in " ".join(capsys.readouterr().err.split())


def test_a_foreign_policy_is_trained_saved_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}:Short"
    words = ("--steps", "2", "--groups", "2", "--group-size", "4", "--json")
    saved, again = str(tmp_path / "first"), str(tmp_path / "second")
    assert run(name, *words, "--fork-at", "3", "--fusion", "path_mean", "--save", saved) == 0
    first = json.loads(capsys.readouterr().out)
    assert set(first["runs"][0]["after"]) == {"reward", "nearest"}
    assert 1.5 < first["means"]["effective_leaves"] < 2
    assert run(name, *words, "--load", saved, "--save", again) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["runs"][0]["before"] == first["runs"][0]["after"]
    assert (tmp_path / "second" / "seed-0.safetensors").is_file()

    assert run(name, *words, "--save", saved) != 0
    assert "seed-0.safetensors is there already" in capsys.readouterr().err
    assert run(name, *words, "--load", saved, "--seed", "1") != 0
    assert "there is no file" in capsys.readouterr().err
    assert run("images", *words, "--load", saved) != 0
    assert "has no weights of this policy's network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["videos"], "must be images, plans, text or module:Class of your own, got 'videos'"),
        (["images", "--draft-only"], "only of plans, got images"),
    ],
)
def test_impossible_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.costly
def test_points_of_the_cluster_that_was_asked_for_become_likelier() -> None:
    result = train(Points(), DenoiseOptions(steps=40), 0)
    assert result.after["reward"] > result.before["reward"] + 0.1
