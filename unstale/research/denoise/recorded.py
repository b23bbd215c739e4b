"""Training of flow models on recorded groups of images and rewards (GDRO, arXiv 2601.02036).

Training draws no images itself, so the images may come from any model and sampler. An image x, a
time t and noise n make the point (1 - t) x + t n, whose velocity is v = n - x. The error e of a
network is the mean square of the difference between v and the network's estimate of v. The implicit
reward of x is

    s = -beta (e - e_ref)                                                          (equation 5)

where e_ref is the error of the network before training. The rewards r of a group, best first, are
matched as a ranking, by a sum over places:

    L = sum_{i<k} (log sum_{m>=i} exp s_m  -  sum_{j>=i} q_i(j) s_j)               (equation 7)

where q_i is the softmax of r / temperature over the images from place i on. Two images and a low
temperature make it DPO. It only compares, so errors of all images may rise. Therefore the error of
the best image is added, times `best_weight` (equations 8 and 9), unless all rewards are equal. The
paper does not say whether a group shares time and noise. Here it does, as in Diffusion-DPO, and
errors are means over pixels.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

from unstale.config import ConfigError
from unstale.envs.registry import user_code
from unstale.research.denoise import policies
from unstale.research.denoise.steps import Denoiser, microbatches
from unstale.research.denoise.train import DenoiseOptions, Result, copied, drawn, evaluate
from unstale.rollout.seeds import derive_seed

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
EVALUATIONS = 10
"""Number of evaluations of a run after the one before training."""
MEASURED = 512
"""Number of recorded images on which the network is measured before training."""
BETTER = 0.95
"""Share of the error to which another convention must lower it to be taken for the network's."""


