"""Training of flow models on recorded groups: the objective, the file, and the effect."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.colours import Colours, Velocity
from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.research.denoise.images import PIXELS, Images, corrected_score, templates
from unstale.research.denoise.policies import make_network
from unstale.research.denoise.recorded import (
    Recorded,
    RecordedOptions,
    best_evaluation,
    flow_error,
    group_loss,
    ranking_loss,
    record,
    reference_error,
    train_recorded,
)
from unstale.research.denoise.steps import Steps
from unstale.research.denoise.train import DenoiseOptions, evaluate

SCORES = torch.tensor([0.3, -1.2, 0.7, 0.1])
REWARDS = torch.tensor([0.2, 0.9, 0.4, 0.0])


def log_probability(order: tuple[int, ...], scores: Tensor) -> Tensor:
    """Return the log-probability that images are drawn in an order, each by a softmax of the rest.

    This is the Plackett-Luce model.
    """
    terms = [scores[order[i]] - scores[list(order[i:])].logsumexp(0) for i in range(len(order))]
    return torch.stack(terms).sum()


def test_a_low_temperature_gives_the_likelihood_of_the_ranking() -> None:
    orders = list(permutations(range(4)))
    every = torch.stack([log_probability(order, SCORES) for order in orders])
    assert every.exp().sum().item() == pytest.approx(1)
    best_first = tuple(REWARDS.argsort(descending=True).tolist())
    loss = ranking_loss(SCORES, REWARDS, temperature=1e-3)
    assert loss.item() == pytest.approx(-every[orders.index(best_first)].item(), rel=1e-5)


def test_two_images_at_a_low_temperature_give_dpo() -> None:
    loss = ranking_loss(SCORES[:2], REWARDS[:2], temperature=1e-3)
    margin = SCORES[1] - SCORES[0]
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margin).item(), rel=1e-5)


def test_the_loss_has_the_value_computed_by_hand() -> None:
    """Rewards 1, 0.5 and 0 at temperature 0.5 make exponentials e^2, e and 1, in this order.

    Errors 0.2, 0.4 and 0.1 beside 0.3 each, times -10, make scores 1, -1 and 2.
    """
    e = torch.tensor(1.0).exp().item()
    one = (e**2 + e + 1, e + 1)
    expected = sum(
        (
            torch.tensor([1.0, -1.0, 2.0]).logsumexp(0).item()
            - (e**2 * 1 + e * -1 + 1 * 2) / one[0],
            torch.tensor([-1.0, 2.0]).logsumexp(0).item() - (e * -1 + 1 * 2) / one[1],
            0.5 * 0.2,
        )
    )
    error, reward = torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.0, 1.0, 0.5])
    options = RecordedOptions(beta=10.0, temperature=0.5, best_weight=0.5)
    loss = group_loss(error, torch.full((3,), 0.3), reward, options)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_least_where_implicit_rewards_are_rewards() -> None:
    """Its gradient is zero at s = r / temperature, up to a constant, and points there elsewhere."""
    score = (REWARDS / 0.3 + 5).requires_grad_()
    ranking_loss(score, REWARDS, temperature=0.3).backward()
    assert score.grad is not None and score.grad.abs().max() < 1e-6
    error = torch.full((4,), 0.5, requires_grad=True)
    options = RecordedOptions(temperature=0.3, best_weight=0.0)
    group_loss(error, torch.full((4,), 0.5), REWARDS, options).backward()
    assert error.grad is not None
    assert error.grad[1] > 0 > error.grad[3], "the best image's error falls, the worst one's rises"
    assert error.grad.sum().item() == pytest.approx(0, abs=1e-5)


class Line(nn.Module):
    """A network whose velocity is a multiple of the image, for images of any shape."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, image: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return self.factor * image


