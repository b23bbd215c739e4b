"""Texts by masked diffusion, with growing steps and a late end (CJ-GRPO, EOSER and ASS).

A prompt is a word of 3 to 5 letters, and its text is right if it is the word from its last letter
to its first. `EOS` fills the rest of a text. Most texts of the supervised start are one filler
without the answer, so `EOS` is likely in all places but the first. If the likeliest tokens come
first, a text ends before it has any letters. After a letter, other letters are likelier than `EOS`.

The formulas are those of arXiv 2509.23924 as its authors' `eval/generate.py` computes them
(github.com/yjyddq/EOSER-ASS-RL, commit 5affb4e): functions `ass_sampling`, `sampling`,
`get_num_transfer_tokens_ass` and `get_num_transfer_tokens`. Their code lowers the confidence of a
sampled `EOS`, and clips the ratio of each token. Here the confidence of a place is lowered if its
likeliest token is `EOS`, and the ratio of a step is clipped.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unstale.config import ConfigError
from unstale.research.denoise.masked import NEVER, drawn, gumbel, place_logp, token_logp
from unstale.research.denoise.policies import TASKS
from unstale.research.denoise.steps import Steps

LETTERS, FILLERS = 5, 5
EOS = LETTERS + FILLERS
MASK, PAD = EOS + 1, EOS + 2
"""Tokens after letters and fillers: the end of a text, a masked place, the rest of a short word."""
SHORTEST, LONGEST = 3, 5
"""Numbers of letters of a word."""
LENGTH = 8
"""Number of tokens of a text with its end."""
FILLED = 0.56
"""Share of the texts of the supervised start that are one random filler."""
SPREAD = 0.25
"""Temperature at which places are drawn by the logarithm of their confidence. 0 would be the
paper's rule, under which places have no probability.
"""
Schedule = Literal["ascending", "equal", "one"]
Likelihood = Literal["trajectory", "tokens", "one-step"]


def step_sizes(schedule: Schedule, length: int) -> list[int]:
    """Return the number of tokens of each step.

    `ascending` (ASS) decodes 2^i tokens in step i of floor(log2(length)), and the rest in the last.
    `equal` has as many steps of equal sizes, the larger ones first. `one` decodes one at a time.
    Raises ValueError for fewer than 4 tokens.
    """
    if length < 4:
        raise ValueError(f"a text must have at least 4 tokens, got {length}")
    if schedule == "one":
        return [1] * length
    steps = length.bit_length() - 1
    if schedule == "ascending":
        return [1 << step for step in range(steps - 1)] + [length - (1 << steps - 1) + 1]
    return [length // steps + (step < length % steps) for step in range(steps)]


def eos_factors(schedule: Schedule, length: int, smallest: float | None) -> list[float]:
    """Return the factor of EOSER for the confidence of `EOS` in each step.

    It grows from `smallest` to 1 with t: (2^(i + 1) - 1) / 2^S in step i of S ascending steps, and
    i / (S - 1) otherwise. By default `smallest` is the authors': 0.01 for ascending steps, else
    0.4.
    """
    steps = len(step_sizes(schedule, length))
    grows = schedule == "ascending"
    smallest = smallest if smallest is not None else 0.01 if grows else 0.4
    shares = [((2 << i) - 1) / (1 << steps) if grows else i / (steps - 1) for i in range(steps)]
    return [smallest + (1 - smallest) * share for share in shares]


def words(*, held_out: bool) -> list[Tensor]:
    """Return all words by their number of letters, `[N, LONGEST]` each, in random order.

    Those whose letters are a number divisible by 7 are held out.
    """
    random = Generator().manual_seed(0)
    found = []
    for letters in range(SHORTEST, LONGEST + 1):
        number = torch.randperm(LETTERS**letters, generator=random)
        number = number[(number % 7 == 0) == held_out]
        powers = LETTERS ** torch.arange(letters - 1, -1, -1)
        word = number[:, None] // powers % LETTERS
        found.append(F.pad(word, (0, LONGEST - letters), value=PAD))
    return found


def reversed_words(word: Tensor) -> Tensor:
    """Return the right texts of words, `[N, LENGTH]`."""
    letters = (word != PAD).sum(1, keepdim=True)
    place = letters - 1 - torch.arange(LENGTH)
    return torch.where(place >= 0, word.gather(1, place.clamp(min=0)), EOS)


def lengths(text: Tensor) -> Tensor:
    """Return the number of tokens before the first `EOS`, `[N]`."""
    return (text != EOS).cumprod(1).sum(1)


class Block(nn.Module):
    """Attention of all places to all places, and a layer for each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        heads = self.attend(self.norms[0](rows)).unflatten(2, (3, 2, -1))  # two heads
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) / sqrt(query.shape[3])
        mixed = (scores.softmax(3) @ value).transpose(1, 2).flatten(2)
        rows = rows + self.mix(mixed)
        return rows + self.narrow(F.gelu(self.widen(self.norms[1](rows))))


