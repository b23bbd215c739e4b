"""What a large policy needs: a device, microbatches, frozen parameters, and types of numbers."""

import asyncio
import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Generator, Tensor, nn

from examples.colours import Colours
from examples.points import CENTERS, PLACES, Points
from tests.support.two_devices import OTHER, TwoDevices
from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.research.denoise.policies import (
    check_policy,
    load_weights,
    make_network,
    save_weights,
    trained_parameters,
)
from unstale.research.denoise.recorded import (
    Recorded,
    RecordedOptions,
    check_flow,
    record,
    reference_error,
    train_recorded,
)
from unstale.research.denoise.steps import Denoiser, Plan, Sampler, Steps
from unstale.research.denoise.train import (
    DenoiseOptions,
    Learner,
    Precision,
    copied,
    train,
    update_copy,
)

SHORT: dict[str, Any] = {"steps": 2, "groups": 2, "group_size": 3, "held_out": 5}
ODD = 67
"""A width that no other tensor has."""


class Adapted(nn.Module):
    """A frozen linear layer in bfloat16, with an adapter of rank 2 in float32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False).to(torch.bfloat16)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, rows: Tensor) -> Tensor:
        change = rows.to(self.up.dtype) @ self.down.T @ self.up.T
        return self.layer(rows.to(self.layer.weight.dtype)).float() + change.float()


class Short(Points):
    """The example's policy after a short supervised start."""

    def __init__(self) -> None:
        super().__init__(start=5)


class Tuned(Short):
    """A policy whose adapters only are trained."""

    def network(self, seed: int) -> nn.Module:
        network = super().network(seed).requires_grad_(False)
        for layer in (2, 4):
            network.layers[layer] = Adapted(network.layers[layer])
        return network


class Doubled(nn.Module):
    """The network of `Points`, computing in float64."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers.double()

    def forward(self, point: Tensor, left: Tensor, cluster: Tensor) -> Tensor:
        known = (point, F.one_hot(left - 1, PLACES), F.one_hot(cluster, len(CENTERS)))
        rows = torch.cat([each.double() for each in known], 1)
        return self.layers(rows.to(self.layers[0].weight.dtype)).double()


class Precise(Short):
    def network(self, seed: int) -> nn.Module:
        return Doubled(super().network(seed).layers)

    def begin(self, random: Generator) -> Tensor:
        return super().begin(random).double()


def move(network: nn.Module, seed: int) -> None:
    """Change the trained parameters of a network."""
    random = Generator().manual_seed(seed)
    with torch.no_grad():
        for each in trained_parameters(network).values():
            each.add_(0.05 * torch.randn(each.shape, generator=random))


class Prepared:
    """A learner and the steps of an update, of two versions and with S that is clipped."""

    def __init__(self, model: Denoiser, engine: Precision = "bfloat16", **options: Any) -> None:
        chosen = DenoiseOptions(group_size=3, fork_at=(3, 6), **options)
        self.network = make_network(model, 0)
        self.learner = Learner(model, chosen, self.network)
        sampler = Sampler(model, Plan(size=3, forks=(3, 6)), 0)
        copy = copied(self.network, engine)
        groups = []
        for version in range(2):
            sampler.load(version, copy, copy)
            groups.append(asyncio.run(sampler.group(version, version)))
            move(self.network, version)
            self.learner.step(self.learner.batch(groups), [], torch.zeros(0), 5)
            update_copy(copy, self.network, engine)
        move(self.network, 2)
        self.batch = self.learner.batch(groups)
        self.where = self.batch.sampled & (self.batch.advantage != 0)
        self.rows = sampler.tape.take(self.batch.tokens[self.where].tolist())

    def step(self) -> tuple[dict[str, float], list[Tensor]]:
        metrics = self.learner.step(self.batch, self.rows, self.where, 5)
        return metrics, [each.grad for each in trained_parameters(self.network).values()]


def differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the largest difference of each gradient, relative to the largest value."""
    assert all(each.abs().max() > 0 for each in expected)
    pairs = zip(found, expected, strict=True)
    return [((one - other).abs().max() / other.abs().max()).item() for one, other in pairs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fusion": "path_mean", "kept_depths": 0.5},
        {"fusion": "path", "kept_leaves": "extremes"},
    ],
)
def test_microbatches_give_the_gradient_of_one_pass(options: dict[str, Any]) -> None:
    for model, largest in ((Precise(), 1e-12), (Short(), 1e-6), (Tuned(), 1e-6)):
        whole, expected = Prepared(model, **options).step()
        assert isinstance(model, Tuned) or 0 < whole["clipped_share"] < 1
        assert whole["log_d_abs_mean"] > 0 and whole["log_s_abs_mean"] > 0.02
        parts = Prepared(model, microbatch=8, **options)
        assert len(parts.rows) % 8 and len(parts.rows) > 16
        metrics, found = parts.step()
        assert metrics == pytest.approx(whole, rel=1e-4)
        assert max(differences(found, expected)) < largest


