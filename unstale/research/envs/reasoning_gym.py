"""The environment `reasoning-gym:NAME`: its options. The adapter needs the library."""

from dataclasses import dataclass
from typing import Literal

from unstale.config import TaskConfig
from unstale.config.tasks import EnvSpec
from unstale.envs import Taskset
from unstale.envs.registry import make_with_library


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(TaskConfig):
    """The puzzles of one or several data sets of reasoning-gym."""

    env: str = "reasoning-gym:chain_sum"
    """`reasoning-gym:NAME`, or several data sets in turn, as in `reasoning-gym:chain_sum+lcm`."""
    tool: Literal["none", "calculator"] = "none"
    """`calculator` lets the policy work out expressions before it answers. Its last reply is then
    the answer, without tags.
    """

    @property
    def largest_reward(self) -> float:
        return 1.0


def _make(options: ReasoningGymConfig) -> Taskset:
    return make_with_library(options, tool=options.tool)


ENV = EnvSpec("reasoning-gym", _make, ReasoningGymConfig, takes_source=True)
