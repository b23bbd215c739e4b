"""Policies of your own for `unstale denoise`, their checks, and files with weights."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

from unstale.config import ConfigError
from unstale.config.checks import require_writable
from unstale.envs.registry import import_user_code, user_code
from unstale.research.denoise.steps import Denoiser, Steps, has_noise, microbatches
from unstale.rollout.seeds import derive_seed

NEEDED = tuple(
    name for name in (*Denoiser.__annotations__, *vars(Denoiser)) if not name.startswith("_")
)
"""Names of what a policy must have."""
TRIED = 3
"""Number of objects that are drawn to check a policy."""
TASKS = 1 << 20
"""Number of training tasks. A policy gives each a context."""
EVALUATED = 512
"""Number of held-out tasks."""
PRECISE = (torch.float32, torch.float64)
"""Types of trained parameters and of log-probabilities."""
TOLERANCE = 1e-3
"""Largest difference in nats, relative above 1, of the two log-probabilities of an action."""


def make_policy(name: str, *, with_noise: bool = True) -> Denoiser:
    """Return the policy that the class or function `module:name` makes without arguments.

    Raises `ConfigError` if it cannot be made, or lacks an attribute or a method of `Denoiser`. A
    policy whose steps never have noise needs neither `noise` nor `logp`.
    """
    problem = f"the policy {name!r} cannot be used"
    factory = import_user_code(name, problem)
    with user_code(problem):
        policy: Denoiser = factory()
    needed = [each for each in NEEDED if with_noise or each not in ("noise", "logp")]
    if missing := [each for each in needed if not hasattr(policy, each)]:
        raise ConfigError(
            f"{problem}: it has no {', '.join(missing)}. It needs all that "
            "unstale.research.denoise.steps.Denoiser has"
        )
    for each, kind in (("places", int), ("lr", float)):
        value = getattr(policy, each)
        if not isinstance(value, kind) or not 0 < value < math.inf:
            raise ConfigError(f"{problem}: {each} must be above 0 and {kind.__name__}, got {value}")
    return policy


def make_network(policy: Denoiser, seed: int) -> nn.Module:
    """Return the network of a policy after its supervised start, in evaluation mode.

    Dropout would make two log-probabilities of an action, or two errors of an image, differ. Raises
    `ConfigError` if the start fails, or gives no module with parameters to train in float32 or
    float64.
    """
    problem = f"the policy {type(policy).__name__} cannot be used"
    with user_code(problem):
        network = policy.network(seed)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{problem}: network must return a torch module, got {_shape(network)}")
    trained = trained_parameters(network)
    if not trained:
        raise ConfigError(f"{problem}: its network has no parameters with a gradient")
    for name, each in trained.items():
        if each.dtype not in PRECISE:
            raise ConfigError(
                f"{problem}: its parameter {name} is trained in {_kind(each)}, which would lose "
                "small changes. Keep parameters that require a gradient in float32, as those of "
                "adapters are; others may have any type"
            )
    return network.eval()


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: each for name, each in network.named_parameters() if each.requires_grad}


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's first trained parameter. All tensors are put there."""
    return next(iter(trained_parameters(network).values())).device


