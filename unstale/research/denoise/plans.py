"""Plans by masked diffusion, which are drafted and then edited in place (ReflectDrive-2).

A road has 4 to 8 columns of 5 lanes, some of them blocked. A plan is a lane for each column, and
`END` after the road. It is right if each lane is free and at most one lane from the one before. One
network of all columns draws it:

    decide   the last lane of the road, which is where the plan leads
    draft    some of the masked columns at a time
    reflect  some columns of the whole draft anew, which stand there while the network reads it

In a draft, columns with a certain lane are likely to be next, and in an edit those with an unlikely
one. Each step drafts more columns than the one before (ASS of the paper of CJ-GRPO), and columns
whose likeliest lane is `END` come later (EOSER). Columns are drawn, as `masked.py` says, instead of
the most certain ones being taken.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unstale.config import ConfigError
from unstale.research.denoise.masked import NEVER, drawn, gumbel, place_logp, token_logp
from unstale.research.denoise.steps import Steps

COLUMNS, LANES = 8, 5
END, MASK = LANES, LANES + 1
"""Values in place of a column's lane: `END` for a column after the road, `MASK` for a column
without a lane yet.
"""
SHORTEST = 4
"""Smallest number of columns of a road."""
POOL = 4096
"""Number of roads to train on. As many others are held out."""
SPREAD = 0.5
"""Temperature at which columns are drawn by the log-probabilities of their lanes."""


def roads(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return roads that have a right plan, and one of their right plans at random for each.

    A road is `[COLUMNS + 1, LANES]`: 1 at the lane before the first column, then 1 at lanes that
    are blocked, as all are after its end.
    """
    random = Generator().manual_seed(seed)
    found: list[Tensor] = []
    plans: list[Tensor] = []
    while sum(map(len, found)) < count:
        blocked = torch.rand(count, COLUMNS, LANES, generator=random) < 0.45
        start = torch.randint(LANES, (count,), generator=random)
        ways = [torch.ones(count, LANES)]  # number of right ends after each column
        for column in reversed(range(COLUMNS)):
            free = ways[0] * ~blocked[:, column]
            ways.insert(0, F.pad(free, (1, 1)).unfold(1, 3, 1).sum(2))
        possible = ways[0].gather(1, start[:, None]).squeeze(1) > 0
        lane, plan = start, []
        for column in range(COLUMNS):
            near = (torch.arange(LANES) - lane[:, None]).abs() <= 1
            weight = ways[column + 1] * ~blocked[:, column] * near
            weight[~possible] = 1.0
            lane = torch.multinomial(weight, 1, generator=random).squeeze(1)
            plan.append(lane)
        road = torch.cat([F.one_hot(start, LANES)[:, None], blocked.long()], 1)
        found.append(road[possible])
        plans.append(torch.stack(plan, 1)[possible])
    road, plans_of_all = torch.cat(found)[:count], torch.cat(plans)[:count]
    length = torch.randint(SHORTEST, COLUMNS + 1, (count, 1), generator=random)
    is_after = torch.arange(COLUMNS) >= length
    road[:, 1:][is_after] = 1
    return road, plans_of_all.masked_fill(is_after, END)


def after_end(road: Tensor) -> Tensor:
    """Return True for columns after the end of a road, `[N, COLUMNS]`."""
    return road[:, 1:].bool().all(2)


def right(plan: Tensor, road: Tensor) -> Tensor:
    """Return 1 for right plans and 0 for others, `[N]`. `plan` is `[N, COLUMNS]`."""
    before = torch.cat([road[:, 0].argmax(1, keepdim=True), plan[:, :-1]], 1)
    is_free = F.pad(road[:, 1:], (0, 2), value=1).gather(2, plan[:, :, None]).squeeze(2) == 0
    is_right = torch.where(after_end(road), plan == END, is_free & ((plan - before).abs() <= 1))
    return is_right.all(1).float()


