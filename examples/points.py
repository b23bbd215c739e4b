"""A policy for `unstale denoise`: points of the plane, by denoising diffusion in ten steps.

    unstale denoise examples.points:Points --steps 40 --seeds 3

The supervised start learns four clusters of points without their numbers. Training teaches the
policy to draw a point of the cluster that was asked for. A step is that of DDPM (arXiv 2006.11239),
with a smallest deviation, so that the last step has a density as well.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unstale.research.denoise.steps import Steps

CENTERS = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
PLACES = 10
KEPT = torch.cos(torch.arange(PLACES + 1) / (PLACES + 1) * math.pi / 2).square()
"""The share of the point's variance that is left after each number of noising steps."""


class Noise(nn.Module):
    """A network that estimates the noise in a point after some noising steps."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 + PLACES + len(CENTERS), width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 2),
        )

    def forward(self, point: Tensor, left: Tensor, cluster: Tensor) -> Tensor:
        known = (point, F.one_hot(left - 1, PLACES), F.one_hot(cluster, len(CENTERS)))
        rows = torch.cat([each.float() for each in known], 1)
        return self.layers(rows.to(next(self.layers.parameters()).dtype)).float()


class Points:
    """A policy that draws a point of a cluster. The reward is its nearness to the center."""

    places = PLACES
    lr = 3e-3

    def __init__(self, start: int = 1000) -> None:
        """Create the policy. `start` is the number of supervised steps before training."""
        self._start = start

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = Noise()
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for _ in range(self._start):
            asked, drawn = torch.randint(len(CENTERS), (2, 256))
            left = torch.randint(1, PLACES + 1, (256,))
            kept = KEPT[left][:, None]
            noise = torch.randn(256, 2)
            point = CENTERS[drawn] + 0.2 * torch.randn(256, 2)
            noisy = kept.sqrt() * point + (1 - kept).sqrt() * noise
            loss = F.mse_loss(network(noisy, left, asked), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return network

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        return torch.tensor(tasks) % len(CENTERS)

    def begin(self, random: Generator) -> Tensor:
        return torch.randn(2, generator=random)

    def noise(self, random: Generator) -> Tensor:
        return torch.randn(2, generator=random)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, deviation = self._step(network, steps)
        action = mean if noise is None else mean + deviation * noise
        return action, _log_density(action, mean, deviation)

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return _log_density(steps.action, *self._step(network, steps))

    def after(self, action: Tensor) -> Tensor:
        return action

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return the nearness to the center that was asked for, and to the nearest one."""
        squared = (path[-1][:, None] - CENTERS.to(path.device)).square().sum(2)
        near = (-squared / 0.5).exp()
        return {"reward": near.gather(1, context[:, None]).squeeze(1), "nearest": near.amax(1)}

    def _step(self, network: nn.Module, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return the mean `[N, 2]` and the deviation `[N, 1]` of steps."""
        left, known = PLACES - steps.place, KEPT.to(steps.place.device)
        kept, after = known[left][:, None], known[left - 1][:, None]
        noise = network(steps.state, left, steps.context)
        point = (steps.state - (1 - kept).sqrt() * noise) / kept.sqrt()
        added = 1 - kept / after
        mean = after.sqrt() * added * point + (kept / after).sqrt() * (1 - after) * steps.state
        variance = added * (1 - after) / (1 - kept)
        return mean / (1 - kept), variance.sqrt().clamp(min=0.1)


def _log_density(action: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-density of actions without its constant, which no network changes."""
    return -0.5 * ((action - mean) / deviation).square().sum(1)