def test_the_graph_is_as_large_as_a_microbatch() -> None:
    """The bytes are those of tensors that are kept for the backward pass, without parameters."""

    def peak(microbatch: int) -> tuple[int, int]:
        prepared = Prepared(Short(), microbatch=microbatch)
        known = {each.untyped_storage().data_ptr() for each in prepared.network.parameters()}
        held = [0, 0]

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor
                is_counted = tensor.untyped_storage().data_ptr() not in known
                self.size = tensor.nbytes if is_counted else 0
                held[0] += self.size
                held[1] = max(held)

            def __del__(self) -> None:
                held[0] -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda each: each.tensor):
            prepared.step()
        return held[1], len(prepared.rows)

    whole, count = peak(0)
    for microbatch in (4, 16):
        part, _ = peak(microbatch)
        assert part == pytest.approx(whole * microbatch / count, rel=0.1)


class There:
    """A policy whose network is on the other device."""

    def network(self, seed: int) -> nn.Module:
        network: nn.Module = super().network(seed)
        for module in network.modules():
            for name, each in module.named_parameters(recurse=False):
                moved = nn.Parameter(each.detach().to(OTHER), each.requires_grad)
                setattr(module, name, moved)
        return network


class TunedThere(There, Tuned):
    pass


class ColoursThere(There, Colours):
    pass


class ReturnsToCpu(TunedThere):
    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action, logp = super().draw(network, steps, noise)
        return action.cpu(), logp


def test_a_network_on_another_device_learns_the_same() -> None:
    options = DenoiseOptions(
        **{**SHORT, "groups": 1}, fork_at=(4,), fusion="path_mean", noisy=(0, 2, 4, 9), microbatch=4
    )
    expected = train(Tuned(), options, 0)
    with TwoDevices():
        network = make_network(TunedThere(), 0)
        assert {each.device for each in network.parameters()} == {OTHER}
        assert train(TunedThere(), options, 0) == expected
        with pytest.raises(ConfigError, match="draw must return actions on lazy:0, got cpu"):
            train(ReturnsToCpu(), options, 0)


def flow(model: Any, microbatch: int) -> tuple[Recorded, list[Any], nn.Module]:
    """Record images, and train on them by two updates."""
    drawing = DenoiseOptions(**{**SHORT, "steps": 6}, microbatch=microbatch)
    recorded = record(model, drawing, 0, without_noise=True)
    network = make_network(model, 0)
    check_flow(model, network, copied(network, "bfloat16"), None)
    options = RecordedOptions(**SHORT, without_noise=True, microbatch=microbatch)
    error = reference_error(model, network, recorded, microbatch)
    return recorded, [error, train_recorded(model, network, recorded, options, 0)], network


def test_a_flow_model_on_another_device_learns_the_same() -> None:
    recorded, expected, _ = flow(Colours(), 4)
    with TwoDevices():
        again, found, network = flow(ColoursThere(), 4)
        assert {each.device for each in network.parameters()} == {OTHER}
    assert found == expected and torch.equal(again.images, recorded.images)