class Flow(Denoiser, Protocol):
    """A policy whose network estimates velocities.

    `network(image, time, context)` returns noise minus image, `[N, ...]`, for N mixed images. The
    time `[N]` is 0 for the image and 1 for noise.
    """

    def can_draw(self, contexts: Tensor) -> Tensor:
        """Return the mask of contexts that the policy knows, a boolean for each, `[N]`. Their
        shape is valid.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOptions:
    """Options of training on recorded groups. The defaults of the objective are the paper's for
    text in images.
    """

    steps: int = 100
    groups: int = 4
    group_size: int = 16
    """Number of images of a group that an update compares. A smaller group is used whole."""
    beta: float = 12.0
    temperature: float = 0.05
    best_weight: float = 0.5
    microbatch: int = 0
    held_out: int = policies.EVALUATED
    lr: float = 0.0
    noisy: Sequence[int] = ()
    """Places whose steps draw noise in evaluations. Empty means all."""
    without_noise: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """N finished images. Those with the same group number were drawn for the same context."""

    images: Tensor
    """`[N, ...]`, floating point, of the shape that the policy draws."""
    contexts: Tensor
    """The context that each image was drawn for, such as its digit, `[N, ...]`."""
    rewards: Tensor
    """`[N]`, floating point."""
    groups: Tensor
    """`[N]`, any integers. A group of one image has nothing to compare, and is not trained on."""

    @classmethod
    def load(cls, path: Path, model: Flow) -> "Recorded":
        """Read a safetensors file that has the four fields as tensors.

        Raises `ConfigError` if the file cannot be read, `model` cannot be trained on it, or a
        method of the model fails.
        """
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} cannot be read as safetensors ({error}). It must have the tensors "
                f"{', '.join(cls.__slots__)}"
            ) from error
        if missing := [name for name in cls.__slots__ if name not in found]:
            raise ConfigError(
                f"{path} has no tensor {missing[0]}, only {', '.join(sorted(found)) or 'none'}"
            )
        recorded = cls(*(_trained_kind(found[name]) for name in cls.__slots__))
        with user_code(f"the policy {type(model).__name__} cannot be used"):
            if problem := recorded.problem(model):
                raise ConfigError(f"{path}: {problem}")
            known = model.contexts([0], held_out=False).dtype
        return replace(recorded, contexts=recorded.contexts.to(known))

    def save(self, path: Path) -> None:
        """Write the file that `load` reads. Raises `ConfigError` if it cannot be written."""
        tensors = {name: getattr(self, name).contiguous() for name in self.__slots__}
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    def problem(self, model: Flow) -> str:
        """Return what prevents training `model` on these images, and "" if nothing does."""
        return self.wrong_tensor(model) or self._wrong_group(model)

    def wrong_tensor(self, model: Denoiser) -> str:
        """Return which tensor has another shape or type than `model` needs, or values that are not
        finite, and "" if none has.
        """
        count = len(self.groups) if self.groups.ndim else 0
        image = model.begin(Generator())
        context = model.contexts([0], held_out=False)
        shapes = {
            "images": (count, *image.shape),
            "contexts": (count, *context.shape[1:]),
            "rewards": (count,),
            "groups": (count,),
        }
        for name, shape in shapes.items():
            each = getattr(self, name)
            if tuple(each.shape) != shape:
                return f"{name} must have the shape {list(shape)}, got {list(each.shape)}"
            wanted = context if name == "contexts" else image
            is_integer = name == "groups" or not wanted.is_floating_point()
            if each.is_complex() or each.is_floating_point() == is_integer:
                kind = "integers" if is_integer else "floating point"
                return f"{name} must be {kind}, got {str(each.dtype).removeprefix('torch.')}"
            if not is_integer and not each.isfinite().all():
                return f"{name} must be finite, got {each[~each.isfinite()][0].item()}"
        return "" if count else "it has no images"

    def _wrong_group(self, model: Flow) -> str:
        if not (known := _known(model, self.contexts)).all():
            wrong = self.contexts[~known][0].tolist()
            return f"the policy has no context {wrong}"
        if not (groups := self.rows()):
            return "each group has one image, and comparing takes two"
        differ = False
        for rows in groups:
            if (self.contexts[rows] != self.contexts[rows[0]]).any():
                number = int(self.groups[rows[0]])
                return f"the images of group {number} were not all drawn for the same context"
            differ |= bool((self.rewards[rows] != self.rewards[rows[0]]).any())
        return "" if differ else "in each group, all rewards are equal: nothing can be learned"

    def rows(self) -> list[Tensor]:
        """Return the row numbers of each group of at least two images, by group number."""
        _, counts = self.groups.unique(return_counts=True)
        every = self.groups.argsort(stable=True).split(counts.tolist())
        return [rows for rows in every if len(rows) > 1]

    def lone(self) -> int:
        """Return the number of groups of one image."""
        return int((self.groups.unique(return_counts=True)[1] == 1).sum())


def _trained_kind(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision in which it is trained on. torch cannot compare large
    unsigned integers, so they get another type.
    """
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.long() if tensor.dtype in UNSIGNED else tensor


def _known(model: Flow, contexts: Tensor) -> Tensor:
    """Return `can_draw` of contexts. Raises `ConfigError` if it is no mask of them."""
    known = model.can_draw(contexts)
    shape = contexts.shape[:1]
    if not isinstance(known, Tensor) or known.dtype != torch.bool or known.shape != shape:
        got = f"{list(known.shape)} {known.dtype}" if isinstance(known, Tensor) else repr(known)
        raise ConfigError(
            f"the policy {type(model).__name__} cannot be used: can_draw must return "
            f"{len(contexts)} booleans for {len(contexts)} contexts, got {got}"
        )
    return known.cpu()


