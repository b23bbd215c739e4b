"""The forecast of success with which a run pruned episodes, to weigh attempts (ARRoL)."""

from itertools import islice
from pathlib import Path
from typing import Self

from unstale.config import ConfigError, RunConfig
from unstale.durability.journal import Journal, JournalError
from unstale.records import Trajectory
from unstale.research.techniques.live_tree import WINDOW, ForecastTree
from unstale.research.techniques.tree import TreeConfig
from unstale.techniques.hooks import Leaf


class QualityHead:
    """A forecast of the success of an episode, from the signals of its first sampled tokens."""

    def __init__(self, tree: ForecastTree) -> None:
        self._tree = tree

    @classmethod
    def of(cls, run: Path, config: RunConfig) -> Self:
        """Fit the forecast to the latest episodes of a run, as the run itself did.

        Raises `ConfigError` unless the run pruned episodes by forecasts.
        """
        options = config.technique_options.get("tree")
        if not isinstance(options, TreeConfig) or options.prune != "mixed":
            raise ConfigError(
                "--weigh needs a run that forecast the success of its episodes: train with "
                "--techniques 'tree tree_advantage' --tree.branch none --tree.prune mixed"
            )
        tree = ForecastTree(options)
        try:
            with Journal.read(run) as journal:
                rows = journal.rows("SELECT episode FROM trajectories ORDER BY episode DESC")
                latest = [journal.episode(episode) for (episode,) in islice(rows, 2 * WINDOW)]
        except (OSError, JournalError) as error:
            raise ConfigError(f"--weigh needs a run folder: {error}") from error
        if not tree.learn(each.trajectory for each in reversed(latest)):
            raise ConfigError(f"--weigh: {run} has no graded episode with signals. Train longer")
        return cls(tree)

    def chance(self, attempt: Trajectory) -> float:
        return self._tree.chance(Leaf(0, attempt.episode, attempt.pieces))