class Placed:
    """A policy whose methods get tensors on the device of its network, and at most `microbatch`
    objects at once, or all with 0.

    Log-probabilities and rewards are returned on the CPU, where batches are.
    """

    def __init__(self, policy: Denoiser, network: nn.Module, microbatch: int = 0) -> None:
        self.places, self.lr = policy.places, policy.lr
        self.network, self.after = policy.network, policy.after
        self._policy = policy
        self._device = device_of(network)
        self._microbatch = microbatch

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        return self._policy.contexts(tasks, held_out=held_out).to(self._device)

    def begin(self, random: Generator) -> Tensor:
        return self._policy.begin(random).to(self._device)

    def noise(self, random: Generator) -> Tensor:
        return self._policy.noise(random).to(self._device)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        found = [
            self._policy.draw(network, steps[part], None if noise is None else noise[part])
            for part in microbatches(len(steps.place), self._microbatch)
        ]
        actions, logps = map(torch.cat, zip(*found, strict=True))
        return actions, logps.cpu()

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return self._policy.logp(network, steps).cpu()

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return rewards as `Denoiser` does. `path` may be on the CPU."""
        found = [
            self._policy.rewards(path[:, part].to(self._device), context[part])
            for part in microbatches(len(context), self._microbatch)
        ]
        return {name: torch.cat([each[name] for each in found]).cpu() for name in found[0]}


def start(policy: Denoiser, load: Path | None, seed: int) -> nn.Module:
    """Return the network with which a run begins: `make_network`, with the weights of `load`."""
    network = make_network(policy, derive_seed(seed, "network"))
    if load:
        load_weights(network, weights_file(load, seed))
    return network


def check_policy(
    policy: Denoiser,
    trained: nn.Module,
    engine: nn.Module,
    noisy: Sequence[int] | None = (),
    held_out: int = EVALUATED,
) -> None:
    """Draw a few objects, and raise `ConfigError` for the first thing that is not as `Denoiser` has
    it.

    `trained` is the policy's network, and `engine` its copy that draws. Only steps of the places
    `noisy` have noise; empty means all, and None none. `held_out` is the number of held-out tasks.
    """
    name = type(policy).__name__
    with user_code(f"the policy {name} cannot be used"):
        _Trial(policy, name).draw(trained, engine, noisy, held_out)


class _Trial:
    """A few objects of a policy, which are drawn to check its methods."""

    def __init__(self, policy: Denoiser, name: str) -> None:
        self._policy = policy
        self._name = name

    def draw(
        self, trained: nn.Module, engine: nn.Module, noisy: Sequence[int] | None, held_out: int
    ) -> None:
        policy, device = self._policy, device_of(trained)
        known = policy.contexts(range(TRIED), held_out=False)
        self._require(known, "contexts", None)
        end = max(held_out, TRIED)
        for tasks, is_held_out in (
            (range(TRIED), True),
            (range(TASKS - TRIED, TASKS), False),
            (range(end - TRIED, end), True),
        ):
            self._require(policy.contexts(tasks, held_out=is_held_out), "contexts", known)
        context, state, path = known.to(device), self._seeded("begin").to(device), []
        for place in range(policy.places):
            path.append(state)
            noise = self._seeded("noise").to(device) if has_noise(place, noisy) else None
            steps = Steps(state, state, torch.full((TRIED,), place, device=device), context)
            with torch.no_grad():
                action, logp = policy.draw(trained, steps, noise)
                fast, _ = policy.draw(engine, steps, noise)
            self._require(action, "draw", None)
            self._require(fast, "draw of the engine's copy", action)
            if action.device != device:
                self._refuse(f"draw must return actions on {device}, got {action.device}")
            if noise is not None:
                self._compare(trained, Steps(state, action, steps.place, context), logp)
            state = policy.after(action)
            self._require(state, "after", path[0])
        figures = policy.rewards(torch.stack([*path, state]), context)
        if "reward" not in figures:
            self._refuse(f"rewards returns {', '.join(figures) or 'nothing'}, and no reward")
        for figure, values in figures.items():
            self._require(values, f"rewards, for {figure},", torch.zeros(TRIED))

    def _compare(self, network: nn.Module, steps: Steps, drawn: Tensor) -> None:
        """Require that `draw` and `logp` return the same log-probabilities of an action."""
        again = self._policy.logp(network, steps)
        for values, method in ((drawn, "draw, for log-probabilities,"), (again, "logp")):
            self._require(values, method, torch.zeros(TRIED))
            if values.dtype not in PRECISE:
                self._refuse(f"{method} must return float32 or float64, got {_kind(values)}")
        if not again.requires_grad:
            self._refuse("logp has no gradient for the network's parameters")
        if not torch.allclose(again.detach(), drawn, TOLERANCE, TOLERANCE):
            self._refuse(
                f"in step {int(steps.place[0])}, logp of an action is {again[0].item():.4g}, and "
                f"draw said {drawn[0].item():.4g}"
            )

    def _seeded(self, method: str) -> Tensor:
        """Return what a method draws from a few generators, `[TRIED, ...]`."""
        call = getattr(self._policy, method)
        rows = [call(Generator().manual_seed(seed)) for seed in [*range(TRIED), 0]]
        for each in rows:
            if not isinstance(each, Tensor) or each.shape != rows[0].shape:
                self._refuse(f"{method} must return tensors of one shape, got {_shape(each)}")
        if not torch.equal(rows[0], rows[-1]):
            self._refuse(f"{method} must draw from its generator, and differs for an equal one")
        return torch.stack(rows[:TRIED])

    def _require(self, value: object, method: str, like: Tensor | None) -> None:
        """Require a finite tensor with the shape and, if integers or not, the kind of `like`."""
        if not isinstance(value, Tensor) or not value.ndim or len(value) != TRIED:
            self._refuse(f"{method} must return {TRIED} rows for {TRIED}, got {_shape(value)}")
        if like is not None and value.shape != like.shape:
            self._refuse(f"{method} must return {_shape(like)}, got {_shape(value)}")
        if like is not None and value.is_floating_point() != like.is_floating_point():
            self._refuse(f"{method} must return {like.dtype}, got {value.dtype}")
        if not value.isfinite().all():
            self._refuse(f"{method} returns values that are not finite")

    def _refuse(self, text: str) -> NoReturn:
        raise ConfigError(f"the policy {self._name} cannot be used: {text}")


def _shape(value: object) -> str:
    """Return the shape of a tensor, or the type of another value."""
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _kind(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def weights_file(folder: Path, seed: int) -> Path:
    """Return the file of the weights of a run in the folder of `--save` or `--load`."""
    return folder / f"seed-{seed}.safetensors"


def check_files(load: Path | None, save: Path | None, seeds: Sequence[int]) -> None:
    """Raise `ConfigError` if a file to load has no finite weights, or one to save is there.

    The folder of `save` is created.
    """
    for seed in seeds:
        if load:
            _check_weights(weights_file(load, seed))
        if save and weights_file(save, seed).exists():
            raise ConfigError(f"--save: {weights_file(save, seed)} is there already; remove it")
    if save:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--save: {save} cannot be a folder: {error}") from error
        require_writable(weights_file(save, 0))


def _check_weights(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"--load: there is no file {file}")
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--load: {file} cannot be read as safetensors: {error}") from error
    for name, values in weights.items():
        if not values.is_floating_point() or not values.float().isfinite().all():
            raise ConfigError(f"--load: {file} has weights that are not finite numbers: {name}")


def load_weights(network: nn.Module, file: Path) -> None:
    """Load weights that `save_weights` wrote. Raises `ConfigError` if they are of another
    network.
    """
    found, trained = load_file(file), trained_parameters(network)
    for name in sorted(found.keys() | trained.keys()):
        saved, wanted = (_shape(each.get(name)) for each in (found, trained))
        if saved != wanted:
            raise ConfigError(
                f"{file} has no weights of this policy's network: for {name}, it has {saved}, and "
                f"the network trains {wanted}"
            )
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(found[name])


def save_weights(network: nn.Module, file: Path) -> None:
    """Write the trained parameters of a network as safetensors. Raises `ConfigError` if that
    fails.
    """
    weights = {
        name: each.detach().cpu().contiguous() for name, each in trained_parameters(network).items()
    }
    unfinished = file.with_suffix(".part")
    try:
        save_file(weights, unfinished)
        os.replace(unfinished, file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--save: {file} cannot be written: {error}") from error
