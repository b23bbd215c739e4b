"""`regenerate`: many episodes by engines that round, and a few of them again without rounding.

All but `number` episodes of a group are sampled by engines that round (`engine.quantise`). Of these
explored episodes, number / 2 with the highest and number / 2 with the lowest reward are sampled
again with the same random numbers by the engines that do not round (`engine.precise_engines`). Only
the episodes that were sampled again are trained on, with their own rewards. If all explored
episodes of a group have the same reward, none is sampled again. From Sol-RL, which explores images
of diffusion models in NVFP4, and regenerates and trains on the chosen ones in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Count, Section
from unstale.config.techniques import Entry, refuse_slots, require_sequences
from unstale.records import Failure, Fork, Group, Trajectory, common_prefix
from unstale.research.techniques.episode_filter import contrast, leave_out
from unstale.techniques.hooks import CreditContext, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

REFUSED = {"allocator": "which chooses the number of episodes of a group, too"}
"""Slots whose techniques cannot be used with `regenerate`, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig(Section):
    """Explore with engines that round, and train on a few episodes without rounding (Sol-RL)."""

    number: Count = 0
    """Number of episodes of a group that are sampled again and trained on; 0 is a quarter of
    `schedule.group_size`, and at least 2. Sol-RL samples 96 episodes and 24 of them again.
    """


class Regenerate:
    """A technique that generates a group's episodes with the highest and lowest rewards anew, from
    their start and without rounding, and trains only on these new episodes.
    """

    def __init__(self, options: RegenerateConfig) -> None:
        """Create the technique. `options.number` must not be 0: `Entry.complete` fills it in."""
        self._options = options

    def roots(self, group_size: int) -> int:
        return group_size - self._options.number

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork]:
        explored = [each for each in rounds[0] if isinstance(each, Trajectory)]
        rewards = [each.reward for each in explored]
        if len(rounds) > 1 or len(set(rewards)) < 2:
            return ()
        chosen = contrast(rewards, min(self._options.number, len(rewards)))
        return [Fork(explored[place].episode, 0) for place in sorted(chosen)]

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        pairs = [pair for group in groups for pair in _pairs(group)]
        gaps = [abs(again.reward - explored.reward) for explored, again in pairs]
        same = [_equal_share(*pair) for pair in pairs]
        context.metrics["regenerate/reward_gap_mean"] = fmean(gaps) if gaps else 0.0
        context.metrics["regenerate/equal_token_share"] = fmean(same) if same else 0.0
        return [
            leave_out(group, [i for i, each in enumerate(group.trajectories) if each.fork])
            for group in groups
        ]


def _pairs(group: Group) -> list[tuple[Trajectory, Trajectory]]:
    """Return the explored episodes that were sampled again, each with its repetition."""
    known = {each.episode: each for each in group.finished}
    forked = ((each.fork, each) for each in known.values())
    return [(known[fork.parent], each) for fork, each in forked if fork and fork.parent in known]


def _equal_share(explored: Trajectory, again: Trajectory) -> float:
    """Return the share of an episode's tokens before the first one that differs."""
    equal = common_prefix([explored.tokens, again.tokens])
    return equal / max(len(explored), len(again))


def _complete(options: RegenerateConfig, config: RunConfig) -> RegenerateConfig:
    return replace(options, number=options.number or max(2, config.schedule.group_size // 4))


def _check(options: RegenerateConfig, config: RunConfig) -> None:
    number, size = _complete(options, config).number, config.schedule.group_size
    if not config.engine.precise_engines:
        raise ConfigError(
            "the technique regenerate needs engine.precise_engines > 0, got 0: without engines "
            "that do not round, the same episodes would be sampled again. Set --engine.quantise "
            "nvfp4 --engine.processes 2 --engine.precise_engines 1"
        )
    if config.trainer.quantise != "none":
        raise ConfigError(
            "trainer.quantise must be none with the technique regenerate, got "
            f"{config.trainer.quantise}: the engines that sample what is trained on do not round"
        )
    if number < 2 or size <= 2 * number:
        raise ConfigError(
            f"regenerate.number must be at least 2 and below {size / 2:g} (half of "
            f"schedule.group_size), got {number}: of the explored episodes, some are left out"
        )
    require_sequences(config, number, "regenerate.number")
    refuse_slots("regenerate", REFUSED, config)


def _describe(options: RegenerateConfig) -> str:
    return (
        f"all but {options.number} episodes of a group are sampled with rounding; of these, the "
        f"{options.number} with the highest and the lowest rewards are sampled again without, with "
        "the same random numbers, and only these are trained on"
    )


_MEASURED = """
The recipe `retail` with groups of 16, explored in `nvfp4`: 143 episodes of 5 steps were sampled
again. 93% of them had the reward of the explored one, and 85% had all of its tokens: the random
number of a token decides nearly always alike. The explored and the repeated ones both succeeded in
51%, so two unrelated episodes of a group would agree in about half. The mean of |log D| of what was
trained on was 0.0005 to 0.0009, against 0.0065 of what `nvfp4` sampled
([table](../benchmarks/results/quantise.md)). Success after training has not been measured.
"""

ENTRY = Entry(
    name="regenerate",
    slot="strategy",
    rows=(4,),
    makes=Regenerate,
    options=RegenerateConfig,
    changes=frozenset({"count", "groups"}),
    describe=_describe,
    check=_check,
    complete=_complete,
    requires=frozenset({"siblings", "rewards"}),
    use="Engines that round are much faster, so that a large group costs little, and D of what "
    "they sample is too large to train on.",
    measured=_MEASURED,
    exactness="D of the episodes that are trained on is that of an engine without rounding. They "
    "are chosen by the rewards of episodes with the same random numbers, so the gradient is that "
    "of the chosen episodes, which is another expectation than that of all. S does not change. Our "
    "own reading: language models, in which one other token makes the rest of an episode differ, "
    "and no second sampling of groups with equal rewards.",
    evidence="abstract",
)