class TextModel(nn.Module):
    """A bidirectional transformer that reads a word and a text, and predicts masked tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(PAD + 1, width)
        self.place = nn.Embedding(LONGEST + LENGTH, width)
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, EOS + 1)

    def forward(self, word: Tensor, text: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens at each place, `[N, LENGTH, EOS + 1]`."""
        rows = self.token(torch.cat([word, text], 1)) + self.place.weight
        logits = self.head(self.blocks(rows)[:, LONGEST:])
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(2)


class Texts:
    """A policy that decodes a masked text in steps. The reward is 1 for a right text."""

    def __init__(
        self,
        *,
        schedule: Schedule = "ascending",
        eoser: float | None = None,
        likelihood: Likelihood = "trajectory",
        width: int = 32,
        start: int = 400,
    ) -> None:
        """Create the policy.

        `eoser` is the smallest factor of `eos_factors`; 1 turns EOSER off. `start` is the number of
        supervised steps. With the likelihood `trajectory` (CJ-GRPO), a step has its exact
        log-probability. With `tokens`, that of its places is left out, as the authors do. With
        `one-step` (diffu-GRPO), that of its tokens is read from a text that is masked everywhere.
        Raises `ConfigError` for an `eoser` that is not above 0 and at most 1.
        """
        if eoser is not None and not 0 < eoser <= 1:
            raise ConfigError(f"--eoser must be above 0 and at most 1, got {eoser}")
        sizes = step_sizes(schedule, LENGTH)
        self.places = len(sizes)
        self.lr = 1e-3
        self._sizes = torch.tensor(sizes)
        self._factors = torch.tensor(eos_factors(schedule, LENGTH, eoser)).log()
        self._likelihood = likelihood
        self._width = width
        self._start = start
        self._words = {held_out: words(held_out=held_out) for held_out in (False, True)}

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = TextModel(self._width)
        optimizer = torch.optim.Adam(network.parameters(), 4e-3)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, max(self._start, 1))
        for _ in range(self._start):
            word = self.contexts(torch.randint(TASKS, (64,)).tolist(), held_out=False)
            filler = LETTERS + torch.randint(FILLERS, (64, 1))
            is_filled = torch.rand(64, 1) < FILLED
            text = torch.where(
                is_filled, F.pad(filler, (0, LENGTH - 1), value=EOS), reversed_words(word)
            )
            is_masked = torch.rand(64, LENGTH) < torch.rand(64, 1)
            logp = network(word, torch.where(is_masked, MASK, text))
            loss = F.nll_loss(logp.transpose(1, 2), text, reduction="none")
            optimizer.zero_grad()
            (loss * is_masked).sum().div(is_masked.sum()).backward()
            optimizer.step()
            decay.step()
        return network

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        """Return words `[N, LONGEST]`. Each number of letters has a third of the tasks."""
        known = self._words[held_out]
        found = []
        for task in tasks:
            index, letters = divmod(task, len(known))
            found.append(known[letters][index % len(known[letters])])
        return torch.stack(found)

    def begin(self, random: Generator) -> Tensor:
        return torch.full((LENGTH,), MASK)

    def noise(self, random: Generator) -> Tensor:
        return gumbel(random, LENGTH, EOS + 1)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, places = self._read(network, steps)
        action = drawn(tokens, places, self._sizes[steps.place], steps.state, noise)
        return action, self._logp(network, steps, tokens, places, action)

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        tokens, places = self._read(network, steps)
        return self._logp(network, steps, tokens, places, steps.action)

    def after(self, action: Tensor) -> Tensor:
        return action[:, 0]

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return two rewards of each text: 1 if the text is right, and its number of tokens before
        the end (`length`).
        """
        text = path[-1]
        length = lengths(text)
        before_end = torch.where(torch.arange(LENGTH) < length[:, None], text, EOS)
        is_right = (before_end == reversed_words(context)).all(1)
        return {"reward": is_right.float(), "length": length.float()}

    def _logp(
        self, network: nn.Module, steps: Steps, tokens: Tensor, places: Tensor, action: Tensor
    ) -> Tensor:
        """Return the log-probabilities of actions from what `_read` returned for their states."""
        if self._likelihood == "one-step":
            masked = torch.full_like(steps.state, MASK)
            return token_logp(network(steps.context, masked), action)
        logp = token_logp(tokens, action)
        return logp if self._likelihood == "tokens" else logp + place_logp(places, action)

    def _read(self, network: nn.Module, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of tokens `[N, LENGTH, EOS + 1]` and logits of places `[N,
        LENGTH]`.
        """
        tokens = network(steps.context, steps.state)
        confidence, likeliest = tokens.max(2)
        rejected = self._factors[steps.place][:, None].to(tokens.dtype)
        confidence = torch.where(likeliest == EOS, confidence + rejected, confidence)
        is_last = steps.place[:, None] == self.places - 1  # all places, in any order
        places = torch.where(is_last, 0.0, confidence / SPREAD)
        return tokens, places.masked_fill(steps.state != MASK, NEVER)