def check_flow(
    model: Flow,
    network: nn.Module,
    engine: nn.Module,
    noisy: Sequence[int] | None,
    held_out: int = policies.EVALUATED,
) -> None:
    """Draw a few images, and raise `ConfigError` for the first thing that is not as `Flow` has it.

    The parameters are those of `check_policy`.
    """
    policies.check_policy(model, network, engine, noisy, held_out)
    problem = f"the policy {type(model).__name__} cannot be used"
    count = policies.TRIED
    with user_code(problem):
        image = torch.stack([model.begin(Generator().manual_seed(i)) for i in range(count)])
        context = model.contexts(range(count), held_out=False).cpu()
        points = [
            each.to(policies.device_of(network))
            for each in (image, torch.linspace(0, 1, count), context)
        ]
        velocity, again = (network(*points) for _ in range(2))
        if not isinstance(velocity, Tensor) or velocity.shape != image.shape:
            got = list(velocity.shape) if isinstance(velocity, Tensor) else type(velocity).__name__
            raise ConfigError(
                f"{problem}: its network must return velocities of the shape {list(image.shape)}, "
                f"as the images, got {got}"
            )
        if not velocity.isfinite().all():
            raise ConfigError(f"{problem}: its network returns velocities that are not finite")
        if not velocity.requires_grad:
            raise ConfigError(f"{problem}: its velocities have no gradient for the parameters")
        if not torch.allclose(velocity, again, 1e-5, 1e-5):
            raise ConfigError(
                f"{problem}: its network returns other velocities for the same image in a second "
                "call. It must have no dropout in evaluation mode"
            )
        if not _known(model, context).all():
            raise ConfigError(f"{problem}: can_draw is false for contexts of its own tasks")


def reference_error(
    model: Flow, network: nn.Module, recorded: Recorded, microbatch: int = 0
) -> tuple[float, float]:
    """Return the mean error of a network on recorded images, and that of the velocity 0.

    The network gets at most `microbatch` images at once, or all with 0. Raises `ConfigError` if the
    network fails on them, or if its error is far lower with velocities of the other sign or with
    reversed times: then its convention is another one.
    """
    random = Generator().manual_seed(0)
    rows = torch.randperm(len(recorded.groups), generator=random)[:MEASURED]
    image = recorded.images[rows].float()
    time = torch.rand(len(rows), generator=random)
    points = image, recorded.contexts[rows], time, torch.randn(image.shape, generator=random)
    conventions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "": network,
        "of the other sign": lambda x, t, c: -network(x, t, c),
        "at the time 1 - t": lambda x, t, c: network(x, 1 - t, c),
        "of the other sign at the time 1 - t": lambda x, t, c: -network(x, 1 - t, c),
        "0": lambda x, t, c: torch.zeros_like(x),
    }
    problem = f"the policy {type(model).__name__} cannot be used"
    device, parts = policies.device_of(network), microbatches(len(rows), microbatch)
    with user_code(problem), torch.no_grad():
        errors = {
            name: torch.cat([_error(each, points, part, device) for part in parts]).mean().item()
            for name, each in conventions.items()
        }
    own, zero = errors.pop(""), errors.pop("0")
    best = min(errors, key=lambda name: errors[name])
    if not own < math.inf:
        raise ConfigError(f"{problem}: its error on the recorded images is {own}")
    if errors[best] < BETTER * min(own, zero):
        raise ConfigError(
            f"{problem}: its velocities have the mean error {own:.3f} on the recorded images, and "
            f"{errors[best]:.3f} {best}. A velocity must be noise - image, and the time of the "
            "image 0"
        )
    return own, zero


def record(
    model: Flow, options: DenoiseOptions, seed: int, *, without_noise: bool = False
) -> Recorded:
    """Draw as many images as `train` draws, with the network before training.

    These are `options.group_size` images for each task of `options.steps` updates. Steps of the
    places `options.noisy` have noise, or no step has. Raises `ConfigError` if the policy is not as
    `Flow` has it, or draws what cannot be recorded.
    """
    noisy = None if without_noise else options.noisy
    trained = policies.start(model, options.load, seed)
    network = copied(trained, options.engine)
    check_flow(model, trained, network, noisy, policies.TRIED)
    tasks = Generator().manual_seed(derive_seed(seed, "tasks"))
    count = options.steps * options.groups
    indices = torch.randint(policies.TASKS, (count,), generator=tasks).tolist()
    placed = policies.Placed(model, trained, options.microbatch)
    contexts = placed.contexts(indices, held_out=False).repeat_interleave(options.group_size, 0)
    random = Generator().manual_seed(derive_seed(seed, "recorded"))
    groups = torch.arange(count).repeat_interleave(options.group_size)
    problem = f"the policy {type(model).__name__} cannot be used"
    with user_code(problem):
        path = drawn(placed, network, contexts, random, noisy)
        reward = placed.rewards(path, contexts)["reward"]
        found = Recorded(path[-1], contexts.cpu(), reward, groups)
        if wrong := found.wrong_tensor(model):
            raise ConfigError(f"{problem}: of what it drew, {wrong}")
    return found


