"""The limit on turns that the commands `eval` and `serve` derive from the episodes of a run."""

from pathlib import Path

from unstale.config import ConfigError, RunConfig
from unstale.durability.journal import Journal, JournalError
from unstale.records import TurnLimit, count_turns
from unstale.techniques.limits import LimitsConfig, limit_at


def learned_limit(run: Path, config: RunConfig) -> TurnLimit:
    """Return a limit on turns: a quantile of the turns of the latest successes in a run's journal.

    Quantile and number of successes are options of the technique `limits` in `config`, or its
    defaults. Only groups without a limit count, as in training. Raises `ConfigError` if there are
    too few successes.
    """
    options = config.technique_options.get("limits") or LimitsConfig()
    assert isinstance(options, LimitsConfig)
    turns: list[int] = []
    try:
        with Journal.read(run) as journal:
            limited = journal.turn_limits()
            for (episode,) in journal.rows(
                "SELECT episode FROM trajectories ORDER BY episode DESC"
            ):
                stored = journal.episode(episode)
                is_own = stored.group not in limited and not stored.trajectory.fork
                if stored.trajectory.success and is_own:
                    turns.append(count_turns(stored.trajectory.pieces))
                if len(turns) == options.window:
                    break
    except (OSError, JournalError) as error:
        raise ConfigError(
            f"--limit-turns needs a run folder, whose successes decide the limit: {error}"
        ) from error
    if len(turns) < options.successes:
        raise ConfigError(
            f"--limit-turns needs {options.successes} successes (limits.successes) in groups "
            f"without a limit, and {run} has {len(turns)}. Train longer, or set --techniques "
            f"limits --limits.successes {max(1, len(turns))}"
        )
    return limit_at(turns, options)
