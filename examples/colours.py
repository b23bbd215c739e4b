"""A flow model for `unstale denoise`: images of 3 x 4 x 4 values that have a colour asked for.

unstale denoise examples.colours:Colours --record FILE --without-noise
unstale denoise examples.colours:Colours --recorded FILE --without-noise
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Generator, Tensor, nn

from unstale.research.denoise.recorded import flow_error
from unstale.research.denoise.steps import Steps


class Velocity(nn.Sequential):
    """A network that estimates noise - image, given the time and the colour, `[N, 3]`."""

    def forward(self, image: Tensor, time: Tensor, colour: Tensor) -> Tensor:
        rows = torch.cat([image.flatten(1), time[:, None], colour], 1)
        return super().forward(rows.to(self[0].weight.dtype)).float().view_as(image)


class Colours:
    """A policy that draws an image only by its flow, so it has no `noise` and no `logp`."""

    places, lr = 6, 1e-3

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = Velocity(nn.Linear(52, 64), nn.SiLU(), nn.Linear(64, 48))
        optimizer = torch.optim.Adam(network.parameters(), 3e-3)
        for _ in range(60):
            colour, noise = torch.rand(64, 3), torch.randn(64, 3, 4, 4)
            image = colour[:, :, None, None].expand_as(noise)
            optimizer.zero_grad()
            flow_error(network, image, colour, torch.rand(64), noise).mean().backward()
            optimizer.step()
        return network

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        return (torch.tensor(tasks)[:, None] * torch.tensor([0.62, 0.75, 0.38]) + held_out / 2) % 1

    def can_draw(self, contexts: Tensor) -> Tensor:
        return ((contexts >= 0) & (contexts <= 1)).all(1)

    def begin(self, random: Generator) -> Tensor:
        return torch.randn(3, 4, 4, generator=random)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        velocity = network(steps.state, 1 - steps.place / self.places, steps.context)
        return steps.state - velocity / self.places, torch.zeros(len(velocity))

    def after(self, action: Tensor) -> Tensor:
        return action

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        error = (path[-1] - context[:, :, None, None]).square().flatten(1).mean(1)
        return {"reward": (-4 * error).exp()}