def test_the_gradient_of_the_objective_is_that_of_differences() -> None:
    """The images are pictures of 3 x 4 x 4 values, so nothing depends on our digits."""
    random = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, 4, 3, 4, 4, generator=random, dtype=torch.float64)
    time = torch.full((4,), 0.4, dtype=torch.float64)
    options = RecordedOptions(beta=2.0, temperature=0.3, best_weight=0.7)

    def loss(factor: float) -> tuple[Tensor, Line]:
        network = Line(factor)
        points = image, torch.zeros(4), time, noise
        with torch.no_grad():
            reference = flow_error(Line(0.5), *points)
        return group_loss(
            flow_error(network, *points), reference, REWARDS.double(), options
        ), network

    value, network = loss(0.8)
    value.backward()
    assert network.factor.grad is not None
    near = (loss(0.8 + 1e-5)[0] - loss(0.8 - 1e-5)[0]) / 2e-5
    assert network.factor.grad.item() == pytest.approx(near.item(), rel=1e-6)
    by_hand = (0.8 * (0.6 * image + 0.4 * noise) - noise + image).square().mean((1, 2, 3))
    found = flow_error(network, image, torch.zeros(4), time, noise)
    torch.testing.assert_close(found.detach(), by_hand)


def test_errors_and_losses_are_computed_in_float32_or_better() -> None:
    """Errors that differ by 9e-4 near 2 are equal in bfloat16, and the gradient would be wrong."""

    def sixteen(image: Tensor, time: Tensor, context: Tensor) -> Tensor:
        assert image.dtype == torch.bfloat16, "points have the precision of the images"
        return torch.zeros_like(image)

    image = torch.zeros(2, 35, dtype=torch.bfloat16)
    noise = torch.full((2, 35), 1.4140625, dtype=torch.bfloat16)
    noise[1, 0] = 1.421875
    error = flow_error(sixteen, image, torch.zeros(2), torch.full((2,), 0.5), noise)
    expected = [1.4140625**2, (34 * 1.4140625**2 + 1.421875**2) / 35]
    assert error.dtype == torch.float32
    assert error.tolist() == pytest.approx(expected, abs=1e-6)
    assert (error[1] - error[0]).item() == pytest.approx(6.3e-4, abs=1e-5)
    options = RecordedOptions(beta=1.0, temperature=1.0, best_weight=0.0)
    reference = torch.full((2,), 2.0, dtype=torch.bfloat16)
    for kind in (torch.bfloat16, torch.float32, torch.float64):
        for errors in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).bfloat16()):
            loss = group_loss(errors, reference, torch.tensor([1.0, 0.0], dtype=kind), options)
            assert loss.dtype == torch.float32
            # scores 1 and 0, and targets e / (1 + e) and 1 / (1 + e)
            assert loss.item() == pytest.approx(0.582203, abs=1e-5)


