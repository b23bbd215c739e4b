"""The environment `bfcl:CATEGORY`: its options. The adapter itself needs the package bfcl-eval."""

from dataclasses import dataclass
from typing import ClassVar

from unstale.config import TaskConfig
from unstale.config.checks import Share
from unstale.config.tasks import EnvSpec
from unstale.envs import Taskset
from unstale.envs.registry import make_with_library


@dataclass(frozen=True, slots=True, kw_only=True)
class BfclConfig(TaskConfig):
    """The tasks of a category of the Berkeley Function Calling Leaderboard, version 4."""

    reward_names: ClassVar[tuple[str, ...]] = ("valid",)

    env: str = "bfcl:simple_python"
    """`bfcl:CATEGORY`, such as `bfcl:simple_python`, `bfcl:live_multiple` or
    `bfcl:multi_turn_base`.
    """
    held_out_share: Share = 0.25
    """Share of the tasks that are held out for evaluation. A hash of a task's id selects them."""

    @property
    def largest_reward(self) -> float:
        return 1.0


def _make(options: BfclConfig) -> Taskset:
    return make_with_library(options, held_out_share=options.held_out_share)


ENV = EnvSpec("bfcl", _make, BfclConfig, takes_source=True)