def test_a_group_may_be_larger_than_a_microbatch() -> None:
    """The loss of a group compares all its images, and its gradient is that of one pass."""
    recorded, *_ = flow(Colours(), 0)
    gradients, losses = [], []
    for microbatch in (0, 4, 1):
        network = make_network(Colours(), 0)
        options = RecordedOptions(**{**SHORT, "steps": 1}, without_noise=True)
        options = replace(options, microbatch=microbatch)
        losses.append(train_recorded(Colours(), network, recorded, options, 0).rows[0]["loss"])
        gradients.append([each.grad for each in network.parameters()])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for found in gradients[1:]:
        assert max(differences(found, gradients[0])) < 1e-5


class Wide(Tuned):
    """A policy that counts how often its frozen weights are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def network(self, seed: int) -> nn.Module:
        network = super().network(seed)
        network.layers[4] = nn.Sequential(Adapted(nn.Linear(64, ODD)), Adapted(nn.Linear(ODD, 2)))
        return network

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        self.counts.append(len({each.data_ptr() for each in found if each.shape == (ODD, 64)}))
        return super().rewards(path, context)


def test_frozen_weights_are_in_memory_once() -> None:
    """Engine, earlier versions and trainer share them, also while versions lag."""
    model = Wide()
    train(model, DenoiseOptions(**{**SHORT, "steps": 5}, fork_at=(4,)), 0)
    assert len(model.counts) > 5 and set(model.counts) == {1}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "nvfp4"])
def test_a_copy_follows_the_trained_weights_and_changes_no_frozen_ones(
    precision: Precision,
) -> None:
    network = make_network(Tuned(), 0)
    frozen = {name: each.clone() for name, each in network.state_dict().items()}
    copy = copied(network, precision)
    assert not any(each.requires_grad for each in copy.parameters())
    move(network, 0)
    update_copy(copy, network, precision)
    fresh = copied(network, precision)
    for name, each in copy.state_dict().items():
        assert torch.equal(each, fresh.state_dict()[name])
    for name, each in network.state_dict().items():
        is_trained = name in trained_parameters(network)
        assert torch.equal(each, frozen[name]) != is_trained and each.dtype == frozen[name].dtype


def test_only_trained_parameters_are_saved(tmp_path: Path) -> None:
    network = make_network(Tuned(), 0)
    move(network, 0)
    file = tmp_path / "seed-0.safetensors"
    save_weights(network, file)
    trained = trained_parameters(network)
    assert load_file(file).keys() == trained.keys() and list(tmp_path.iterdir()) == [file]
    assert set(trained) == {f"layers.{layer}.{name}" for layer in (2, 4) for name in ("down", "up")}
    other = make_network(Tuned(), 0)
    load_weights(other, file)
    for name, each in trained_parameters(other).items():
        assert torch.equal(each, trained[name])
    with pytest.raises(ConfigError, match=r"for layers.0.bias, it has a NoneType, .* trains \[64"):
        load_weights(make_network(Short(), 0), file)


class TrainsBfloat16(Short):
    def network(self, seed: int) -> nn.Module:
        network = super().network(seed)
        network.layers[2].to(torch.bfloat16)
        return network


class RoughDensity(Short):
    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return super().logp(network, steps).bfloat16()


def test_rough_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.2\.weight is trained in bfloat16, .* float32"):
        make_network(TrainsBfloat16(), 0)
    network = make_network(RoughDensity(), 0)
    with pytest.raises(ConfigError, match="logp must return float32 or float64, got bfloat16"):
        check_policy(RoughDensity(), network, network)


def test_the_command_trains_in_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--steps", "2", "--groups", "2", "--group-size", "3", "--held-out", "7", "--json"]
    runs = []
    for more in ([], ["--microbatch", "4"]):
        with pytest.raises(SystemExit) as ended:
            main(["denoise", f"{__name__}:Tuned", *size, *more])
        assert ended.value.code == 0
        runs.append(json.loads(capsys.readouterr().out)["runs"][0])
    assert runs[1]["after"] == pytest.approx(runs[0]["after"], rel=1e-3)
    assert runs[1]["steps"] == runs[0]["steps"]