def flow_error(
    network: Callable[[Tensor, Tensor, Tensor], Tensor],
    images: Tensor,
    contexts: Tensor,
    time: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return the mean square error of the velocity for each image, `[N]`, in float32 or better.

    `images` and `noise` are `[N, ...]`, and `time` is `[N]`, from 0 (the image) to 1. The network
    gets points in the precision of the images. Raises `ConfigError` if a shape is another one.
    """
    if noise.shape != images.shape or time.shape != images.shape[:1]:
        raise ConfigError(
            f"noise must have the shape {list(images.shape)} of the images and time {len(images)} "
            f"values, got {list(noise.shape)} and {list(time.shape)}"
        )
    share = time.view(-1, *[1] * (images.ndim - 1))
    mixed = (1 - share) * images + share * noise
    velocity = network(mixed.to(images.dtype), time, contexts)
    if velocity.shape != images.shape:
        raise ConfigError(
            f"the network must return velocities of the shape {list(images.shape)}, as the images, "
            f"got {list(velocity.shape)}"
        )
    precision = torch.promote_types(velocity.dtype, torch.float32)
    wanted = noise.to(precision) - images.to(precision)
    return (velocity.to(precision) - wanted).square().flatten(1).mean(1)


def ranking_loss(score: Tensor, reward: Tensor, *, temperature: float) -> Tensor:
    """Return the loss of the implicit rewards of a group as a scalar (equation 7).

    `score` and `reward` are `[k]`, in any order. `temperature` is that of the softmax of rewards,
    in the unit of the rewards.
    """
    order = reward.argsort(descending=True, stable=True)
    size = len(order)
    passed = torch.ones(size, size, device=score.device).tril(-1).bool()
    scores, rewards = (
        each[order].expand(size, size).masked_fill(passed, -torch.inf)
        for each in (score, reward.to(score.dtype) / temperature)
    )
    places = scores.logsumexp(1) - rewards.softmax(1) @ score[order]
    return places[:-1].sum()


def group_loss(
    error: Tensor, reference: Tensor, reward: Tensor, options: RecordedOptions
) -> Tensor:
    """Return the loss of one group from the errors of the trained and the reference network.

    All are `[k]`. Only `error` has a gradient. It is computed in float32 or better. If all rewards
    are equal, no image is the best, and none is imitated. Raises `ConfigError` if shapes differ.
    """
    if error.ndim != 1 or not error.shape == reference.shape == reward.shape:
        shapes = ", ".join(str(list(each.shape)) for each in (error, reference, reward))
        raise ConfigError(f"errors and rewards of a group must have one shape [k], got {shapes}")
    error = error.to(torch.promote_types(error.dtype, torch.float32))
    score = -options.beta * (error - reference)
    best = error[reward.argmax()] * (reward.max() > reward.min())
    ranking = ranking_loss(score, reward, temperature=options.temperature)
    return ranking + options.best_weight * best


def train_recorded(
    model: Flow, network: nn.Module, recorded: Recorded, options: RecordedOptions, seed: int
) -> Result:
    """Train a network on recorded groups, in place. Evaluate it `EVALUATIONS` times during
    training.

    The network before training is the reference. Both are in evaluation mode: with dropout, they
    would differ before any update. `rows` of the result has metrics of each update, and the
    held-out figures of updates that were evaluated. No image is drawn but for these. In
    microbatches, the errors of a group are computed twice: without a gradient for the loss and its
    derivatives by each error, and again to apply these. Raises `ConfigError` if a loss is not
    finite.
    """
    reference = copied(network.eval(), "float32")
    trained = [*policies.trained_parameters(network).values()]
    optimizer = torch.optim.Adam(trained, options.lr or model.lr)
    device, placed = trained[0].device, policies.Placed(model, network, options.microbatch)
    random = Generator().manual_seed(derive_seed(seed, "recorded"))
    noisy = None if options.without_noise else options.noisy
    before = figures = evaluate(placed, network, 0, noisy, options.held_out)
    chosen = _draw_groups(recorded.rows(), random)
    rows: list[dict[str, Any]] = []
    for step in range(1, options.steps + 1):
        groups = [next(chosen) for _ in range(options.groups)]
        groups = [
            group[torch.randperm(len(group), generator=random)[: options.group_size]]
            for group in groups
        ]
        every = torch.cat(groups)
        sizes = torch.tensor([len(group) for group in groups])
        image = recorded.images[every].float()
        time = torch.rand(len(sizes), generator=random).repeat_interleave(sizes)
        noise = torch.randn(len(sizes), *image.shape[1:], generator=random)
        points = image, recorded.contexts[every], time, noise.repeat_interleave(sizes, 0)
        parts = microbatches(len(every), options.microbatch)
        with torch.no_grad():
            known = torch.cat([_error(reference, points, part, device) for part in parts])
        with torch.set_grad_enabled(len(parts) == 1):
            found = torch.cat([_error(network, points, part, device) for part in parts])
        error = found.detach().requires_grad_()
        errors, references, rewards = (
            each.split(sizes.tolist()) for each in (error, known, recorded.rewards[every].float())
        )
        compared = [*zip(errors, references, rewards, strict=True)]
        loss = torch.stack([group_loss(*group, options) for group in compared]).mean()
        if not loss.isfinite():
            raise ConfigError(f"the loss of update {step} is {loss.item()}: choose a lower --lr")
        (slope,) = torch.autograd.grad(loss, error)
        optimizer.zero_grad()
        for part in parts:
            again = found if len(parts) == 1 else _error(network, points, part, device)
            again.backward(slope[part])
        optimizer.step()
        metrics = [_metrics(known - error.detach(), reward) for error, known, reward in compared]
        row: dict[str, Any] = {"step": step, "images": len(every), "loss": loss.item()}
        row |= {name: fmean(each[name] for each in metrics) for name in metrics[0]}
        if step * EVALUATIONS // options.steps > (step - 1) * EVALUATIONS // options.steps:
            figures = evaluate(placed, network, 0, noisy, options.held_out)
            row |= {"held_out": figures}
        rows.append(row)
    return Result(before, figures, rows, {"trained": sum(row["images"] for row in rows)})


def _error(
    network: Callable[[Tensor, Tensor, Tensor], Tensor],
    points: Sequence[Tensor],
    part: slice,
    device: torch.device,
) -> Tensor:
    """Return `flow_error` of some points, computed on a device."""
    return flow_error(network, *(each[part].to(device) for each in points)).cpu()


def best_evaluation(result: Result, name: str) -> tuple[int, Mapping[str, float]]:
    """Return the update after which the held-out figure `name` is highest, and all figures after
    this update.

    The update is 0 if it is highest before training.
    """
    evaluated = [(row["step"], row["held_out"]) for row in result.rows if "held_out" in row]
    return max([(0, result.before), *evaluated], key=lambda each: each[1][name])


def _draw_groups(rows: Sequence[Tensor], random: Generator) -> Iterator[Tensor]:
    """Yield all groups in random order, again and again."""
    while True:
        for number in torch.randperm(len(rows), generator=random).tolist():
            yield rows[number]


def _metrics(closer: Tensor, reward: Tensor) -> dict[str, float]:
    """Return metrics of a group: `closer` `[k]` is the decrease of the error of each image."""
    above = reward[:, None] > reward
    ordered = (closer[:, None] > closer).float() + 0.5 * (closer[:, None] == closer)
    return {
        "order_share": ordered[above].mean().item() if above.any() else 0.5,
        "best_error_change": -closer[reward.argmax()].item(),
    }