def test_shapes_that_would_broadcast_are_refused() -> None:
    image, time = torch.zeros(4, 35), torch.full((4,), 0.5)
    context = torch.zeros(4)
    for network, given, message in (
        (lambda *_: torch.zeros(4, 1), (image, context, time, image), r"\[4, 35\].*got \[4, 1\]"),
        (Line(1.0), (image, context, time, image[:1]), r"got \[1, 35\] and \[4\]"),
        (Line(1.0), (image, context, time[:1], image), r"got \[4, 35\] and \[1\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            flow_error(network, *given)
    with pytest.raises(ConfigError, match=r"one shape \[k\], got \[4\], \[4, 1\], \[4\]"):
        group_loss(SCORES, SCORES[:, None], REWARDS, RecordedOptions())


def test_a_group_of_equal_rewards_imitates_no_image() -> None:
    """Its implicit rewards become equal, and that is all."""
    for best_weight in (0.0, 0.5):
        error = torch.tensor([0.5, 0.5, 0.3], requires_grad=True)
        options = RecordedOptions(beta=1.0, best_weight=best_weight)
        loss = group_loss(error, torch.full((3,), 0.5), torch.full((3,), 0.7), options)
        loss.backward()
        assert error.grad is not None and error.grad.sum().item() == pytest.approx(0, abs=1e-6)
        assert error.grad[0] > 0 > error.grad[2]


def test_the_corrected_score_has_the_values_of_the_paper() -> None:
    """FLUX.1 has the reward 0.5843 and the corrected score 0.4486, so grades of 3.4255."""
    found = corrected_score(torch.tensor([0.5843, 1.0, 0.5]), torch.tensor([3.4255, 5.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([0.4486, 2.2, 0.2]), atol=1e-4, rtol=0)


def test_an_exploited_reward_has_a_low_corrected_score() -> None:
    """An 8 of which the other digits are taken away is more certain for the reader, and uglier."""
    clean = templates()[8]
    exploited = clean - 1.2 * templates()[[0, 1, 2, 3, 4, 5, 6, 7, 9]].mean(0)
    path = torch.stack([clean, exploited])[None]
    figures = Images(start=0).rewards(path, torch.tensor([8, 8]))
    assert figures["reward"].tolist() == pytest.approx([0.873, 0.937], abs=1e-3)
    assert figures["likeness"].tolist() == pytest.approx([1, 0.833], abs=1e-3)
    assert figures["corrected"].tolist() == pytest.approx([1.945, 1.761], abs=1e-3)


def small(**changed: Any) -> Recorded:
    """Return recorded images of a small policy, as another sampler may have written them."""
    options = DenoiseOptions(steps=3, groups=4, group_size=4)
    recorded = record(Images(start=5, width=16), options, 0)
    return Recorded(*(changed.get(name, getattr(recorded, name)) for name in Recorded.__slots__))


def test_recorded_images_are_as_many_as_a_run_draws_and_repeat() -> None:
    recorded = small()
    assert recorded.images.shape == (48, PIXELS) and len(recorded.rows()) == 12
    assert all(len(recorded.contexts[rows].unique()) == 1 for rows in recorded.rows())
    assert torch.equal(recorded.images, small().images)
    model = Images(start=5, width=16)
    options = DenoiseOptions(steps=3, groups=4, group_size=4)
    plain = record(model, options, 0, without_noise=True)
    assert torch.equal(plain.contexts, recorded.contexts)
    assert not torch.equal(plain.images, recorded.images)
    rewards = model.rewards(recorded.images[None], recorded.contexts)["reward"]
    torch.testing.assert_close(recorded.rewards, rewards)


def test_a_file_of_somebody_else_is_trained_on(tmp_path: Path) -> None:
    """It has half precision, 32-bit integers, groups of several sizes, and mixed rows."""
    recorded = small()
    rows = torch.randperm(47, generator=torch.Generator().manual_seed(0))
    tensors = {
        "images": recorded.images.half(),
        "contexts": recorded.contexts.int(),
        "rewards": 40 + 10 * recorded.rewards.double(),
        "groups": 7 - 3 * recorded.groups.int(),
        "names": torch.arange(48),
    }
    path = tmp_path / "theirs.safetensors"
    save_file({name: each[rows] for name, each in tensors.items()}, path)
    model = Images(start=5, width=16)
    found = Recorded.load(path, model)
    options = RecordedOptions(steps=2, group_size=3, temperature=0.5)
    network = model.network(1)
    before = deepcopy(network.state_dict())
    result = train_recorded(model, network, found, options, 0)
    assert result.computed == {"trained": 2 * 4 * 3}
    assert any(not torch.equal(before[name], each) for name, each in network.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": torch.zeros(48, 7, 5)}, "images must have the shape [48, 35], got [48, 7, 5]"),
        ({"images": torch.zeros(48, 35, dtype=torch.uint8)}, "must be floating point, got uint8"),
        ({"images": torch.full((48, 35), torch.nan)}, "images must be finite, got nan"),
        ({"rewards": torch.zeros(47)}, "rewards must have the shape [48], got [47]"),
        ({"rewards": torch.zeros(48)}, "in each group, all rewards are equal"),
        ({"rewards": torch.full((48,), torch.inf)}, "rewards must be finite, got inf"),
        (
            {"images": torch.full((48, 35), 1e300, dtype=torch.float64)},
            "images must be finite, got inf",
        ),
        ({"rewards": 1 + 1e-12 * torch.arange(48).double()}, "all rewards are equal"),
        ({"rewards": torch.zeros(48).to(torch.float8_e4m3fn)}, "all rewards are equal"),
        ({"contexts": torch.full((48,), 10, dtype=torch.uint64)}, "has no context 10"),
        ({"contexts": torch.zeros(48)}, "contexts must be integers, got float32"),
        ({"contexts": torch.full((48,), 10)}, "the policy has no context 10"),
        ({"contexts": torch.arange(48) % 9}, "group 0 were not all drawn for the same context"),
        ({"groups": torch.arange(48)}, "each group has one image"),
        ({"groups": torch.zeros(())}, "images must have the shape [0, 35]"),
    ],
)
def test_a_bad_file_gives_one_message(
    tmp_path: Path, changed: dict[str, Tensor], message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    small(**changed).save(path)
    with pytest.raises(ConfigError) as caught:
        Recorded.load(path, Images(start=0))
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    with pytest.raises(ConfigError, match=r"cannot be read as safetensors .* images, contexts"):
        Recorded.load(path, Images(start=0))
    path.write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        Recorded.load(path, Images(start=0))
    save_file({"images": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="has no tensor contexts, only images"):
        Recorded.load(path, Images(start=0))
    with pytest.raises(ConfigError, match="cannot be written"):
        small().save(tmp_path / "no" / "folder.safetensors")


def test_the_figures_are_those_of_evaluations_and_the_best_is_found() -> None:
    model = Images(start=5, width=16)
    network = model.network(0)
    options = RecordedOptions(steps=5, group_size=3, without_noise=True)
    before = evaluate(model, network, 0, None)
    result = train_recorded(model, network, small(), options, 0)
    assert result.before == before and result.before != evaluate(model, model.network(0), 0)
    assert result.after == evaluate(model, network, 0, None) == result.rows[-1]["held_out"]
    assert [row["step"] for row in result.rows if "held_out" in row] == [1, 2, 3, 4, 5]
    step, found = best_evaluation(result, "corrected")
    scores = [before["corrected"], *(row["held_out"]["corrected"] for row in result.rows)]
    assert found["corrected"] == max(scores) == scores[step]
    again = train_recorded(model, model.network(0), small(), options, 0)
    assert again.rows == result.rows
    shorter = train_recorded(model, model.network(0), small(), replace(options, steps=2), 0)
    losses = [row["loss"] for row in result.rows]
    assert [row["loss"] for row in shorter.rows] == losses[:2], "--steps 2 repeats two updates"


@pytest.mark.costly
def test_rewards_rise_without_drawing_and_so_does_the_corrected_score() -> None:
    """Images that are recorded without noise also help the sampler that has it."""
    model = Images()
    recorded = record(model, DenoiseOptions(steps=20, group_size=8), 0, without_noise=True)
    gains = {}
    for temperature in (0.05, 1e6):
        network = model.network(0)
        options = RecordedOptions(steps=80, group_size=6, temperature=temperature, best_weight=0)
        result = train_recorded(model, network, recorded, options, 0)
        gains[temperature] = {
            name: after - result.before[name] for name, after in result.after.items()
        }
    assert gains[0.05]["reward"] > 0.03 and gains[0.05]["corrected"] > 0.05
    assert abs(gains[1e6]["reward"]) < 0.02, "equal targets teach nothing"


def test_the_command_records_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / "images-{seed}.safetensors")
    size = ["--groups", "2", "--group-size", "4", "--seeds", "2", "--json"]

    def call(*words: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["denoise", "images", *words, *size])
        assert ended.value.code == 0
        return json.loads(capsys.readouterr().out)

    found = call("--record", name, "--steps", "1", "--without-noise")
    assert [each["images"] for each in found] == [8, 8]
    assert load_file(tmp_path / "images-1.safetensors")["images"].shape == (8, PIXELS)
    found = call("--recorded", name, "--steps", "2", "--save", str(tmp_path / "trained"))
    assert set(found["runs"][1]["after"]) == {"reward", "likeness", "corrected"}
    assert [row["step"] for row in found["runs"][1]["rows"]] == [1, 2]
    again = call("--recorded", name, "--steps", "1", "--load", str(tmp_path / "trained"))
    assert again["runs"][1]["before"] == found["runs"][1]["after"]


class Changed(nn.Module):
    """A network whose velocities are changed by a function."""

    def __init__(self, network: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = network
        self.change = change

    def forward(self, image: Tensor, time: Tensor, colour: Tensor) -> Tensor:
        return self.change(self.inner(image, time, colour))


class Uncast(Velocity):
    def forward(self, image: Tensor, time: Tensor, colour: Tensor) -> Tensor:
        rows = torch.cat([image.flatten(1), time[:, None], colour], 1)
        return nn.Sequential.forward(self, rows).view_as(image)


class NoCast(Colours):
    def network(self, seed: int) -> nn.Module:
        return Uncast(*super().network(seed).children())


class OtherSignature(Colours):
    def network(self, seed: int) -> nn.Module:
        return nn.Sequential(super().network(seed))


class NanVelocity(Colours):
    def network(self, seed: int) -> nn.Module:
        return Changed(super().network(seed), lambda each: each * torch.nan)


class OneChannel(Colours):
    def network(self, seed: int) -> nn.Module:
        return Changed(super().network(seed), lambda each: each.mean(1, keepdim=True))


class Detached(Colours):
    def network(self, seed: int) -> nn.Module:
        return Changed(super().network(seed), torch.detach)


class AlwaysDropout(Colours):
    def network(self, seed: int) -> nn.Module:
        return Changed(super().network(seed), nn.functional.dropout)


class OneBoolean(Colours):
    def can_draw(self, contexts: Tensor) -> Any:
        return True


class ShortMask(Colours):
    def can_draw(self, contexts: Tensor) -> Tensor:
        return torch.ones(2, dtype=torch.bool)


class KnowsNothing(Colours):
    def can_draw(self, contexts: Tensor) -> Tensor:
        return torch.zeros(len(contexts), dtype=torch.bool)


class NoReward(Colours):
    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        return {"nearness": path[-1].mean((1, 2, 3))}


class LateNan(Colours):
    """Its rewards are not finite for the many images of a run."""

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        found = super().rewards(path, context)["reward"]
        return {"reward": found if len(found) < 4 else found * torch.nan}


class WrongSign(Colours):
    """It draws well with velocities of image - noise."""

    def network(self, seed: int) -> nn.Module:
        return Changed(super().network(seed), torch.neg)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().draw(Changed(network, torch.neg), steps, noise)


def colours(path: Path) -> str:
    """Write recorded images for `Colours`, with a group of one image, and return the file's name.

    There are two groups of four.
    """
    random = torch.Generator().manual_seed(0)
    contexts = Colours().contexts([0] * 4 + [1] * 4 + [2], held_out=False)
    images = contexts[:, :, None, None] + 0.1 * torch.randn(9, 3, 4, 4, generator=random)
    groups = torch.tensor([0] * 4 + [1] * 4 + [2])
    Recorded(images, contexts, torch.rand(9, generator=random), groups).save(path)
    return str(path)


def run_yours(kind: str, *words: str) -> int:
    size = ["--groups", "2", "--group-size", "4", "--steps", "1", "--without-noise", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["denoise", kind, *words, *size])
    return int(ended.value.code or 0)


def test_the_command_trains_a_flow_model_of_yours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It draws 3 x 4 x 4 values for a context of three numbers, and has neither noise nor logp."""
    name = "examples.colours:Colours"
    assert run_yours(name, "--record", str(tmp_path / "own.safetensors")) == 0
    assert json.loads(capsys.readouterr().out)[0]["images"] == 8
    assert load_file(tmp_path / "own.safetensors")["images"].shape == (8, 3, 4, 4)
    assert run_yours(name, "--recorded", colours(tmp_path / "theirs.safetensors")) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runs"][0]["images"] == {"trained": 8}
    assert "left out 1 groups of one image" in shown.err
    assert "seed 0: reference error" in shown.err and "warning" not in shown.err
    with pytest.raises(SystemExit):
        main(["denoise", name, "--recorded", str(tmp_path / "theirs.safetensors")])
    assert "it has no noise, logp" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["--record", "--recorded"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OtherSignature", "takes 2 positional arguments but 4 were given"),
        ("NanVelocity", "draw returns values that are not finite"),
        ("OneChannel", "velocities of the shape [3, 3, 4, 4], as the images, got [3, 1, 4, 4]"),
        ("Detached", "no gradient for the parameters"),
        ("AlwaysDropout", "other velocities for the same image in a second call"),
        ("OneBoolean", "booleans for"),
        ("ShortMask", "contexts, got [2] torch.bool"),
        ("KnowsNothing", "context"),
        ("NoReward", "rewards returns nearness, and no reward"),
    ],
)
def test_a_bad_flow_model_is_refused_in_both_modes(
    mode: str, kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "images.safetensors"
    words = (mode, colours(path) if mode == "--recorded" else str(path))
    folder = tmp_path / "trained"
    saved = ("--save", str(folder)) if mode == "--recorded" else ()
    assert run_yours(f"{__name__}:{kind}", *words, *saved) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(folder.glob("*")) and (mode == "--recorded" or not path.exists())


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("--record", "NoCast", "must have the same dtype"),
        ("--record", "LateNan", "of what it drew, rewards must be finite, got nan"),
        ("--recorded", "WrongSign", "of the other sign. A velocity must be noise - image"),
    ],
)
def test_what_only_one_mode_needs_is_refused_there(
    mode: str, kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "images.safetensors"
    words = (mode, colours(path) if mode == "--recorded" else str(path))
    assert run_yours(f"{__name__}:{kind}", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


class Reversed(nn.Module):
    """A network whose time is 1 for the image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.inner = network

    def forward(self, image: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return self.inner(image, 1 - time, context)


def test_a_reversed_time_is_refused_and_an_untrained_network_is_not() -> None:
    model = Images(start=250, width=64)
    digits = small().contexts
    network, recorded = model.network(0), small(images=templates()[digits])
    error, zero = reference_error(model, network, recorded)
    assert error < 0.6 * zero
    with pytest.raises(ConfigError, match=r"at the time 1 - t\. A velocity must be"):
        reference_error(model, Reversed(network), recorded)
    error, again = reference_error(model, Images(start=0, width=16).network(0), recorded)
    assert zero == again and error == pytest.approx(zero, rel=0.05)


class Dropped(Images):
    """Images with dropout in their network."""

    def network(self, seed: int) -> nn.Module:
        network = super().network(seed)
        network.layers.insert(2, nn.Dropout(0.5))
        return network


def test_the_reference_is_the_trained_network_also_with_dropout() -> None:
    """So no error has changed before the first update. The order of implicit rewards is learned."""
    model = Dropped(start=5, width=16)
    network = model.network(0)
    assert network.training
    options = RecordedOptions(steps=60, groups=12, group_size=4, without_noise=True, lr=0.01)
    rows = train_recorded(model, network, small(), options, 0).rows
    assert rows[0]["best_error_change"] == 0 and rows[0]["order_share"] == 0.5
    assert fmean(row["order_share"] for row in rows[-10:]) > 0.65
    assert not make_network(model, 0).training, "online runs have no dropout either"


def test_each_group_has_one_time_and_one_noise() -> None:
    seen = []

    class Spy(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.inner = network

        def forward(self, image: Tensor, time: Tensor, digit: Tensor) -> Tensor:
            seen.append((image.clone(), time.clone()))
            return self.inner(image, time, digit)

    model = Images(places=1, start=5, width=16)
    options = RecordedOptions(steps=1, groups=3, group_size=4, without_noise=True)
    recorded = small(images=torch.zeros(48, PIXELS))
    train_recorded(model, Spy(model.network(0)), recorded, options, 0)
    (image, time), (same, times) = [each for each in seen if len(each[0]) == 12]
    assert torch.equal(image, same) and torch.equal(time, times)
    for each in (image.view(3, 4, -1), time.view(3, 4, 1)):
        assert (each == each[:, :1]).all(), "equal within a group"
        assert (each[0] != each[1]).any() and (each[1] != each[2]).any()


def test_weights_that_diverge_end_the_run() -> None:
    model = Images(places=1, start=5, width=16)
    options = RecordedOptions(steps=9, group_size=4, without_noise=True, lr=1e30)
    with pytest.raises(ConfigError, match=r"the loss of update \d is nan: choose a lower --lr"):
        train_recorded(model, model.network(0), small(), options, 0)


def test_a_missing_file_of_a_later_seed_is_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small().save(tmp_path / "0.safetensors")
    with pytest.raises(SystemExit):
        main(
            ["denoise", "images", "--recorded", f"{tmp_path}/{{seed}}.safetensors", "--seeds", "2"]
        )
    shown = capsys.readouterr()
    assert "1.safetensors cannot be read" in shown.err and "seed 0" not in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("images --record a --recorded b", "choose one"),
        ("plans --recorded a", "--recorded needs a policy that estimates velocities"),
        ("images --recorded a --fork-at 2", "--fork-at has no effect with --recorded"),
        ("images --record a --beta 3", "--beta has no effect with --record: leave"),
        ("images --beta 3", "--beta has no effect without --record or --recorded"),
        ("images --without-noise", "--without-noise has no effect without"),
        ("images --record a --noisy 1 --without-noise", "exclude each other"),
        ("images --record a --seeds 2", "a file for each of --seeds, as images-{seed}"),
        ("examples.points:Points --recorded a", "has the method can_draw"),
        ("images --record nowhere/a", "there is no folder nowhere"),
        ("images --explorer fp8", "--explorer has no effect without --explore"),
        ("images --record pyproject.toml", "pyproject.toml already exists"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["denoise", *words.split()])
    assert message in capsys.readouterr().err.replace("\n", " ")
