"""Small images of digits by flow matching, whose steps are drawn from normal distributions.

A network estimates the velocity v of x = (1 - t) image + t noise, from t = 1 to t = 0. A step of
length h draws from a normal distribution with

    mean       x - h (v + s^2 / (2 t) (x + (1 - t) v)),      s = level sqrt(t / (1 - t))
    deviation  s sqrt(h)

With these steps, x(t) has the same distribution at each t as in the flow itself (Flow-GRPO, arXiv
2505.05470; in the first step, 1 - t is h). An image has 7 x 5 pixels, with values near -1 and 1.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unstale.research.denoise.steps import Steps

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The ten digits, as rows of 5 pixels."""
PIXELS = 35
SHARPNESS = 0.1
"""Difference of the likenesses of two digits at which one is e times as probable as the other. A
likeness is the correlation of an image with a digit.
"""


def templates() -> Tensor:
    """Return the image of each digit, `[10, PIXELS]`, with values -1 and 1."""
    pixels = [[int(bit) for bit in glyph.replace(" ", "")] for glyph in GLYPHS]
    return 2.0 * torch.tensor(pixels) - 1


def corrected_score(reward: Tensor, judged: Tensor) -> Tensor:
    """Return rewards corrected by grades of a judge that is not trained on, `[N]` each.

    Grades are from 1 to 5. A grade below 3 makes the reward negative. The formula is GDRO's
    for text in images (arXiv 2601.02036), whose judge is UnifiedReward.
    """
    return reward * (judged - 3) + 0.2


class Velocity(nn.Module):
    """A network that estimates the velocity of an image at time t, given the digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(PIXELS + len(GLYPHS) + 8, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, PIXELS),
        )

    def forward(self, image: Tensor, time: Tensor, digit: Tensor) -> Tensor:
        angles = time[:, None] * math.pi * 2.0 ** torch.arange(-2, 2)
        known = (image, F.one_hot(digit, len(GLYPHS)), angles.sin(), angles.cos())
        rows = torch.cat([each.float() for each in known], 1)
        return self.layers(rows.to(next(self.layers.parameters()).dtype)).float()


class Images:
    """A policy that draws an image of a given digit.

    The reward is the probability that a fixed classifier of digits gives to this digit.
    """

    def __init__(
        self, *, places: int = 8, width: int = 128, start: int = 80, level: float = 0.7
    ) -> None:
        """Create the policy. `start` is the number of supervised steps before training."""
        self.places = places
        self.lr = 1e-3
        self._width = width
        self._start = start
        self._level = level
        self._templates = templates()

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = Velocity(self._width)
        optimizer = torch.optim.Adam(network.parameters(), 2e-3)
        for _ in range(self._start):
            digit = torch.randint(len(GLYPHS), (128,))
            image = self._templates[digit] + 0.2 * torch.randn(128, PIXELS)
            noise, time = torch.randn(image.shape), torch.rand(128)
            mixed = (1 - time[:, None]) * image + time[:, None] * noise
            loss = F.mse_loss(network(mixed, time, digit), noise - image)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return network

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        return torch.tensor(tasks) % len(GLYPHS)

    def can_draw(self, contexts: Tensor) -> Tensor:
        return (contexts >= 0) & (contexts < len(GLYPHS))

    def begin(self, random: Generator) -> Tensor:
        return torch.randn(PIXELS, generator=random)

    def noise(self, random: Generator) -> Tensor:
        return torch.randn(PIXELS, generator=random)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        if noise is None:
            velocity = network(steps.state, 1 - steps.place / self.places, steps.context)
            return steps.state - velocity / self.places, torch.zeros(len(velocity))
        mean, deviation = self._step(network, steps)
        action = mean + deviation * noise
        return action, _log_density(action, mean, deviation)

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        return _log_density(steps.action, *self._step(network, steps))

    def after(self, action: Tensor) -> Tensor:
        return action

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return the probability of the given digit (`reward`), its likeness, and a corrected
        score.

        The likeness of a digit is the correlation of the pixels with its image. The probability is
        a softmax of likenesses. Only the probability is trained on. `corrected` is lower where the
        likeness is low.
        """
        images, known = (
            F.normalize(each - each.mean(1, keepdim=True), dim=1)
            for each in (path[-1], self._templates)
        )
        alike = images @ known.T
        chance, likeness = (
            each.gather(1, context[:, None]).squeeze(1)
            for each in ((alike / SHARPNESS).softmax(1), alike)
        )
        corrected = corrected_score(chance, 3 + 2 * likeness)
        return {"reward": chance, "likeness": likeness, "corrected": corrected}

    def _step(self, network: nn.Module, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return the mean `[N, PIXELS]` and the deviation `[N, 1]` of steps."""
        length = 1 / self.places
        time = 1 - steps.place * length
        velocity = network(steps.state, time, steps.context)
        time = time[:, None]
        variance = self._level**2 * time / (1 - time).clamp(min=length)
        drift = velocity + variance / (2 * time) * (steps.state + (1 - time) * velocity)
        return steps.state - length * drift, (variance * length).sqrt()


def _log_density(action: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-density of actions. The constant that is equal for all networks is left
    out.
    """
    return -0.5 * ((action - mean) / deviation).square().sum(1)