class Reader(nn.Module):
    """A network that reads a road and a plan, and returns logits of each column's lane.

    Each of its four layers reads a column and the two beside it, so a logit may depend on all
    columns that a few mistakes can concern.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(3 * LANES + 3, width)
        self.layers = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(4))
        self.head = nn.Linear(width, LANES + 1)

    def forward(self, plan: Tensor, road: Tensor, is_edit: Tensor) -> Tensor:
        """Return logits `[N, COLUMNS, LANES + 1]`. `is_edit` is `[N]`."""
        start = F.pad(road[:, :1], (0, 0, 0, COLUMNS - 1))
        edit = is_edit[:, None, None].expand(-1, COLUMNS, 1)
        known = torch.cat([F.one_hot(plan, LANES + 2), road[:, 1:], start, edit], 2)
        rows = self.enter(known.to(self.head.weight.dtype))
        for layer in self.layers:
            wide = F.pad(rows, (0, 0, 1, 1)).unfold(1, 3, 1).flatten(2)
            rows = rows + F.silu(layer(wide))
        return self.head(rows).float()


def disturbed(plan: Tensor, random: Generator | None = None) -> Tensor:
    """Return plans with a mistake along the road or across it, from a random column on.

    Across: the lanes of a run of columns are moved by one. Along: the rest of the plan comes one
    column early or late. These are the two kinds of ReflectDrive-2.
    """
    count = len(plan)

    def whole(high: int) -> Tensor:
        return torch.randint(high, (count, 1), generator=random)

    column = torch.arange(COLUMNS).expand(count, -1)
    first, sign = whole(COLUMNS), 2 * whole(2) - 1
    inside = (column >= first) & (column < first + 1 + whole(3))
    across = torch.where(inside & (plan != END), (plan + sign).clamp(0, LANES - 1), plan)
    moved = torch.where(column >= first, column + sign, column).clamp(0, COLUMNS - 1)
    return torch.where(whole(2) == 0, across, plan.gather(1, moved))


class Plans:
    """A policy that decides, drafts and edits plans. The reward is 1 for a right final plan."""

    def __init__(
        self,
        *,
        drafts: Sequence[int] = (1, 2, 4),
        edits: Sequence[int] = (2, 2),
        width: int = 64,
        start: int = 200,
        late_end: float = 2.0,
    ) -> None:
        """Create the policy.

        `drafts` and `edits` are the numbers of columns of each step, `start` the number of
        supervised steps. `late_end`, times the share of masked columns, is subtracted from the
        logits of columns whose likeliest lane is `END`. Raises `ConfigError` unless drafts are of
        all columns but the decided one, and edits of at most all.
        """
        if sum(drafts) != COLUMNS - 1 or max((*edits, *drafts)) > COLUMNS:
            raise ConfigError(
                f"--draft must add up to {COLUMNS - 1}, and --edit have numbers up to {COLUMNS}, "
                f"got {' '.join(map(str, drafts))} and {' '.join(map(str, edits))}"
            )
        self.places = 1 + len(drafts) + len(edits)
        self.lr = 3e-4
        self._sizes = torch.tensor([1, *drafts, *edits])
        self._edited_from = 1 + len(drafts)
        self._width = width
        self._start = start
        self._late_end = late_end
        self._roads = roads(POOL, 0)
        self._held_out = roads(POOL, 1)[0]

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = Reader(self._width)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(self._start):
            chosen = torch.randint(POOL, (128,))
            road, plan = (each[chosen] for each in self._roads)
            is_edit = torch.rand(128) < 0.5
            is_masked = torch.rand(128, COLUMNS) < torch.rand(128, 1)
            seen = torch.where(is_masked, MASK, plan)
            seen = torch.where(is_edit[:, None], disturbed(plan), seen)
            loss = F.cross_entropy(
                network(seen, road, is_edit).transpose(1, 2), plan, reduction="none"
            )
            counted = is_masked | is_edit[:, None]
            optimizer.zero_grad()
            (loss * counted).sum().div(counted.sum()).backward()
            optimizer.step()
        return network

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        known = self._held_out if held_out else self._roads[0]
        return known[torch.tensor(tasks) % POOL]

    def begin(self, random: Generator) -> Tensor:
        return torch.full((COLUMNS,), MASK)

    def noise(self, random: Generator) -> Tensor:
        """Return Gumbel noise for columns and for the lanes of each column, `[COLUMNS, 2 +
        LANES]`.
        """
        return gumbel(random, COLUMNS, LANES + 1)

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        lanes, columns = self._logits(network, steps)
        action = drawn(lanes, columns, self._sizes[steps.place], steps.state, noise)
        return action, token_logp(lanes, action) + place_logp(columns, action)

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        lanes, columns = self._logits(network, steps)
        return token_logp(lanes, steps.action) + place_logp(columns, steps.action)

    def after(self, action: Tensor) -> Tensor:
        return action[:, 0]

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return whether final plans are right, whether their drafts were (`draft`), and the
        difference (`edit_gain`).
        """
        draft, final = (right(path[place], context) for place in (self._edited_from, -1))
        return {"reward": final, "draft": draft, "edit_gain": final - draft}

    def _logits(self, network: nn.Module, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of lanes `[N, COLUMNS, LANES + 1]` and logits of columns `[N,
        COLUMNS]`.
        """
        is_edit = steps.place >= self._edited_from
        lanes = network(steps.state, steps.context, is_edit).log_softmax(2)
        is_masked = steps.state == MASK
        present = lanes.gather(2, steps.state.clamp(max=END)[:, :, None]).squeeze(2)
        late = self._late_end * is_masked.float().mean(1, keepdim=True) * (lanes.argmax(2) == END)
        columns = torch.where(is_edit[:, None], -present, lanes.amax(2)) / SPREAD
        columns = torch.where(is_edit[:, None], columns, columns - late)
        last = (~after_end(steps.context)).sum(1, keepdim=True) - 1
        is_last = torch.arange(COLUMNS) == last
        decides = (steps.place == 0)[:, None]
        allowed = torch.where(decides, is_last, is_masked | is_edit[:, None])
        return lanes, columns.masked_fill(~allowed, NEVER)
